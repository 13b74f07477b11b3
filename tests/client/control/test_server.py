"""The control socket: versions, bounds, streams, refusals. The daemon behind it has no run."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio

from kits.local_socket import first_answer
from kits.waiting import until
from swarm_client.control import client
from swarm_client.control.client import NoDaemon, ask, is_running, log_lines, stream
from swarm_client.control.known_runs import StoredRuns
from swarm_client.control.known_runs import write as write_runs
from swarm_client.control.messages import (
    ErrorReport,
    JoinArguments,
    error_from_report,
    error_report_of,
)
from swarm_client.control.server import ControlSocketServer
from swarm_client.control.status_document import API_VERSION, DaemonState, Status
from swarm_client.daemon.daemon import Daemon, run_daemon
from swarm_client.machine.home import Home
from swarm_shared.base import errors
from swarm_shared.base.errors import (
    ConfigurationError,
    DaemonError,
    InviteError,
    StorageError,
    SwarmError,
    UsageError,
    VersionError,
)
from swarm_shared.base.local_server import LocalServerConnection, serve_lines

ROOT = Path(__file__).parents[3]


class Scene:
    def __init__(self, daemon: Daemon, now: list[float]) -> None:
        self.daemon, self.home, self._now = daemon, daemon.home, now

    def later(self, seconds: float) -> None:
        self._now[0] += seconds

    async def ask(self, method: str, **arguments: Any) -> dict[str, Any]:
        return await trio.to_thread.run_sync(
            partial(ask, self.home.socket_path, method, **arguments)
        )

    async def status(self) -> Status:
        return Status.model_validate(await self.ask("status"))


@asynccontextmanager
async def scene(tmp_path: Path, book: StoredRuns | None = None) -> AsyncIterator[Scene]:
    home = Home.create(tmp_path / "h")
    if book is not None:
        write_runs(home.runs_path, book)
    now = [1_000_000.0]
    daemon = Daemon(home, lambda line: None, wall_clock=lambda: now[0])
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(daemon.run, None, resume=False))
        while not await trio.to_thread.run_sync(is_running, home.socket_path):
            await trio.sleep(0.01)
        yield Scene(daemon, now)
        nursery.cancel_scope.cancel()


async def test_a_daemon_without_a_run_reports_it_and_its_socket_is_private(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        status = await s.status()
        assert (status.state, status.api) == (DaemonState.STOPPED, API_VERSION)
        assert "join INVITE" in status.sentence
        assert status.machine.memory_total_bytes > 0
        assert stat.S_IMODE(s.home.socket_path.stat().st_mode) == 0o600
    assert not is_running(s.home.socket_path)


@pytest.mark.parametrize("api", [2, 0, "1", None])
async def test_a_question_of_another_version_is_refused_with_both_named(
    tmp_path: Path, api: object
) -> None:
    async with scene(tmp_path) as s:
        question = {"api": api, "method": "status", "whatever": "the other version likes"}
        answer = json.loads(
            await first_answer(s.home.socket_path, json.dumps(question).encode() + b"\n")
        )
        problem = answer["error"]
        assert problem["exit_code"] == VersionError.exit_code
        assert f"version {api} of" in problem["seen"]
        assert f"version {API_VERSION}" in problem["seen"]
        assert "swarm-client shutdown" in problem["remedy"]


async def test_a_newer_file_is_refused_in_its_own_words(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        (s.home.path / "preferences.toml").write_text("version = 99\n")
        with pytest.raises(VersionError, match="written by a newer swarm-client"):
            await s.ask("config_set", name="nice", text="5")


@pytest.mark.parametrize(
    ("method", "arguments", "told"),
    [
        ("dance", {}, "there is no method 'dance'"),
        ("pause", {"seconds": -1}, "seconds"),
        ("pause", {"hours": 1}, "hours"),
        ("status", {"verbose": True}, "verbose"),
        ("log", {"after": -1}, "after"),
        ("choose_run", {"run": "x"}, "no run has been joined"),
        ("config_show", {"name": "nice"}, "name"),
    ],
)
async def test_what_cannot_be_asked_is_a_usage_error_that_names_it(
    tmp_path: Path, method: str, arguments: dict[str, Any], told: str
) -> None:
    async with scene(tmp_path) as s:
        with pytest.raises(UsageError, match=told):
            await s.ask(method, **arguments)


async def test_preferences_are_shown_and_changed_over_the_socket(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        assert (await s.ask("config_set", name="cpu_percent", text="50"))["value"] == 50
        shown = (await s.ask("config_show"))["preferences"]["cpu_percent"]
        assert (shown["value"], shown["layer"]) == (50, "file")
        with pytest.raises(ConfigurationError, match="did you mean 'cpu_percent'"):
            await s.ask("config_set", name="cpu_procent", text="50")


async def test_a_damaged_invite_is_refused_and_nothing_is_remembered(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        with pytest.raises(InviteError):
            await s.ask("join", invite="swarm1nonsense")
        assert (await s.ask("runs"))["runs"] == []
        assert (await s.ask("failure"))["problem"] is None


@pytest.mark.parametrize("content", [b"\n", b"nonsense\n", b"[1]\n", b"\xff\n", b"x" * 200_000])
async def test_nonsense_ends_that_conversation_only(tmp_path: Path, content: bytes) -> None:
    async with scene(tmp_path) as s:
        assert await first_answer(s.home.socket_path, content) == b""
        assert (await s.status()).state is DaemonState.STOPPED


async def test_a_pause_is_remembered_shown_and_over_in_time(tmp_path: Path) -> None:
    known = StoredRuns().joined("ab" * 32, "a run", JoinArguments(invite="swarm1x"), 1.0)
    async with scene(tmp_path, known) as s:
        assert (await s.ask("pause", seconds=600))["message"].startswith("paused until")
        stored = StoredRuns.model_validate_json(s.home.runs_path.read_bytes())
        assert stored.pause is not None
        assert stored.pause.until == 1_000_600.0
        s.later(601)
        s.daemon._wake()  # the next look at the clock, which would come in seconds
        await until(lambda: s.daemon._stored_runs.pause is None)
        assert StoredRuns.model_validate_json(s.home.runs_path.read_bytes()).pause is None


async def test_runs_are_listed_and_forgotten(tmp_path: Path) -> None:
    join = JoinArguments(invite="swarm1x")
    known = StoredRuns().joined("ab" * 32, "one", join, 1.0).joined("cd" * 32, "two", join, 2.0)
    async with scene(tmp_path, known) as s:
        runs = (await s.ask("runs"))["runs"]
        assert [(r["name"], r["chosen"]) for r in runs] == [("one", False), ("two", True)]
        assert "forgotten" in (await s.ask("forget_run", run="one"))["message"]
        assert [r["name"] for r in (await s.ask("runs"))["runs"]] == ["two"]
        with pytest.raises(UsageError, match=r"known: two .*; give the beginning of a run's ID"):
            await s.ask("choose_run", run="one")
        assert "forgotten" in (await s.ask("forget_run", run="two"))["message"]
        with pytest.raises(UsageError, match="no run has been joined yet"):
            await s.ask("choose_run", run="one")


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"device": "toaster"}, "cpu, cuda:0, mps, xpu:0 or auto"),
        ({"device": "auto,cpu"}, "give no other device"),
        ({"memory_bytes": 2**80}, "memory_bytes"),
    ],
)
async def test_options_that_cannot_be_are_refused_and_the_present_run_stays(
    tmp_path: Path, option: dict[str, Any], told: str
) -> None:
    async with scene(tmp_path) as s:
        s.daemon._target = present = JoinArguments(invite="swarm1x")
        with pytest.raises(UsageError, match=told):
            await s.ask("join", invite="swarm1y", **option)
        assert s.daemon._target is present
        s.daemon._target = None


async def test_the_log_is_sent_from_a_number_on_and_followed(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.daemon.event("first")
        s.daemon.event("second")
        [first, second] = (await s.ask("log"))["lines"]
        assert [first["text"], second["text"], first["level"]] == ["first", "second", "event"]
        assert (await s.ask("log", after=first["number"]))["lines"] == [second]

        answers = stream(s.home.socket_path, "log", follow=True, after=second["number"])
        async with trio.open_nursery() as nursery:
            seen: list[str] = []

            def read_one() -> None:
                seen.extend(line["text"] for line in next(answers)["lines"])

            nursery.start_soon(trio.to_thread.run_sync, read_one)
            s.daemon.event("third")
        assert seen == ["third"]
        await trio.to_thread.run_sync(answers.close)  # type: ignore[attr-defined]


async def test_a_follower_gets_one_status_after_another_until_the_daemon_ends(
    tmp_path: Path,
) -> None:
    async with scene(tmp_path) as s:
        answers = stream(s.home.socket_path, "follow")

        def read(count: int) -> list[str]:
            return [next(answers)["state"] for _ in range(count)]

        assert await trio.to_thread.run_sync(read, 2) == ["stopped", "stopped"]
        assert await s.ask("shutdown") == {"message": "ending"}
        left = await trio.to_thread.run_sync(list, answers)
        assert all(status["state"] == "stopped" for status in left)


async def test_a_socket_that_a_killed_daemon_left_is_recognised_and_replaced(
    tmp_path: Path,
) -> None:
    home = Home.create(tmp_path / "h")
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(home.socket_path))
    left.close()
    with pytest.raises(NoDaemon, match="no daemon is running"):
        ask(home.socket_path, "status")
    with pytest.raises(NoDaemon):
        ask(home.socket_path / "below a file", "status")
    async with scene(tmp_path) as s:
        assert (await s.status()).state is DaemonState.STOPPED


def test_a_socket_in_another_user_s_folder_is_not_taken_for_a_silent_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(client, "connect", refused)
    with pytest.raises(DaemonError, match=r"you may not use .*; run this as the user whose"):
        ask(tmp_path / "control.sock", "status")


async def test_a_list_of_runs_of_a_newer_version_stops_the_daemon_and_is_left_alone(
    tmp_path: Path,
) -> None:
    home = Home.create(tmp_path / "h")
    home.runs_path.write_text('{"format": 2}')
    with pytest.raises(StorageError, match="newer version"):
        await run_daemon(tmp_path / "h", lambda line: None)
    assert home.runs_path.read_text() == '{"format": 2}'


async def test_a_full_disk_is_reported_and_stops_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path) as s:
        s.home.runs_path.mkdir()  # no file can be put in its place
        assert (await s.ask("pause"))["message"].startswith("paused")
        assert "could not be saved" in str((await s.ask("log"))["lines"])
        s.home.runs_path.rmdir()


@asynccontextmanager
async def serving(
    path: Path, handle: Callable[[LocalServerConnection], Awaitable[None]]
) -> AsyncIterator[None]:
    """A socket at which something else than a daemon of this version answers."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_lines, path, handle)
        while not await trio.to_thread.run_sync(is_running, path):
            await trio.sleep(0.01)
        yield
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    "answer", [{"result": "of a newer kind"}, {"error": "in another form"}], ids=str
)
async def test_an_answer_of_another_version_is_reported_with_its_remedy(
    tmp_path: Path, answer: dict[str, Any]
) -> None:
    async def handle(lines: LocalServerConnection) -> None:
        if await lines.receive() is not None:
            await lines.send(answer)

    async with serving(tmp_path / "s", handle):
        with pytest.raises(VersionError, match="swarm-client shutdown"):
            await trio.to_thread.run_sync(ask, tmp_path / "s", "status")


async def test_a_daemon_that_hangs_up_is_reported_with_its_log(tmp_path: Path) -> None:
    async def handle(lines: LocalServerConnection) -> None:
        await lines.receive()

    async with serving(tmp_path / "s", handle):
        with pytest.raises(DaemonError, match=r"client\.log"):
            await trio.to_thread.run_sync(ask, tmp_path / "s", "status")


def every_error() -> Iterator[type[SwarmError]]:
    for kind in vars(errors).values():
        if isinstance(kind, type) and issubclass(kind, SwarmError):
            yield kind


@pytest.mark.parametrize("kind", list(every_error()), ids=lambda kind: kind.__name__)
def test_an_error_crosses_the_socket_with_its_sentence_and_exit_code(
    kind: type[SwarmError],
) -> None:
    crossed = ErrorReport.model_validate_json(
        error_report_of(kind("what is wrong")).model_dump_json()
    )
    back = error_from_report(crossed)
    assert (type(back), str(back), back.exit_code) == (kind, "what is wrong", kind.exit_code)


async def test_the_document_names_every_method(tmp_path: Path) -> None:
    document = (ROOT / "docs" / "control-api.md").read_text()
    daemon = Daemon(Home.create(tmp_path / "h"), lambda line: None)
    server = ControlSocketServer(daemon.status, daemon.log_buffer, daemon.methods())
    assert [name for name in sorted(server.methods) if f"`{name}`" not in document] == []


async def test_log_lines_that_are_long_in_json_are_answered_in_parts(tmp_path: Path) -> None:
    async with scene(tmp_path) as there:
        emoji = "\N{GRINNING FACE}" * 2000  # twelve bytes each
        for _ in range(1000):
            there.daemon.log_buffer.event(emoji)
        assert len((await there.ask("log"))["lines"]) < 1000
        read = partial(log_lines, there.home.socket_path)
        lines = await trio.to_thread.run_sync(lambda: list(read()))
        assert [line["number"] for line in lines] == [*range(1, 1001)]
