"""How far a download is, how fast it goes, and when it will be done. Free of I/O."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from swarm_shared.base.clock import Clock
from swarm_shared.base.text import progress_text

WINDOW_SECONDS = 10.0
"""Seconds over which the rate is averaged: it follows a changed link, and not single chunks. Where
a chunk takes longer, over the time since the one before the last."""
LEAST_SECONDS = 1.0
"""Seconds before a rate is stated; the first chunks come at the speed of a cache."""
LINE_SECONDS = 15.0
"""Seconds between two lines for people, and before the first one."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """How far a download is, and its present rate."""

    what: str
    """The name that is shown: "stage 3", "training data"."""
    received_bytes: int
    total_bytes: int
    bytes_per_second: float | None
    """None until something has arrived; it falls while nothing more does."""

    def __str__(self) -> str:
        done = progress_text(self.received_bytes, self.total_bytes, self.bytes_per_second)
        return f"{self.what}: {done}"


class DownloadMeter:
    """One download; `record` after each piece."""

    def __init__(self, what: str, clock: Clock) -> None:
        self._what = what
        self._clock = clock
        self._began_at = self._line_at = clock()
        self._total_bytes = 0
        self._samples: deque[tuple[float, int]] = deque()
        """Time and bytes present, the oldest first."""

    def record(self, received_bytes: int, total_bytes: int) -> None:
        """Record the bytes that are present. Those of the first record count for no rate: an
        earlier attempt left them. Fewer than before: the download began anew."""
        if self._samples and received_bytes < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((self._clock(), received_bytes))
        self._total_bytes = total_bytes

    @property
    def seconds(self) -> float:
        """Seconds since the download began."""
        return self._clock() - self._began_at

    @property
    def progress(self) -> DownloadProgress:
        """The progress, with the rate over the last WINDOW_SECONDS."""
        now, samples = self._clock(), self._samples
        if not samples:
            return DownloadProgress(self._what, 0, self._total_bytes, None)
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()
        (since, before), (_, received) = samples[0], samples[-1]
        measured = received > before and now - since >= LEAST_SECONDS
        rate = (received - before) / (now - since) if measured else None
        return DownloadProgress(self._what, received, self._total_bytes, rate)

    def due_line(self) -> str | None:
        """The progress as a line for people, every LINE_SECONDS; None in between."""
        now = self._clock()
        if now - self._line_at < LINE_SECONDS:
            return None
        self._line_at = now
        return f"downloading {self.progress}"
