"""The in-flight window of a trainer: twice the pipeline's bandwidth-delay product, in microbatches.

A pipeline carries its rate times the time of a round trip without queueing. With fewer microbatches
in flight a link's delay leaves devices idle; with more, microbatches only wait, and hold memory.
Both factors are measured as TCP BBR does it (Cardwell et al. 2016, "BBR: Congestion-Based
Congestion Control"): the rate as the most microbatches that returned while one was in flight, the
round trip as the shortest one. A step's first microbatches find all queues empty, because every
peer is idle between two steps; so the shortest round trip is known without holding anything back
for it. Twice the product keeps every stage busy while both are being measured, and where routes
differ.

Pure: time is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

GAIN = 2.0
"""Ratio of the window to the bandwidth-delay product."""
BURSTS_KEPT = 3
"""Bursts whose measurements count; a burst begins with nothing in flight, as each step does."""


@dataclass(slots=True)
class _Burst:
    """The measurements of one burst."""

    shortest_seconds: float = math.inf
    rate: float = 0.0
    """Microbatches per second."""


@dataclass(frozen=True, slots=True)
class SendRecord:
    """The state of the trainer when a microbatch was sent, needed when it returns."""

    sent_at: float
    returned_before: int


class InFlightWindow:
    """One trainer's measurement of the pipelines that it sends into."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._returned = 0
        self._bursts: deque[_Burst] = deque(maxlen=BURSTS_KEPT)

    def sent(self, now: float) -> SendRecord:
        """Record that a microbatch is sent; exactly one call of `returned` or `failed` follows."""
        if not self.in_flight:
            self._bursts.append(_Burst())
        self.in_flight += 1
        return SendRecord(now, self._returned)

    def returned(self, send_record: SendRecord, now: float) -> None:
        """Record that the microbatch came back with its gradient."""
        self.in_flight -= 1
        self._returned += 1
        seconds = max(1e-6, now - send_record.sent_at)
        burst = self._bursts[-1]
        burst.shortest_seconds = min(burst.shortest_seconds, seconds)
        burst.rate = max(burst.rate, (self._returned - send_record.returned_before) / seconds)

    def failed(self) -> None:
        """Record that the microbatch failed, which is no measurement of the pipeline."""
        self.in_flight -= 1

    def size(self, smallest: int, largest: int) -> int:
        """Return the window in microbatches, between `smallest` and `largest`."""
        measured = [burst for burst in self._bursts if burst.rate]
        if not measured:
            return smallest
        shortest = min(burst.shortest_seconds for burst in measured)
        rate = max(burst.rate for burst in measured)
        return max(smallest, min(largest, math.ceil(GAIN * shortest * rate)))
