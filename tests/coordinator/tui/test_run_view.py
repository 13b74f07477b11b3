"""`swarm-coordinator top`: what stands on the screen, and what is read from the run's folder."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from kits.tui import FORMS, Script, Session, drive, press, screen, settle, walk
from kits.tui.run import ANNA, run
from swarm_coordinator.cli.main import run as command
from swarm_coordinator.cli.top import PROGRAM
from swarm_coordinator.status.document import RunDocument
from swarm_coordinator.tui.app import RunApp
from swarm_coordinator.tui.run_source import LOOK_SECONDS, RunFolderReader, RunFolderSource
from swarm_shared.base.errors import StorageError
from swarm_shared.tui.recording import Recorder, Replay
from swarm_shared.tui.source import DocumentReceived, SourceLost
from swarm_shared.tui.terminal_style import Look

PANES = ("overview", "pipeline", "contributors", "events", "admission")


def watch(
    session: Session, *documents: RunDocument, columns: int = 80, rows: int = 24,
    look: Look | None = None,
) -> Script[RunDocument]:  # fmt: skip
    script: Script[RunDocument] = Script()
    for document in documents:
        script.clock = document.time
        script.tell(document)
    drive(RunApp(script, look or Look()), session, columns, rows)
    return script


@pytest.mark.parametrize("form", FORMS)
def test_every_pane_looks_as_it_did(form: str) -> None:
    columns, rows, look = FORMS[form]
    watch(walk("run", PANES, form), run(), columns=columns, rows=rows, look=look)


@pytest.mark.parametrize(
    ("changes", "state", "sentence"),
    [
        ({}, "healthy", "Every stage has reachable peers."),
        ({"running": False}, "stopped", "The coordinator does not run."),
        (
            {"health": {"state": "degraded", "sentence": "No reachable peer holds stage 1."}},
            "degraded",
            "No reachable peer holds stage 1.",
        ),
    ],
)
def test_the_head_shows_the_health_and_its_reason(
    changes: dict[str, Any], state: str, sentence: str
) -> None:
    async def session(pilot: Pilot[None]) -> None:
        shown = screen(pilot)
        assert state in shown.splitlines()[0]
        assert sentence in shown

    watch(session, run(**changes))


def test_who_came_and_who_went_is_counted_while_the_view_is_open() -> None:
    others = run().model_dump()["peers"][1:]
    new = {**others[0], "peer": "12D3KooWemilemil"}

    async def session(pilot: Pilot[None]) -> None:
        assert "2 came, 1 went while this view is open" in screen(pilot)

    more = [*others, new, {**new, "peer": ANNA}]
    watch(session, run(0), run(1, peers=others), run(2, peers=more), columns=120)


def test_a_finished_run_is_shown_as_it_ended_however_long_ago_that_was() -> None:
    async def session(pilot: Pilot[None]) -> None:
        script.clock += 86_400
        await settle(pilot)
        shown = screen(pilot)
        assert shown.splitlines()[0].startswith("● finished  my-run")
        assert "as it was" not in shown

    script: Script[RunDocument] = Script()
    health = {"state": "finished", "sentence": "All 100 steps are applied."}
    script.tell(run(phase="finished", running=False, health=health))
    drive(RunApp(script, Look()), session)


# ---------------------------------------------------------------- the run's folder


def folder_with(tmp_path: Path, document: dict[str, Any] | None) -> Path:
    """The folder of a run, without the parts that a view does not need."""
    path = tmp_path / "a run"
    path.mkdir()
    (path / "run.toml").write_text("")
    (path / "manifest.json").write_text("")
    (path / "organiser.key").write_text("")
    (path / "data").mkdir()
    if document is not None:
        (path / "status.json").write_text(json.dumps(document))
    return path


def told(**changes: Any) -> dict[str, Any]:
    document = run().model_dump(mode="json", exclude={"history", "notes", "contributors"})
    return {**document, "pid": os.getpid(), **changes}


def test_a_status_of_a_process_that_lives_is_of_a_run_that_runs(tmp_path: Path) -> None:
    document, _, _ = RunFolderReader(folder_with(tmp_path, told())).read()
    assert document.running
    assert document.run == "my-run"
    assert len(document.peers) == 3


def test_a_status_of_a_process_that_is_gone_is_of_a_run_that_stands(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    document, _, _ = RunFolderReader(folder_with(tmp_path, told(pid=child))).read()
    assert not document.running


def test_a_run_whose_history_cannot_be_read_is_shown_all_the_same_and_says_why(
    tmp_path: Path,
) -> None:
    path = folder_with(tmp_path, told())
    (path / "run.toml").write_text("this is no TOML")
    document, trouble, _ = RunFolderReader(path).read()
    assert document.version == 40
    assert "run.toml" in trouble


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "status.json"),
        ("[]", "status.json"),
        ('{"run": 5}', "is not a status of this version"),
    ],
)
def test_a_damaged_status_is_told_in_a_sentence(tmp_path: Path, content: str, words: str) -> None:
    path = folder_with(tmp_path, None)
    (path / "status.json").write_text(content)
    with pytest.raises(StorageError, match=words):
        RunFolderReader(path).read()


class FakeReader(RunFolderReader):
    """Tells what a test wants in place of the folder."""

    def __init__(self, *answers: tuple[RunDocument, str, float] | StorageError) -> None:
        super().__init__(Path("a-run"))
        self.answers = list(answers)

    def read(self) -> tuple[RunDocument, str, float]:
        answer = self.answers.pop(0)
        if isinstance(answer, StorageError):
            raise answer
        return answer


def follow(
    *answers: tuple[RunDocument, str, float] | StorageError,
) -> tuple[list[Any], list[float]]:
    rests: list[float] = []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    async def collect() -> list[Any]:
        source = RunFolderSource(Path("a-run"), FakeReader(*answers), sleep)
        events = source.events()
        return [await anext(events) for _ in answers]

    return asyncio.run(collect()), rests


def test_the_view_rests_longer_the_longer_it_reads() -> None:
    _, rests = follow((run(), "", 0.001), (run(), "", 0.1), (run(), "", 60.0), (run(), "", 0.0))
    assert rests == [LOOK_SECONDS, 5.0, 15.0]


def test_a_coordinator_that_does_not_run_is_told_with_the_command_that_starts_it() -> None:
    [seen], _ = follow((run(running=False), "", 0.0))
    assert isinstance(seen, DocumentReceived)
    assert seen.away == "The coordinator does not run; `swarm-coordinator start a-run` starts it"


def test_a_status_that_cannot_be_read_now_is_tried_again() -> None:
    events, _ = follow(StorageError("the status is damaged"), (run(), "", 0.0))
    assert isinstance(events[0], SourceLost)
    assert isinstance(events[1], DocumentReceived)


# ---------------------------------------------------------------- recordings


def recorded(file: Path, *documents: RunDocument) -> None:
    recorder = Recorder(file, PROGRAM, lambda: documents[0].time)
    for document in documents:
        recorder.note(DocumentReceived(document.time, document))
    recorder.close()
    assert recorder.trouble == ""


def test_a_recording_shows_every_pane_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "a recording"
    told = [run(number, version=40 + number, cells_done=number) for number in range(3)]
    recorded(file, *told)
    shown: list[list[str]] = []

    async def session(pilot: Pilot[None]) -> None:
        for key in "12345":
            await press(pilot, key)
            shown.append(screen(pilot).splitlines()[2:])

    async def at_once(seconds: float) -> None:
        pass

    watch(session, *told)
    drive(RunApp(Replay(file, PROGRAM, RunDocument, at_once), Look()), session)
    assert shown[: len(PANES)] == shown[len(PANES) :]


def test_a_recording_tells_of_each_status_what_is_new_in_it(tmp_path: Path) -> None:
    file = tmp_path / "a recording"
    recorded(file, run(0), run(1))
    _, first, second = map(json.loads, file.read_text().splitlines())
    assert len(first["status"]["history"]) == 40
    assert set(second["status"]) == {"time"}


# ---------------------------------------------------------------- the command


def test_without_a_terminal_the_command_names_the_one_that_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(["top", str(tmp_path)]) == 2
    assert "use `swarm-coordinator status` here" in capsys.readouterr().err


def test_the_command_wants_a_run_or_a_recording(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(["top"]) == 2
    assert command(["top", str(tmp_path), "--replay", "x"]) == 2
    assert "--replay FILE" in capsys.readouterr().err
