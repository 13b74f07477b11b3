"""Counters of the bytes of frames per remote peer, protocol and direction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from swarm_shared.base.types import PeerId
from swarm_shared.protocol import LinkBytes

Direction = Literal["sent", "received"]

OTHERS = PeerId("others")
"""Counts the peers beyond MAX_COUNTERS together: a remote can make any number of IDs."""
MAX_COUNTERS = 50_000


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    remote: PeerId
    protocol: str
    direction: Direction
    frames: int
    bytes: int


class TrafficCounter:
    """Totals since the node was opened."""

    def __init__(self) -> None:
        self._totals: dict[tuple[PeerId, str, Direction], list[int]] = {}

    def counter(self, remote: PeerId, protocol: str, direction: Direction) -> list[int]:
        """Return the pair [frames, bytes] of one link, which the caller adds to in place."""
        key = (remote, protocol, direction)
        if key not in self._totals and len(self._totals) >= MAX_COUNTERS:
            key = (OTHERS, protocol, direction)
        return self._totals.setdefault(key, [0, 0])

    def totals(self) -> list[LinkTraffic]:
        return [
            LinkTraffic(remote, protocol, direction, frames, size_bytes)
            for (remote, protocol, direction), (frames, size_bytes) in self._totals.items()
            if frames
        ]

    def link_bytes(self) -> tuple[LinkBytes, ...]:
        """Return the totals in the form in which peers report them."""
        both: dict[tuple[PeerId, str], dict[Direction, int]] = {}
        for link in self.totals():
            both.setdefault((link.remote, link.protocol), {})[link.direction] = link.bytes
        return tuple(
            LinkBytes(
                remote=remote, protocol=protocol, sent=counts.get("sent", 0),
                received=counts.get("received", 0),
            )
            for (remote, protocol), counts in both.items()
        )  # fmt: skip
