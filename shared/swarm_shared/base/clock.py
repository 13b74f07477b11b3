"""Clocks as parameters: production passes these functions, tests pass their own."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Clock = Callable[[], float]
"""A function that returns seconds; only differences between two results have a meaning."""

monotonic: Clock = time.monotonic


def wall() -> float:
    """Return the seconds since the Unix epoch; for certificates, never for measuring durations.

    `time.time` is looked up at every call, so that a test can set the clock of a whole process.
    """
    return time.time()


def clock_through_sleep() -> float:
    """Return seconds of a clock that continues while the machine sleeps and that nothing sets."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    if sys.platform == "darwin":
        # Unlike Python's own clock, which stands still during sleep on macOS.
        return time.clock_gettime(time.CLOCK_MONOTONIC)
    return wall()


class RunClock:
    """A `Clock` of the run's time in Unix seconds: the coordinator's, as a peer last learned it.

    Credentials are compared with it, so that a machine whose own clock is wrong, or is set while it
    takes part, is a member like any other. Before the peer has learned it, its wall clock counts.
    """

    def __init__(self, clock: Clock = clock_through_sleep) -> None:
        self._clock = clock
        self._ahead_seconds: float | None = None

    def learn(self, unix_seconds: float) -> None:
        """Set the time at the coordinator now, give or take the latency of its message."""
        self._ahead_seconds = unix_seconds - self._clock()

    def __call__(self) -> float:
        return wall() if self._ahead_seconds is None else self._clock() + self._ahead_seconds
