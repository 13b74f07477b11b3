"""`swarm-coordinator top`: what stands on the screen, and what is read from the run's folder."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from textual.geometry import Offset
from textual.pilot import Pilot
from textual.widgets import Input

from kits.coordinator import run as run_kit
from kits.coordinator.shell_world import make_run
from kits.tui import FORMS, Script, Session, drive, press, screen, settle, walk
from kits.tui.run import ANNA, BERT, CARL, peer, run
from swarm_coordinator.cli.main import run as command
from swarm_coordinator.cli.top import PROGRAM, change
from swarm_coordinator.durability.run_files import read_admission_book
from swarm_coordinator.status.document import RunDocument
from swarm_coordinator.tui.app import RunApp
from swarm_coordinator.tui.run_source import LOOK_SECONDS, RunFolderReader, RunFolderSource
from swarm_shared.base.errors import StorageError, UsageError
from swarm_shared.identity.keys import Identity
from swarm_shared.tui.recording import Recorder, Replay
from swarm_shared.tui.source import DocumentReceived, SourceLost
from swarm_shared.tui.terminal_style import Look

# Half a minute of them: with the slow tests, which plain pytest leaves out.
pytestmark = pytest.mark.process

PANES = ("overview", "pipeline", "peers", "contributors", "events", "admission", "bans")
PEERS_PANE, CONTRIBUTORS_PANE, BANS_PANE = "3", "4", "7"


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


def test_what_the_model_writes_is_one_printable_line() -> None:
    async def session(pilot: Pilot[None]) -> None:
        shown = screen(pilot)
        assert "held-out 2.5000 after step 30" in shown
        assert "it writes   def f(self): return self.x" in shown

    evaluation = {
        "version": 30, "heldout_loss": 2.5, "tokens": 64,
        "sample": "def f(self):\n    return self.x\n",
    }  # fmt: skip
    watch(session, run(evaluation=evaluation), columns=120)


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


# ---------------------------------------------------------------- tables

DORA = "12D3KooWdoradora"


def order(pilot: Pilot[None]) -> list[str]:
    """The peers of the table on the screen, from the top."""
    names = ("anna", "bert", "carl", "emil")
    rows = [line.lower() for line in screen(pilot).splitlines()[4:-1]]
    return [name for row in rows for name in names if f"{name * 2}" in row]


def test_a_column_sorts_the_table_and_turns_it_round() -> None:
    peers = [
        peer(ANNA, 1, microbatches_per_second=2.0), peer(BERT, 0, microbatches_per_second=10.0),
        peer(CARL, 0, microbatches_per_second=9.5),
    ]  # fmt: skip

    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, PEERS_PANE)
        assert order(pilot) == ["bert", "carl", "anna"]  # by stage
        await press(pilot, "S")
        assert order(pilot) == ["anna", "bert", "carl"]
        await press(pilot, "s", "s")
        assert order(pilot) == ["bert", "carl", "anna"]  # by rate, as numbers
        assert "microb./s ▼" in screen(pilot)
        head = screen(pilot).splitlines()[3]
        await pilot.click(offset=Offset(head.index("peer"), 3))
        await settle(pilot)
        assert order(pilot) == ["anna", "bert", "carl"]
        await pilot.click(offset=Offset(head.index("peer"), 3))
        await settle(pilot)
        assert order(pilot) == ["carl", "bert", "anna"]

    watch(session, run(peers=peers))


def test_the_cursor_stays_with_its_peer_when_others_come_and_go() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, PEERS_PANE, "down", "down")
        assert chosen(pilot) == CARL
        everyone = run().model_dump()["peers"]
        script.tell(run(1, peers=[*everyone, peer("12D3KooWemilemil", 0)]))
        await settle(pilot)
        assert order(pilot) == ["anna", "bert", "emil", "carl"]
        assert chosen(pilot) == CARL
        script.tell(run(2, peers=everyone[:2]))
        await settle(pilot)
        assert order(pilot) == ["anna", "bert"]
        assert chosen(pilot) == BERT
        script.tell(run(3, peers=[]))
        await settle(pilot)
        await press(pilot, "b", "enter")
        assert order(pilot) == []
        assert script.asked == []

    script: Script[RunDocument] = Script()
    script.tell(run())
    drive(RunApp(script, Look()), session)


def chosen(pilot: Pilot[None]) -> str:
    view = pilot.app
    assert isinstance(view, RunApp)
    assert view.shown_table is not None
    assert view.shown_table.chosen is not None
    return view.shown_table.chosen.peer


def test_a_rate_that_changes_is_drawn_in_its_row() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, PEERS_PANE)
        script.tell(run(1, peers=[peer(ANNA, 0, microbatches_per_second=12345.0)]))
        script.tell(run(2, peers=[peer(ANNA, 0, microbatches_per_second=54321.0)]))
        await settle(pilot)
        assert "54,321" in screen(pilot)
        assert "12,345" not in screen(pilot)

    script: Script[RunDocument] = Script()
    script.tell(run())
    drive(RunApp(script, Look()), session)


def test_a_table_that_goes_while_the_view_closes_is_not_drawn() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, BANS_PANE)
        assert view.shown_table is not None
        await view.shown_table.remove()
        view.show()
        assert view.shown_table is None

    script: Script[RunDocument] = Script()
    script.tell(run())
    view = RunApp(script, Look())
    drive(view, session)


def test_enter_shows_the_whole_row() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, PEERS_PANE, "down", "enter")
        shown = screen(pilot)
        assert BERT in shown
        assert "flagged 2x: gradients were not finite" in shown
        assert "81.2 ms" in shown
        await press(pilot, "enter")
        assert BERT not in screen(pilot)

    watch(session, run())


class Telling(RunApp):
    """Keeps what it says; a notice on the screen goes after seconds, however busy the machine."""

    def __init__(self, script: Script[RunDocument]) -> None:
        super().__init__(script, Look())
        self.said: list[tuple[str, bool]] = []

    def say(self, text: str, *, bad: bool = False) -> None:
        self.said.append((text, bad))
        super().say(text, bad=bad)


def test_a_ban_asks_for_a_reason_and_then_whether_it_is_meant() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, "b")  # no table, no ban
        await press(pilot, PEERS_PANE, "down", "b")
        await press(pilot, *"lies", "enter")
        shown = screen(pilot)
        assert f"{BERT} is excluded" in " ".join(shown.split())
        assert script.asked == []
        await press(pilot, "y")
        assert script.asked == [("ban", {"peer": BERT, "reason": "lies"})]
        assert view.said == [("banned it", False), ("note: its owner can come back", False)]

    script: Script[RunDocument] = Script()
    script.answers["ban"] = {"text": "banned it", "warning": "its owner can come back"}
    script.tell(run())
    view = Telling(script)
    drive(view, session)


@pytest.mark.parametrize("keys", [("b", "escape"), ("b", "enter", "n"), ("b", "enter", "enter")])
def test_a_ban_that_is_not_confirmed_is_none(keys: tuple[str, ...]) -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, PEERS_PANE)
        for key in keys:
            await press(pilot, key)
        assert "Ban" not in screen(pilot).splitlines()[10]

    assert watch(session, run()).asked == []


def test_a_refused_ban_is_told_and_a_reason_that_is_too_long_is_not_sent() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, CONTRIBUTORS_PANE, "b")
        view.screen.query_one("#value", Input).value = "x" * 1000
        await press(pilot, "enter")
        assert "A reason has at most" in screen(pilot)
        view.screen.query_one("#value", Input).value = ""
        await press(pilot, "enter")
        await press(pilot, "y")
        assert script.asked == [("ban", {"peer": CARL, "reason": ""})]
        assert view.said == [("no coordinator answers", True)]

    script: Script[RunDocument] = Script()
    script.answers["ban"] = UsageError("no coordinator answers")
    script.tell(run())
    view = Telling(script)
    drive(view, session)


def test_a_ban_is_lifted_from_its_row() -> None:
    async def session(pilot: Pilot[None]) -> None:
        await press(pilot, BANS_PANE, "b")
        assert "cheats" in screen(pilot)
        await press(pilot, "u")
        await press(pilot, "y")
        assert script.asked == [("unban", {"peer": DORA})]

    script: Script[RunDocument] = Script()
    script.answers["unban"] = {"text": "it is not banned any more"}
    script.tell(run())
    drive(RunApp(script, Look()), session)


def test_a_ban_from_the_view_is_the_commands_ban(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    run_kit.with_a_past(folder)
    peer_id = Identity.generate().peer_id
    source = RunFolderSource(folder.path, partial(change, folder.path))
    answer = asyncio.run(source.act("ban", {"peer": peer_id, "reason": "lies"}))
    assert answer["text"].startswith(f"banned {peer_id}; no coordinator is running")
    assert read_admission_book(folder).bans[peer_id].reason == "lies"
    asyncio.run(source.act("unban", {"peer": peer_id}))
    assert read_admission_book(folder).bans == {}
    with pytest.raises(UsageError, match="is not banned"):
        asyncio.run(source.act("unban", {"peer": peer_id}))


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


def no_change(method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
    raise AssertionError("nothing was to be changed")


def follow(
    *answers: tuple[RunDocument, str, float] | StorageError,
) -> tuple[list[Any], list[float]]:
    rests: list[float] = []

    async def sleep(seconds: float) -> None:
        rests.append(seconds)

    async def collect() -> list[Any]:
        source = RunFolderSource(Path("a-run"), no_change, FakeReader(*answers), sleep)
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
        for key in "1234567":
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
