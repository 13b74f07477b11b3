"""Time as a parameter: production passes these functions, tests pass their own."""

from __future__ import annotations

import time
from collections.abc import Callable

Clock = Callable[[], float]
"""Returns seconds; only differences mean anything."""

monotonic: Clock = time.monotonic


def wall() -> float:
    """Seconds since the Unix epoch; used in certificates, never for measuring durations.

    Looked up at every call, so that a test can set the clock of a whole process.
    """
    return time.time()
