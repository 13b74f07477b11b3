"""The connections to each peer: which one is best, its measured properties, and streams on it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import trio
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.errors import dial_errors
from swarm_shared.network.libp2p.host import NodeSwarm
from swarm_shared.network.libp2p.yamux import YamuxConnection, YamuxStream
from swarm_shared.protocol import LinkPath, PathKind

logger = logging.getLogger(__name__)

RATE_DECAY: Final = 0.95
"""Factor of an earlier rate at each sample: half of it is left after about 14 samples."""
MIN_SAMPLE_SECONDS: Final = 0.25
"""Shortest interval over which a rate is computed."""


def muxer_of(connection: SwarmConn) -> YamuxConnection:
    """The muxer of a connection, as this project's type."""
    muxer = connection.muxed_conn
    assert isinstance(muxer, YamuxConnection), "the host runs no other muxer"
    return muxer


def kind_of(muxer: YamuxConnection) -> PathKind:
    """Whether a connection is direct, relayed, or came through a punched hole."""
    if muxer.relay is not None:
        return PathKind.RELAYED
    return PathKind.PUNCHED if muxer.punched else PathKind.DIRECT


@dataclass(slots=True)
class RateMeter:
    """The highest recent rate of a byte counter, in bytes per second."""

    bytes_per_second: float = 0.0
    _counted: int = 0
    _at: float | None = None

    def look(self, counted: int, now: float) -> float:
        """Record that `counted` bytes have passed in all; return the rate in bytes per second."""
        if self._at is None:
            self._counted, self._at = counted, now
        elif now - self._at >= MIN_SAMPLE_SECONDS:
            rate = (counted - self._counted) / (now - self._at)
            self.bytes_per_second = max(rate, RATE_DECAY * self.bytes_per_second)
            self._counted, self._at = counted, now
        return self.bytes_per_second


class Links:
    """A view on the swarm's connections. Callbacks are synchronous and must not fail."""

    def __init__(self, swarm: NodeSwarm, interfaces: Callable[[], Interfaces]) -> None:
        self.swarm = swarm
        self.own = PeerId(swarm.get_peer_id().to_base58())
        self.interfaces = interfaces
        """Returns the network interfaces of this machine."""
        self._meters: dict[YamuxConnection, RateMeter] = {}
        self._best: dict[PeerId, YamuxConnection] = {}
        self.on_change: Callable[[PeerId], None] = lambda peer: None
        """Called when the best connection to a peer has changed."""
        self.on_lost: Callable[[PeerId], None] = lambda peer: None
        """Called when the last connection to a peer is lost."""

    def all_of(self, peer: PeerId) -> list[SwarmConn]:
        """Return open connections, the best one first: without a relay, then the older one."""
        connections = self.swarm.get_connections(ID.from_base58(peer))
        usable = [c for c in connections if not c.is_closed and muxer_of(c).is_established]
        return sorted(usable, key=lambda c: muxer_of(c).relay is not None)

    def best(self, peer: PeerId) -> SwarmConn | None:
        """Return the best open connection to a peer; None when there is none."""
        return next(iter(self.all_of(peer)), None)

    def has_direct(self, peer: PeerId) -> bool:
        """Whether the best connection to a peer is without a relay."""
        best = self.best(peer)
        return best is not None and muxer_of(best).relay is None

    def path(self, peer: PeerId) -> LinkPath | None:
        """Return the best connection to `peer`; None when there is none."""
        best = self.best(peer)
        return None if best is None else self._describe(peer, muxer_of(best))

    def paths(self) -> list[LinkPath]:
        """Return the best connection to every connected peer."""
        peers = [PeerId(peer.to_base58()) for peer in self.swarm.connections]
        paths = [path for peer in peers if (path := self.path(peer)) is not None]
        alive = {muxer_of(c) for c in self.swarm.get_connections()}
        self._meters = {m: meter for m, meter in self._meters.items() if m in alive}
        return paths

    def _describe(self, peer: PeerId, muxer: YamuxConnection) -> LinkPath:
        meter = self._meters.setdefault(muxer, RateMeter())
        return LinkPath(
            remote=peer,
            kind=kind_of(muxer),
            relay=muxer.relay,
            rtt_seconds=round(muxer.measured_rtt_seconds, 6),
            bytes_per_second=round(
                meter.look(muxer.sent_bytes + muxer.received_bytes, trio.current_time())
            ),
        )

    def changed(self, connection: SwarmConn) -> None:
        """Update after a connection was opened or lost."""
        peer = muxer_of(connection).remote
        best = self.best(peer)
        muxer = None if best is None else muxer_of(best)
        before = self._best.get(peer)
        if muxer is before:
            return
        if muxer is None:
            del self._best[peer]
            self.on_lost(peer)
            return
        self._best[peer] = muxer
        if before is not None:
            self.on_change(peer)

    async def open(self, peer: PeerId, protocol: str) -> YamuxStream:
        """Open a stream. NetworkError when the peer is not connected or does not serve the
        protocol."""
        connection = self.best(peer)
        if connection is None:
            raise NetworkError(f"{peer} is not connected")
        with dial_errors(f"opening {protocol} to {peer}"):
            stream = await muxer_of(connection).open_stream()
            await _negotiate(stream, peer, protocol)
        return stream

    def is_superseded(self, muxer: YamuxConnection) -> bool:
        """Whether a relayed connection has been replaced by a direct one, which new streams use."""
        return muxer.relay is not None and self.has_direct(muxer.remote)


async def _negotiate(stream: YamuxStream, peer: PeerId, protocol: str) -> None:
    """Negotiate the protocol (multistream-select) in one round trip; py-libp2p takes two."""
    messages = MultiselectCommunicator(stream)
    try:
        await messages.write(MULTISELECT_PROTOCOL_ID)
        await messages.write(protocol)
        if await messages.read() != MULTISELECT_PROTOCOL_ID:
            raise NetworkError(f"{peer} does not speak multistream-select")
        if await messages.read() != protocol:
            raise NetworkError(f"{peer} does not serve {protocol}")
    except BaseException:
        await stream.reset()
        raise
