"""Whether a worker that outstanding an answer is still alive: one may be frozen, or stuck in a
driver.

Owns what counts as too long. The daemon's handle tells it of answers and asks it to wait.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import trio

CHECK_INTERVAL_SECONDS = 0.5
"""Between two looks. A daemon that was frozen itself, or whose machine slept, counts that as one
look: time in which nobody could answer is held against nobody."""

HUNG_SECONDS = 5.0
HUNG_FACTOR = 20.0
"""A worker that answers nothing for that long, and for so many times as long as the slowest of its
latest computations took, has hung."""

SLOWEST_DECAY = 0.8
"""The first computations of a process take much longer than all others: what was slow fades."""

FIRST_COMPUTATION_SECONDS = 120.0
"""In place of both before its first computation has come back."""

STORAGE_TIMEOUT_SECONDS = 900.0
"""Where it reads or writes its state: gigabytes, on a disk that others use, too."""


class Outstanding(Enum):
    """What a worker has been asked for and not answered."""

    NOTHING = auto()
    COMPUTING = auto()
    STORAGE = auto()
    """Among other things: what follows waits for it."""


class Liveness:
    """Of one worker. Tell it of every answer."""

    def __init__(self) -> None:
        self.answers = 0
        self._slowest_seconds: float | None = None

    def answered(self, compute_seconds: float | None = None) -> None:
        self.answers += 1
        if compute_seconds is not None:
            faded = SLOWEST_DECAY * (self._slowest_seconds or 0.0)
            self._slowest_seconds = max(faded, compute_seconds)

    async def wait_hung(self, outstanding: Callable[[], Outstanding]) -> float:
        """Return when the worker has hung, with the seconds for which it has answered nothing."""
        silent_seconds, answers = 0.0, self.answers
        while True:
            await trio.sleep(CHECK_INTERVAL_SECONDS)
            outstanding_work = outstanding()
            if answers != self.answers or outstanding_work is Outstanding.NOTHING:
                silent_seconds, answers = 0.0, self.answers
                continue
            silent_seconds += CHECK_INTERVAL_SECONDS
            if silent_seconds >= self._timeout_seconds(outstanding_work):
                return silent_seconds

    def _timeout_seconds(self, outstanding_work: Outstanding) -> float:
        if outstanding_work is Outstanding.STORAGE:
            return STORAGE_TIMEOUT_SECONDS
        if self._slowest_seconds is None:
            return FIRST_COMPUTATION_SECONDS
        return max(HUNG_SECONDS, HUNG_FACTOR * self._slowest_seconds)
