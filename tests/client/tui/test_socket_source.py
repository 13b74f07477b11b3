"""The view's source at a real socket: a daemon's words, its log, its going and coming back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from kits.tui import START
from kits.tui.client import status
from swarm_client.control.status_document import Status
from swarm_client.tui.socket_source import SocketSource
from swarm_shared.base.errors import ConfigurationError, ProtocolError, VersionError
from swarm_shared.tui.source import DocumentReceived, Event, LogReceived, SourceLost

Lines = list[dict[str, Any]]


def told(number: int) -> dict[str, Any]:
    return {"ok": status(number).model_dump(mode="json")}


def logged(*numbers: int) -> dict[str, Any]:
    lines = [{"time": START, "level": "event", "text": f"line {n}", "number": n} for n in numbers]
    return {"ok": {"lines": lines}}


class Daemon:
    """Serves a socket in a thread. A stream's connection stays open until `hang_up`."""

    def __init__(self, path: Path, answers: dict[str, Lines]) -> None:
        self.asked: list[dict[str, Any]] = []
        self._path = path
        self._answers = answers
        self._open: list[socket.socket] = []
        self._hung_up = False
        self._changes = threading.Lock()
        path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(path))
        self._listener.listen(8)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._changes:
                self._open.append(connection)
                if self._hung_up:  # between its being accepted and its being known here
                    _end(connection)
                    return
            threading.Thread(target=self._converse, args=(connection,), daemon=True).start()

    def _converse(self, connection: socket.socket) -> None:
        # A test may hang up in the middle of a word, and a view may be closed.
        with contextlib.suppress(OSError):
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        line = connection.makefile("rb").readline()
        if not line:
            return
        question = json.loads(line)
        self.asked.append(question)
        for answer in self._answers.get(question["method"], []):
            connection.sendall(json.dumps(answer).encode() + b"\n")

    def hang_up(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._path.unlink()
        with self._changes:
            self._hung_up = True
            for connection in self._open:
                _end(connection)


def _end(connection: socket.socket) -> None:
    # One whose other end has gone already cannot be shut down.
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
    connection.close()


class Follower:
    """Takes events of a source one after the other. Each of its two streams tries again once for
    each time that it is let.
    """

    def __init__(self, path: Path) -> None:
        self._allowed = 0
        self._changed = threading.Condition()
        self._rests = threading.local()
        self.source = SocketSource(path, lambda: START, lambda _: self._wait())
        self.events = self.source.events()

    def _wait(self) -> None:
        mine = getattr(self._rests, "count", 0)
        self._rests.count = mine + 1
        with self._changed:
            self._changed.wait_for(lambda: self._allowed > mine)

    def try_again(self) -> None:
        with self._changed:
            self._allowed += 1
            self._changed.notify_all()

    async def next(self, wanted: Callable[[Event[Status]], bool]) -> Event[Status]:
        async for event in self.events:
            if wanted(event):
                return event
        raise AssertionError("a source does not end")


def is_seen(event: Event[Status]) -> bool:
    return isinstance(event, DocumentReceived)


def is_away(event: Event[Status]) -> bool:
    return isinstance(event, SourceLost)


def together(session: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(session(), timeout=30)

    asyncio.run(main())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "control.sock"


def test_status_and_log_of_a_daemon_are_followed(path: Path) -> None:
    daemon = Daemon(path, {"follow": [told(0), told(1)], "log": [logged(1, 2), logged(3)]})

    async def session() -> None:
        follower = Follower(path)
        found: list[Event[Status]] = []
        while len(found) < 4:
            found.append(await anext(follower.events))
        assert [e.document for e in found if isinstance(e, DocumentReceived)] == [
            status(0),
            status(1),
        ]
        numbers = [line.number for e in found if isinstance(e, LogReceived) for line in e.entries]
        assert numbers == [1, 2, 3]

    together(session)
    daemon.hang_up()


def test_a_daemon_that_ends_is_away_and_one_that_comes_back_is_followed_again(path: Path) -> None:
    first = Daemon(path, {"follow": [told(0)]})

    async def session() -> None:
        follower = Follower(path)
        await follower.next(is_seen)
        first.hang_up()
        gone = await follower.next(is_away)
        assert isinstance(gone, SourceLost)
        assert "has ended" in gone.sentence
        follower.try_again()
        gone = await follower.next(is_away)
        assert isinstance(gone, SourceLost)
        assert "swarm-client join" in gone.sentence
        second = Daemon(path, {"follow": [told(7)], "log": [logged(1)]})
        follower.try_again()
        back = [await anext(follower.events), await anext(follower.events)]
        assert [e.document for e in back if isinstance(e, DocumentReceived)] == [status(7)]
        assert [len(e.entries) for e in back if isinstance(e, LogReceived)] == [1]
        second.hang_up()

    together(session)


def test_a_command_goes_to_the_daemon_and_its_refusal_comes_back_as_its_error(path: Path) -> None:
    refusal = {
        "error": {
            "code": "ConfigurationError", "seen": "nice must be at most 19", "needed": "",
            "remedy": "", "exit_code": 3,
        }
    }  # fmt: skip
    daemon = Daemon(path, {"pause": [{"ok": {"message": "paused"}}], "config_set": [refusal]})

    async def session() -> None:
        source = SocketSource(path)
        assert await source.act("pause", {"seconds": 60.0}) == {"message": "paused"}
        with pytest.raises(ConfigurationError, match="at most 19"):
            await source.act("config_set", {"name": "nice", "text": "99"})

    together(session)
    assert [question["arguments"] for question in daemon.asked] == [
        {"seconds": 60.0},
        {"name": "nice", "text": "99"},
    ]
    daemon.hang_up()


@pytest.mark.parametrize(
    ("answer", "error"),
    [({"ok": {"api": 1}}, ProtocolError), ({"something": "else"}, VersionError)],
)
def test_a_daemon_of_another_form_ends_the_view_with_a_sentence(
    path: Path, answer: dict[str, Any], error: type[Exception]
) -> None:
    daemon = Daemon(path, {"follow": [answer]})

    async def session() -> None:
        follower = Follower(path)
        with pytest.raises(error):
            await follower.next(is_seen)

    together(session)
    daemon.hang_up()
