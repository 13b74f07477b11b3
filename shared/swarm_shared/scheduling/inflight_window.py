"""How many microbatches a trainer keeps under way: what the pipeline carries, and as much again.

A pipeline carries its rate times the time of a round trip through it in which nothing waits. With
fewer under way a link's delay is paid for in idle devices; with more they only wait, and hold
memory. Both factors are measured as TCP BBR does it (Cardwell et al. 2016, "BBR: Congestion-Based
Congestion Control"): the rate as the most that came back while one microbatch was out, the round
trip as the shortest one. A step's first microbatches find all queues empty, because everybody waits
for everybody between two steps; so the shortest is known without ever holding anything back for it.
Twice the product keeps every stage busy while both are found out, and where routes are unlike.

Pure: time is passed in.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

GAIN = 2.0
BURSTS_KEPT = 3
"""Bursts, which begin with nothing under way, as each step does: older measures are forgotten."""


@dataclass(slots=True)
class _Burst:
    shortest_seconds: float = math.inf
    rate: float = 0.0
    """Microbatches per second."""


@dataclass(frozen=True, slots=True)
class SendRecord:
    """What is to be known of a microbatch when it comes back."""

    sent_at: float
    returned_before: int


class InFlightWindow:
    """One trainer's measure of the pipelines that it sends into."""

    def __init__(self) -> None:
        self.in_flight = 0
        self._returned = 0
        self._bursts: deque[_Burst] = deque(maxlen=BURSTS_KEPT)

    def sent(self, now: float) -> SendRecord:
        """A microbatch starts; exactly one of `returned` and `failed` is to follow."""
        if not self.in_flight:
            self._bursts.append(_Burst())
        self.in_flight += 1
        return SendRecord(now, self._returned)

    def returned(self, send_record: SendRecord, now: float) -> None:
        """It came back with its gradient."""
        self.in_flight -= 1
        self._returned += 1
        seconds = max(1e-6, now - send_record.sent_at)
        burst = self._bursts[-1]
        burst.shortest_seconds = min(burst.shortest_seconds, seconds)
        burst.rate = max(burst.rate, (self._returned - send_record.returned_before) / seconds)

    def failed(self) -> None:
        """It did not, which says nothing of the pipeline."""
        self.in_flight -= 1

    def size(self, least: int, most: int) -> int:
        """Between what one must have under way and what one may."""
        known = [burst for burst in self._bursts if burst.rate]
        if not known:
            return least
        shortest = min(burst.shortest_seconds for burst in known)
        rate = max(burst.rate for burst in known)
        return max(least, min(most, math.ceil(GAIN * shortest * rate)))
