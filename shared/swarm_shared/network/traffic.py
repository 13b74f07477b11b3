"""Counters of the bytes of frames per remote peer and protocol."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_shared.base.types import PeerId
from swarm_shared.protocol import LinkBytes

MAX_LINKS = 25_000
"""Links with a counter of their own. The rest share one, which is not reported: a remote can make
any number of IDs."""


@dataclass(slots=True)
class LinkTraffic:
    """Bytes over one link since the node was opened."""

    sent: int = 0
    received: int = 0


class TrafficCounter:
    """The counters of all links of a node."""

    def __init__(self) -> None:
        self._links: dict[tuple[PeerId, str], LinkTraffic] = {}
        self._rest = LinkTraffic()

    def link(self, remote: PeerId, protocol: str) -> LinkTraffic:
        """Return the counter of one link, which the caller adds to in place."""
        key = (remote, protocol)
        if key not in self._links and len(self._links) >= MAX_LINKS:
            return self._rest
        return self._links.setdefault(key, LinkTraffic())

    def link_bytes(self) -> tuple[LinkBytes, ...]:
        """Return the links that have carried frames, in the form in which peers report them."""
        return tuple(
            LinkBytes(remote=remote, protocol=protocol, sent=link.sent, received=link.received)
            for (remote, protocol), link in self._links.items()
            if link.sent or link.received
        )
