"""Clocks as parameters: production passes these functions, tests pass their own."""

from __future__ import annotations

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
