"""Recordings of a view: the same events again, and a sentence for a file that is none."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from swarm_shared.base.errors import DataError, StorageError, SwarmError, UsageError, VersionError
from swarm_shared.tui import recording
from swarm_shared.tui.recording import LONGEST_WAIT_SECONDS, Recorder, Replay
from swarm_shared.tui.source import DocumentReceived, Event, LogEntry, LogReceived, SourceLost

START = 1_790_000_000.0
PROGRAM = "swarm-client top"
FIRST = {"recording": PROGRAM, "format": 1, "started_at": START}


class Told(BaseModel):
    word: str


def seen() -> list[Event[Told]]:
    entry = LogEntry(time=START, level="event", text="…bert came", number=1)
    return [
        DocumentReceived(START + 0.5, Told(word="syncing")),
        LogReceived(START + 2.0, (entry,)),
        SourceLost(START + 3.25, "nobody answers"),
        DocumentReceived(START + 100.0, Told(word="contributing")),
    ]


def record(path: Path, events: list[Event[Told]]) -> Recorder:
    recorder = Recorder(path, PROGRAM, lambda: START)
    for event in events:
        recorder.note(event)
    recorder.close()
    return recorder


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "session"


@pytest.fixture
def recorded(path: Path) -> Path:
    """A recording of `seen()`."""
    record(path, seen())
    return path


def replay(path: Path, waits: list[float] | None = None, speed: float = 1.0) -> list[Event[Told]]:
    async def sleep(seconds: float) -> None:
        if waits is not None:
            waits.append(seconds)

    async def collect() -> list[Event[Told]]:
        source = Replay(path, PROGRAM, Told, sleep)
        source.speed = speed
        return [event async for event in source.events()]

    return asyncio.run(collect())


def test_a_replay_tells_what_was_seen_and_says_where_it_ends(recorded: Path) -> None:
    *told, end = replay(recorded)
    assert told == seen()
    assert isinstance(end, SourceLost)
    assert "the recording ends here" in end.sentence


def test_it_keeps_the_pace_and_skips_what_was_quiet_for_long(recorded: Path) -> None:
    waits: list[float] = []
    replay(recorded, waits)
    assert waits == [0.5, 1.5, 1.25, LONGEST_WAIT_SECONDS]
    faster: list[float] = []
    replay(recorded, faster, speed=4.0)
    assert faster == [wait / 4 for wait in waits]


def test_the_clock_of_a_replay_is_the_recordings(recorded: Path) -> None:

    async def nothing(seconds: float) -> None: ...

    async def times() -> list[float]:
        source = Replay(recorded, PROGRAM, Told, nothing)
        return [source.now() async for _ in source.events()]

    assert asyncio.run(times())[:2] == [START + 0.5, START + 2.0]


def test_a_replay_that_is_held_goes_on_when_it_is_let_go(recorded: Path) -> None:

    async def nothing(seconds: float) -> None: ...

    async def session() -> None:
        source = Replay(recorded, PROGRAM, Told, nothing)
        source.hold(True)
        told: list[Event[Told]] = []

        async def read() -> None:
            async for event in source.events():
                told.append(event)

        reading = asyncio.create_task(read())
        for _ in range(10):
            await asyncio.sleep(0)
        assert told == []
        source.hold(False)
        await reading
        assert len(told) == 5

    asyncio.run(session())


def test_time_does_not_go_back_in_a_recording_when_the_clock_is_set_back(path: Path) -> None:
    record(path, [SourceLost(START + 5, "a"), SourceLost(START + 1, "b")])
    assert [event.at for event in replay(path)[:2]] == [START + 5, START + 5]


def test_only_the_owner_may_read_a_recording_and_none_is_overwritten(recorded: Path) -> None:
    assert stat.S_IMODE(recorded.stat().st_mode) == 0o600
    with pytest.raises(UsageError, match="is there already"):
        record(recorded, [])


def test_a_recording_cannot_be_put_where_there_is_no_folder(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        record(tmp_path / "none" / "session", [])


def test_a_full_disk_ends_the_recording_and_what_was_written_still_replays(
    path: Path, files_no_larger_than: Callable[[int], AbstractContextManager[None]]
) -> None:
    with files_no_larger_than(1000):
        recorder = record(
            path, [SourceLost(START, "x" * 700), SourceLost(START, "y" * 700), *seen()]
        )
    assert "ends here" in recorder.trouble
    with pytest.raises(DataError, match="line 3"):
        replay(path)


def test_a_recording_that_has_become_too_long_ends(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_RECORDING_BYTES", 300)
    recorder = record(path, seen() * 10)
    assert "is full and ends here" in recorder.trouble
    assert path.stat().st_size <= 300
    assert len(replay(path)) >= 2


BODIES: list[tuple[Any, str]] = [
    ("no json", "line 2"),
    ([1, 2], "line 2"),
    ({"seconds": 1.0}, "one of status, log and away"),
    ({"seconds": 1.0, "away": "a", "log": []}, "one of status, log and away"),
    ({"seconds": -1.0, "away": "a"}, "seconds"),
    ({"seconds": "1", "away": 5}, "away"),
    ({"seconds": 1.0, "away": "a", "more": 1}, "more"),
    ({"seconds": 1.0, "status": {"word": 5}}, "word"),
    ({"seconds": 1.0, "log": [{"time": 1.0}]}, "log"),
]


@pytest.mark.parametrize(("body", "words"), BODIES)
def test_a_damaged_line_is_named(path: Path, body: Any, words: str) -> None:
    line = body if isinstance(body, str) else json.dumps(body)
    path.write_text(f"{json.dumps(FIRST)}\n{line}\n")
    with pytest.raises(DataError, match=words):
        replay(path)


def test_time_that_goes_back_in_a_file_is_refused(path: Path) -> None:
    lines = [FIRST, {"seconds": 2.0, "away": "a"}, {"seconds": 1.0, "away": "b"}]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    with pytest.raises(DataError, match=r"line 3 .* goes back"):
        replay(path)


def test_a_line_longer_than_any_event_is_refused_before_it_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "MAX_LINE_BYTES", 200)
    path.write_text(f"{json.dumps(FIRST)}\n{'x' * 1000}\n")
    with pytest.raises(DataError, match="longer than 200 bytes"):
        replay(path)


def test_what_stays_as_it_was_is_told_once_and_a_word_beside_a_status_is_kept(
    path: Path,
) -> None:
    class Two(BaseModel):
        word: str
        steps: tuple[int, ...]

    told: list[Event[Two]] = [
        DocumentReceived(START, Two(word="a", steps=(1, 2))),
        DocumentReceived(START + 1, Two(word="b", steps=(1, 2)), "it has ended"),
        DocumentReceived(START + 2, Two(word="b", steps=())),
    ]
    recorder = Recorder(path, PROGRAM, lambda: START)
    for event in told:
        recorder.note(event)
    recorder.close()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines[2] == {"seconds": 1.0, "status": {"word": "b"}, "away": "it has ended"}

    async def collect() -> list[Event[Two]]:
        async def at_once(seconds: float) -> None:
            pass

        return [event async for event in Replay(path, PROGRAM, Two, at_once).events()]

    assert asyncio.run(collect())[:3] == told


@pytest.mark.parametrize(
    ("first", "kind", "words"),
    [
        ({}, DataError, "is no recording"),
        ({**FIRST, "recording": "something else"}, DataError, "something else"),
        ({**FIRST, "format": 3}, VersionError, "format 3"),
        ({**FIRST, "started_at": None}, DataError, "is no recording"),
    ],
)
def test_a_file_that_is_no_recording_of_this_program_is_refused_at_once(
    path: Path, first: dict[str, Any], kind: type[SwarmError], words: str
) -> None:
    path.write_text(json.dumps(first))
    with pytest.raises(kind, match=words):
        Replay(path, PROGRAM, Told)


def test_a_recording_that_is_not_there_is_told_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be read"):
        Replay(tmp_path / "none", PROGRAM, Told)


def test_nothing_can_be_changed_in_a_recording(recorded: Path) -> None:
    with pytest.raises(UsageError, match="recording"):
        asyncio.run(Replay(recorded, PROGRAM, Told).act("pause", {}))
