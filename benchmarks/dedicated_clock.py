"""Time as a process on a core of its own would see it, on a machine that others use as well."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio


class DedicatedCoreClock(trio.abc.Clock):
    """The monotonic clock, less the time that this thread wanted to run and had no core.

    Linux counts that per thread (`schedstat`: nanoseconds on a core, nanoseconds waiting for one).
    What this thread waits for by itself, a disk, a timer, another thread, counts in full.
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None  # then it is the monotonic clock
        self.elsewhere_seconds = 0.0
        self._began = time.monotonic() - self.waited_seconds()

    @property
    def exact(self) -> bool:
        return self._file is not None

    def waited_seconds(self) -> float:
        """For a core, since this thread began."""
        if self._file is None:
            return 0.0
        return int(os.pread(self._file, 100, 0).split()[1]) / 1e9

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is done here for want of other machines, and takes none of this core's time."""
        began = time.monotonic() - self.waited_seconds()
        try:
            yield
        finally:
            self.elsewhere_seconds += time.monotonic() - self.waited_seconds() - began

    def start_clock(self) -> None:
        """Runs already."""

    def current_time(self) -> float:
        return time.monotonic() - self.waited_seconds() - self.elsewhere_seconds - self._began

    def deadline_to_sleep_time(self, deadline: float) -> float:
        return deadline - self.current_time()
