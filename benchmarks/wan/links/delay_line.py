"""Delay, jitter and loss of a network's paths: when each packet leaves, if at all.

Pure: packets, time and random numbers in, packets out. A path never reorders, as real ones seldom
do: a packet that the jitter would let overtake leaves directly behind its predecessor. The jitter
of a link is drawn every JITTER_SECONDS, not per packet; otherwise a burst without overtaking would
have the delay of its slowest packet throughout.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping
from dataclasses import dataclass

JITTER_SECONDS = 0.02
MAX_WAITING = 200_000
"""Maximum number of packets in flight; more indicate a faulty program."""


@dataclass(frozen=True, slots=True)
class Access:
    """Delay, jitter and loss of one machine's link."""

    delay_seconds: float = 0.0
    """Delay of one direction."""
    jitter_seconds: float = 0.0
    loss: float = 0.0
    """Loss probability in each direction."""


class _Line:
    """One direction of one machine's link."""

    def __init__(self, access: Access) -> None:
        self.access = access
        self._delay = access.delay_seconds
        self._drawn = -JITTER_SECONDS

    def delay(self, now: float, random: Callable[[], float]) -> float:
        jitter = self.access.jitter_seconds
        if jitter and now - self._drawn >= JITTER_SECONDS:
            self._drawn = now
            self._delay = max(0.0, self.access.delay_seconds + jitter * (2 * random() - 1))
        return self._delay


class DelayLine:
    """Packets in flight between machines, by address."""

    def __init__(self, machines: Mapping[bytes, Access], random: Callable[[], float]) -> None:
        self._random = random
        self._up = {address: _Line(access) for address, access in machines.items()}
        self._down = {address: _Line(access) for address, access in machines.items()}
        self._last_due: dict[tuple[bytes, bytes], float] = {}
        self._waiting: list[tuple[float, int, bytes]] = []
        self._serial = 0
        self.lost = 0
        self.refused = 0
        """Number of packets with an unknown address or beyond MAX_WAITING."""

    def accept(self, now: float, source: bytes, target: bytes, packet: bytes) -> None:
        up, down = self._up.get(source), self._down.get(target)
        if up is None or down is None or len(self._waiting) >= MAX_WAITING:
            self.refused += 1
            return
        for line in (up, down):
            if line.access.loss and self._random() < line.access.loss:
                self.lost += 1
                return
        path = (source, target)
        due = now + up.delay(now, self._random) + down.delay(now, self._random)
        due = max(due, self._last_due.get(path, due))
        self._last_due[path] = due
        self._serial += 1
        heapq.heappush(self._waiting, (due, self._serial, packet))

    def next_due(self) -> float | None:
        """Return when the next packet leaves, or None while none is in flight."""
        return self._waiting[0][0] if self._waiting else None

    def take_due(self, now: float) -> tuple[float, bytes] | None:
        """Return the earliest packet due by `now` with its due time."""
        if not self._waiting or self._waiting[0][0] > now:
            return None
        due, _, packet = heapq.heappop(self._waiting)
        return due, packet
