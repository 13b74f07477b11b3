"""The daemon's socket as a source: its status once a second, its log as it is written.

Waiting for a line blocks, so each of the two streams has a thread; both end with the program. The
document classes are imported there as well, when the view's frame is on the screen already. When
the daemon stops, the view shows that and recovers once it is back.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import ProtocolError, SwarmError, VersionError
from swarm_shared.tui.source import DocumentReceived, Event, LogEntry, LogReceived, SourceLost

if TYPE_CHECKING:
    from swarm_client.control.status_document import Status

TRY_AGAIN_SECONDS = 1.0
MAX_WAITING_EVENTS = 64
"""Queued events. A suspended view takes none; the daemon's lines then wait in the socket."""

Put = Callable[["Event[Status] | SwarmError"], None]


class _ViewClosed(Exception):
    """The view has ended; the threads stop."""


class SocketSource:
    def __init__(
        self,
        socket_path: Path,
        clock: Clock = wall,
        rest: Callable[[float], None] = time.sleep,
    ) -> None:
        self._path = socket_path
        self._clock = clock
        self._rest = rest
        self._log_number = 0

    def now(self) -> float:
        return self._clock()

    async def act(self, method: str, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        from swarm_client.control.client import ask

        return await asyncio.to_thread(ask, self._path, method, **arguments)

    async def events(self) -> AsyncIterator[Event[Status]]:
        loop = asyncio.get_running_loop()
        waiting: asyncio.Queue[Event[Status] | SwarmError] = asyncio.Queue(MAX_WAITING_EVENTS)

        def put(event: Event[Status] | SwarmError) -> None:
            saying = waiting.put(event)
            try:
                asyncio.run_coroutine_threadsafe(saying, loop).result()
            except (RuntimeError, concurrent.futures.CancelledError) as error:
                saying.close()
                raise _ViewClosed from error

        for follow in (self._follow_status, self._follow_log):
            threading.Thread(target=partial(_until_closed, follow, put), daemon=True).start()
        while True:
            event = await waiting.get()
            if isinstance(event, SwarmError):
                raise event
            yield event

    # ---- in threads

    def _follow_status(self, put: Put) -> None:
        from pydantic import ValidationError

        from swarm_client.control.client import stream
        from swarm_client.control.status_document import Status

        while True:
            try:
                for answer in stream(self._path, "follow"):
                    put(DocumentReceived(self._clock(), Status.model_validate(answer)))
                put(
                    SourceLost(
                        self._clock(), "the daemon has ended; the view waits for it to come back"
                    )
                )
            except (ValidationError, VersionError) as error:
                put(_other_form(error))
                return
            except SwarmError as error:
                put(SourceLost(self._clock(), str(error)))
            self._rest(TRY_AGAIN_SECONDS)

    def _follow_log(self, put: Put) -> None:
        from pydantic import TypeAdapter, ValidationError

        from swarm_client.control.client import stream

        form = TypeAdapter(tuple[LogEntry, ...])
        while True:
            # The status stream reports why it ended.
            with contextlib.suppress(SwarmError, ValidationError):
                for answer in stream(self._path, "log", after=self._log_number, follow=True):
                    lines = form.validate_python(answer["lines"])
                    self._log_number = max(self._log_number, *(line.number for line in lines))
                    put(LogReceived(self._clock(), lines))
            # Another daemon numbers its lines from the beginning.
            self._log_number = 0
            self._rest(TRY_AGAIN_SECONDS)


def _until_closed(follow: Callable[[Put], None], put: Put) -> None:
    with contextlib.suppress(_ViewClosed):
        follow(put)


def _other_form(error: Exception) -> SwarmError:
    if isinstance(error, VersionError):
        return error
    return ProtocolError(
        "the daemon sends its status in a form that this view does not know; use the swarm-client "
        "that came with it"
    )
