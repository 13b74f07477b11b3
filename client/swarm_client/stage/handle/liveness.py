"""Detection of a hung stage worker, which may be frozen or stuck in a driver.

Owns the time limits. `swarm_client.stage.handle.worker_handle` reports every answer and kills the
worker.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

import trio

CHECK_INTERVAL_SECONDS = 0.5
"""Seconds between two checks. A daemon that was frozen itself, or whose machine slept, counts that
time as one check, because the worker could not answer in it either."""

HUNG_SECONDS = 5.0
"""Shortest silence after which a worker counts as hung."""

HUNG_FACTOR = 20.0
"""Shortest silence after which a worker counts as hung, in multiples of the slowest of its latest
computations. Both limits must be exceeded."""

SLOWEST_DECAY = 0.8
"""Factor by which the slowest time decays per computation: the first computations of a process are
much slower than all others."""

FIRST_COMPUTATION_SECONDS = 120.0
"""Limit in place of both while a kind of computation waits for its first answer: its code may have
to be read from a disk that other programs use, too."""

STORAGE_TIMEOUT_SECONDS = 900.0
"""Limit while the worker reads or writes its state: gigabytes, on a disk with other users."""


class Outstanding(Enum):
    """The kind of work that a worker has been asked for and has not answered."""

    NOTHING = auto()
    COMPUTING = auto()
    FIRST = auto()
    """A kind of computation that this worker has not answered before, perhaps among other
    requests."""
    STORAGE = auto()
    """Reading or writing of the state, perhaps among other requests, which wait behind it."""


class Liveness:
    """The answers of one worker and the time limit that follows from them."""

    def __init__(self) -> None:
        self.answers = 0
        self._slowest_seconds = 0.0

    def answered(self, compute_seconds: float | None = None) -> None:
        """Count an answer; `compute_seconds` if it is to a computation."""
        self.answers += 1
        if compute_seconds is not None:
            self._slowest_seconds = max(SLOWEST_DECAY * self._slowest_seconds, compute_seconds)

    async def wait_hung(self, outstanding: Callable[[], Outstanding]) -> float:
        """Return when the worker has hung, with the seconds of its silence."""
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
        if outstanding_work is Outstanding.FIRST:
            return FIRST_COMPUTATION_SECONDS
        return max(HUNG_SECONDS, HUNG_FACTOR * self._slowest_seconds)
