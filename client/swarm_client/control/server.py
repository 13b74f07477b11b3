"""The serving end of the control API: from requests at the socket to calls of the daemon.

Owns the names of the methods, the validation of their arguments, and the two methods that stream.
What a method does is the daemon's part. An invalid request ends only its own connection.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Protocol, TypeVar

import trio
from pydantic import ValidationError

from swarm_client.control.known_runs import StoredRuns
from swarm_client.control.log_buffer import LogBuffer
from swarm_client.control.messages import (
    MAX_ANSWER_BYTES,
    MAX_LOG_LINES,
    ConfigArguments,
    ErrorReport,
    JoinArguments,
    LogArguments,
    NoArguments,
    PauseArguments,
    Refusal,
    RunArguments,
    error_report_of,
    first_error,
    read_request,
    version_mismatch,
)
from swarm_client.control.status_document import Status
from swarm_shared.base.errors import SwarmError, UsageError, VersionError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.local_server import LocalServerConnection

FOLLOW_INTERVAL_SECONDS = 1.0
"""Seconds between two status documents of `follow`."""

log = logging.getLogger(__name__)

ArgumentsT = TypeVar("ArgumentsT", bound=FrozenModel)


class PreferenceAccess(Protocol):
    """The preferences, as far as the socket exposes them. Errors are SwarmError."""

    def show(self) -> dict[str, Any]: ...

    def set(self, name: str, text: str) -> object: ...


class ControlledDaemon(Protocol):
    """The daemon, as the control server sees it. Methods that return text return one sentence that
    says what happens now."""

    log_buffer: LogBuffer
    preferences: PreferenceAccess | None

    @property
    def failure(self) -> SwarmError | None:
        """The error that ended the last participation, until another one begins."""

    async def status(self) -> Status: ...
    def pause(self, seconds: float | None) -> str: ...
    def resume(self) -> str: ...
    def finish(self) -> str: ...
    def leave(self) -> str: ...
    def shutdown(self) -> str: ...
    def join(self, join: JoinArguments) -> str: ...
    def runs(self) -> StoredRuns: ...
    def choose_run(self, wanted: str) -> str: ...
    def forget_run(self, wanted: str) -> str: ...


class ControlSocketServer:
    """`converse` handles one connection at the socket."""

    def __init__(self, daemon: ControlledDaemon) -> None:
        self._daemon = daemon
        self._methods: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "status": self._status,
            "pause": self._pause,
            "resume": self._resume,
            "finish": self._finish,
            "leave": self._leave,
            "shutdown": self._shutdown,
            "join": self._join,
            "failure": self._failure,
            "runs": self._runs,
            "choose_run": self._choose_run,
            "forget_run": self._forget_run,
            "config_show": self._config_show,
            "config_set": self._config_set,
        }

    @property
    def methods(self) -> frozenset[str]:
        """All method names; a test checks that the documentation names each."""
        return frozenset(self._methods) | {"follow", "log"}

    async def converse(self, lines: LocalServerConnection) -> None:
        """Answer requests until the client closes the connection."""
        try:
            while (line := await lines.receive()) is not None:
                await self._answer(lines, line)
        except (ValueError, trio.BrokenResourceError) as error:
            log.info("a connection at the control socket ended: %s", error)
        except Exception:  # a supervisor: one failing request must not end the daemon
            log.exception("a request at the control socket could not be answered")

    async def _answer(self, lines: LocalServerConnection, line: dict[str, Any]) -> None:
        try:
            request = read_request(line)
            if request.method == "follow":
                _read(NoArguments, request.arguments)
                await self._stream(lines, self._follow)
            elif request.method == "log" and request.arguments.get("follow"):
                arguments = _read(LogArguments, request.arguments)
                await self._stream(lines, lambda out: self._follow_log(out, arguments))
            elif request.method == "log":
                arguments = _read(LogArguments, request.arguments)
                await _send(lines, self._log_lines(arguments.after))
            elif request.method in self._methods:
                await _send(lines, await self._methods[request.method](request.arguments))
            else:
                raise UsageError(
                    f"there is no method {request.method!r}; known methods: "
                    f"{', '.join(sorted(self.methods))}"
                )
        except VersionError as error:
            problem = error_report_of(error)
            await _refuse(lines, version_mismatch(line.get("api")) if "api" in line else problem)
        except SwarmError as error:
            await _refuse(lines, error_report_of(error))

    # ---- streams

    async def _stream(
        self, lines: LocalServerConnection, tell: Callable[[LocalServerConnection], Awaitable[None]]
    ) -> None:
        """Stream answers until the client closes the connection or sends anything."""
        async with trio.open_nursery() as nursery:

            async def listen() -> None:
                # Invalid input and a broken connection also mean that the client wants no more.
                with contextlib.suppress(ValueError, trio.BrokenResourceError):
                    await lines.receive()
                nursery.cancel_scope.cancel()

            nursery.start_soon(listen)
            try:
                await tell(lines)
            except trio.BrokenResourceError:
                nursery.cancel_scope.cancel()

    async def _follow(self, lines: LocalServerConnection) -> None:
        while True:
            await _send(lines, await self._status({}))
            await trio.sleep(FOLLOW_INTERVAL_SECONDS)

    async def _follow_log(self, lines: LocalServerConnection, arguments: LogArguments) -> None:
        after = arguments.after
        while True:
            found = self._daemon.log_buffer.after(after, MAX_LOG_LINES)
            if found:
                after = found[-1].number
                await _send(lines, {"lines": [line.model_dump(mode="json") for line in found]})
            await self._daemon.log_buffer.wait_after(after)

    # ---- answers

    def _log_lines(self, after: int) -> dict[str, Any]:
        found = self._daemon.log_buffer.after(after, MAX_LOG_LINES)
        return {"lines": [line.model_dump(mode="json") for line in found]}

    async def _status(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        return (await self._daemon.status()).model_dump(mode="json")

    async def _pause(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return _message(self._daemon.pause(_read(PauseArguments, arguments).seconds))

    async def _resume(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        return _message(self._daemon.resume())

    async def _finish(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        return _message(self._daemon.finish())

    async def _leave(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        return _message(self._daemon.leave())

    async def _shutdown(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        return _message(self._daemon.shutdown())

    async def _join(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return _message(self._daemon.join(_read(JoinArguments, arguments)))

    async def _failure(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        error = self._daemon.failure
        return {"problem": None if error is None else error_report_of(error).model_dump()}

    async def _runs(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        return {"runs": [run.model_dump() for run in self._daemon.runs().listed()]}

    async def _choose_run(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return _message(self._daemon.choose_run(_read(RunArguments, arguments).run))

    async def _forget_run(self, arguments: dict[str, Any]) -> dict[str, Any]:
        return _message(self._daemon.forget_run(_read(RunArguments, arguments).run))

    async def _config_show(self, arguments: dict[str, Any]) -> dict[str, Any]:
        _read(NoArguments, arguments)
        return self._preferences().show()

    async def _config_set(self, arguments: dict[str, Any]) -> dict[str, Any]:
        wanted = _read(ConfigArguments, arguments)
        return {"value": self._preferences().set(wanted.name, wanted.text)}

    def _preferences(self) -> PreferenceAccess:
        if self._daemon.preferences is None:
            raise UsageError("this daemon has no preferences")
        return self._daemon.preferences


def _read(kind: type[ArgumentsT], arguments: dict[str, Any]) -> ArgumentsT:
    try:
        return kind.model_validate(arguments)
    except ValidationError as error:
        raise UsageError(f"invalid arguments: {first_error(error)}") from error


def _message(sentence: str) -> dict[str, Any]:
    return {"message": sentence}


async def _send(lines: LocalServerConnection, answer: dict[str, Any]) -> None:
    await lines.send({"ok": answer}, MAX_ANSWER_BYTES)


async def _refuse(lines: LocalServerConnection, problem: ErrorReport) -> None:
    await lines.send(Refusal(error=problem).model_dump(), MAX_ANSWER_BYTES)
