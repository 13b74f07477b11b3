"""The newest lines of the daemon's log, numbered, for the control socket.

Holds the events that `join` prints and the program's log records; old lines are dropped for new
ones. Lines may be added from any thread; waiting for them is trio's.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import trio

from swarm_client.control.status_document import LogLine
from swarm_shared.base.clock import Clock, wall

MAX_LINES = 2000
"""Lines kept."""
MAX_LINE_CHARACTERS = 2000
"""Characters kept of a line. A traceback may be longer; the log file has all of it."""


class LogBuffer(logging.Handler):
    """Made inside trio. Also a logging handler."""

    def __init__(self, clock: Clock = wall) -> None:
        super().__init__(logging.INFO)
        self._clock = clock
        self._lines: deque[LogLine] = deque(maxlen=MAX_LINES)
        self._number = 0
        self._guard = threading.Lock()
        self._changed = trio.lowlevel.ParkingLot()
        self._token = trio.lowlevel.current_trio_token()
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def event(self, text: str) -> None:
        """Add a line for the user."""
        self._add(self._clock(), "event", text)

    def emit(self, record: logging.LogRecord) -> None:
        self._add(record.created, record.levelname.lower(), self.format(record))

    def after(self, number: int, limit: int) -> tuple[LogLine, ...]:
        """Up to `limit` lines with a higher number, oldest first."""
        with self._guard:
            lines = [line for line in self._lines if line.number > number]
        return tuple(lines[:limit])

    async def wait_after(self, number: int) -> None:
        """Wait until there is a line with a higher number."""
        while self._number <= number:
            await self._changed.park()

    def _add(self, time: float, level: str, text: str) -> None:
        with self._guard:
            self._number += 1
            self._lines.append(
                LogLine(
                    time=time, level=level, text=text[:MAX_LINE_CHARACTERS], number=self._number
                )
            )
        try:
            self._token.run_sync_soon(self._changed.unpark_all, idempotent=True)
        except trio.RunFinishedError:
            return  # the daemon has ended; no task waits any more
