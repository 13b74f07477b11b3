"""Clock of a process as if it had a dedicated core, on a shared machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio


class DedicatedCoreClock(trio.abc.Clock):
    """Monotonic clock minus the time that this thread was runnable without a core.

    Linux counts it per thread (`schedstat`: nanoseconds on a core, nanoseconds waiting for one).
    Waiting for a disk, a timer or another thread counts in full.
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None  # falls back to the monotonic clock
        self.elsewhere_seconds = 0.0
        self._began = time.monotonic() - self.waited_seconds()

    @property
    def exact(self) -> bool:
        return self._file is not None

    def waited_seconds(self) -> float:
        """Return the seconds that this thread has waited for a core since it began."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Exclude the block: work that other machines would do in reality."""
        began = time.monotonic() - self.waited_seconds()
        try:
            yield
        finally:
            self.elsewhere_seconds += time.monotonic() - self.waited_seconds() - began

    def start_clock(self) -> None:
        """Do nothing: the clock always runs."""

    def current_time(self) -> float:
        return time.monotonic() - self.waited_seconds() - self.elsewhere_seconds - self._began

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()
