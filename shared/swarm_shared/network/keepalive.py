"""Maintenance of connections: dead ones are detected, relayed ones replaced by direct ones."""

from __future__ import annotations

import trio
from libp2p.network.connection.swarm_connection import SwarmConn

from swarm_shared.addresses.dial_order import is_global
from swarm_shared.base.types import PeerId
from swarm_shared.network.links import Links, muxer_of
from swarm_shared.network.nat.hole_punch import HolePuncher
from swarm_shared.network.nat.identify import remote_multiaddr

RELAYED_LINGER_SECONDS = 5.0
"""Wait before an unneeded relayed connection is closed: its streams have moved to the direct one by
then."""
LIVENESS_TIMEOUT_SECONDS = 3.0
"""Longest wait for the answer to a ping before a suspect connection counts as dead."""
PUNCH_AGAIN_SECONDS = 15.0
"""Interval at which relayed connections are examined; each peer has a back-off of its own."""


class ConnectionMaintenance:
    """Maintains connections while `run` runs."""

    def __init__(self, links: Links, puncher: HolePuncher) -> None:
        self._links = links
        self._puncher = puncher
        self._nursery: trio.Nursery | None = None

    async def run(self) -> None:
        """Retry hole punching for relayed peers now and then: routers forget mappings and machines
        move."""
        try:
            async with trio.open_nursery() as self._nursery:
                while True:
                    await trio.sleep(PUNCH_AGAIN_SECONDS)
                    self._punch_relayed()
        finally:
            self._nursery = None

    def check(self, peer: PeerId) -> None:
        """Ping the connections to `peer` in the background and close dead ones; called when its
        network may have changed."""
        if self._nursery is not None:
            for connection in self._links.all_of(peer):
                self._nursery.start_soon(muxer_of(connection).check_alive, LIVENESS_TIMEOUT_SECONDS)

    def network_changed(self) -> None:
        """Check all connections after a change of network or a sleep, and retry hole punching."""
        self._puncher.network_changed()
        if self._nursery is not None:
            own = {str(host) for host in self._links.interfaces().hosts}
            for connection in self._links.swarm.get_connections():
                muxer = muxer_of(connection)
                # Nothing arrives at an address that this machine has no more.
                seconds = LIVENESS_TIMEOUT_SECONDS if muxer.local_host in (None, *own) else 0.0
                self._nursery.start_soon(muxer.check_alive, seconds)
            self._punch_relayed()

    def connected(self, connection: SwarmConn) -> None:
        """Handle a new connection: a direct one replaces relayed ones, a relayed one is punched."""
        muxer = muxer_of(connection)
        peer = muxer.remote
        if muxer.relay is None:
            place = remote_multiaddr(muxer.get_remote_address())
            # A connection made during hole punching came through the hole, unless it is local.
            muxer.punched = self._puncher.is_active(peer) and place is not None and is_global(place)
        self._links.changed(connection)
        if self._nursery is None:
            return
        if muxer.relay is None:
            self._puncher.connected(peer)
            self._nursery.start_soon(self._retire_relayed, peer)
        elif not muxer.is_initiator:
            # As the specification requires, the end that was dialled begins.
            self._nursery.start_soon(self._punch_for_dialler, peer)

    async def _punch_for_dialler(self, peer: PeerId) -> None:
        """Punch a hole for a peer that came through a relay. It has no direct connection: one that
        is open here is dead, or was made at the same moment."""
        async with trio.open_nursery() as nursery:
            for connection in self._links.all_of(peer):
                if muxer_of(connection).relay is None:
                    nursery.start_soon(muxer_of(connection).check_alive, LIVENESS_TIMEOUT_SECONDS)
        if await self._puncher.punch(peer):
            await self._retire_relayed(peer)

    async def _retire_relayed(self, peer: PeerId) -> None:
        """Close relayed connections that are not needed any more, once no stream uses them.

        Later ones are left alone: their dialler may know better than this end that the direct one
        is dead.
        """
        relayed = [c for c in self._links.all_of(peer) if muxer_of(c).relay is not None]
        while self._links.has_direct(peer):
            relayed = [connection for connection in relayed if not connection.is_closed]
            if not relayed:
                return
            await trio.sleep(RELAYED_LINGER_SECONDS)
            for connection in relayed:
                if self._links.has_direct(peer) and not muxer_of(connection).stream_count:
                    await connection.close()

    def _punch_relayed(self) -> None:
        if self._nursery is not None:
            for connected in self._links.swarm.connections:
                peer = PeerId(connected.to_base58())
                if not self._links.has_direct(peer):
                    self._nursery.start_soon(self._puncher.punch, peer)
