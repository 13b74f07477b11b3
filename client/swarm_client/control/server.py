"""The serving end of the control API: from requests at the socket to calls of the daemon.

Owns the validation of requests and of their arguments, and the two methods that stream. The other
methods are the daemon's. An invalid request ends only its own connection.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import trio
from pydantic import ValidationError

from swarm_client.control.log_buffer import LogBuffer
from swarm_client.control.messages import (
    MAX_ANSWER_BYTES,
    MAX_LOG_LINES,
    ControlRequest,
    ErrorReport,
    LogArguments,
    NoArguments,
    Refusal,
    error_report_of,
    version_mismatch,
)
from swarm_client.control.status_document import API_VERSION, Status
from swarm_shared.base.errors import SwarmError, UsageError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.base.local_server import LocalServerConnection
from swarm_shared.base.local_socket import to_line

ANSWER_FRAME_BYTES = 100
"""Bytes of an answer that are not its lines, at most."""

FOLLOW_INTERVAL_SECONDS = 1.0
"""Seconds between two status documents of `follow`."""

log = logging.getLogger(__name__)

ArgumentsT = TypeVar("ArgumentsT", bound=FrozenModel)


Method = Callable[[dict[str, Any]], dict[str, Any]]
"""Carries out one request: from its arguments to its answer. Errors are SwarmError."""


def query(kind: type[ArgumentsT], answer: Callable[[ArgumentsT], dict[str, Any]]) -> Method:
    """A method whose arguments are of this kind."""
    return lambda arguments: answer(_read(kind, arguments))


def order(kind: type[ArgumentsT], carry_out: Callable[[ArgumentsT], str]) -> Method:
    """A method that is answered with one sentence, which says what happens now."""
    return query(kind, lambda arguments: {"message": carry_out(arguments)})


@dataclass(frozen=True, slots=True)
class ControlSocketServer:
    """The server of the control socket. `converse` handles one connection."""

    status: Callable[[], Awaitable[Status]]
    log_buffer: LogBuffer
    at_once: Mapping[str, Method]
    """The methods that are answered at once. Beside them there are `status`, `log`, and the streams
    of both."""

    @property
    def methods(self) -> frozenset[str]:
        """All method names; a test checks that the documentation names each."""
        return frozenset(self.at_once) | {"status", "follow", "log"}

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
        if (asked := line.get("api")) != API_VERSION:
            await _refuse(lines, version_mismatch(asked))
            return
        try:
            request = _read(ControlRequest, line, "this is not a valid request")
            if request.method == "follow":
                _read(NoArguments, request.arguments)
                await self._stream(lines, self._follow)
            elif request.method == "status":
                _read(NoArguments, request.arguments)
                await _send(lines, await self._status_document())
            elif request.method == "log" and request.arguments.get("follow"):
                arguments = _read(LogArguments, request.arguments)
                await self._stream(lines, lambda out: self._follow_log(out, arguments))
            elif request.method == "log":
                arguments = _read(LogArguments, request.arguments)
                await _send(lines, self._log_lines(arguments.after))
            elif request.method in self.at_once:
                await _send(lines, self.at_once[request.method](request.arguments))
            else:
                raise UsageError(
                    f"there is no method {request.method!r}; known methods: "
                    f"{', '.join(sorted(self.methods))}"
                )
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
            await _send(lines, await self._status_document())
            await trio.sleep(FOLLOW_INTERVAL_SECONDS)

    async def _follow_log(self, lines: LocalServerConnection, arguments: LogArguments) -> None:
        after = arguments.after
        while True:
            document = self._log_lines(after)
            if document["lines"]:
                after = document["lines"][-1]["number"]
                await _send(lines, document)
            await self.log_buffer.wait_after(after)

    # ---- answers

    def _log_lines(self, after: int) -> dict[str, Any]:
        """Return as many lines as an answer has room for; a reader requests the others after
        these."""
        lines: list[dict[str, Any]] = []
        room = MAX_ANSWER_BYTES - ANSWER_FRAME_BYTES
        for line in self.log_buffer.after(after, MAX_LOG_LINES):
            document = line.model_dump(mode="json")
            room -= len(to_line(document))
            if room < 0:
                break
            lines.append(document)
        return {"lines": lines}

    async def _status_document(self) -> dict[str, Any]:
        return (await self.status()).model_dump(mode="json")


def _read(
    kind: type[ArgumentsT], values: dict[str, Any], refusal: str = "invalid arguments"
) -> ArgumentsT:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise UsageError(f"{refusal}: {first_error(error)}") from error


async def _send(lines: LocalServerConnection, answer: dict[str, Any]) -> None:
    await lines.send({"ok": answer}, MAX_ANSWER_BYTES)


async def _refuse(lines: LocalServerConnection, problem: ErrorReport) -> None:
    await lines.send(Refusal(error=problem).model_dump(), MAX_ANSWER_BYTES)
