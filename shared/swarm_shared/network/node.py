"""A peer's end of the network: connects, serves protocols, opens streams.

Assembles the parts and owns their life. Connections are chosen in `swarm_shared.network.links`,
made in `dialer`, `nat.relay_client` and `nat.hole_punch`, and maintained in `keepalive`; streams
from remotes are supervised in `inbound`. The host is built in `libp2p.host`, frames are in
`framed_stream`. Runs on trio.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial

import trio
from libp2p.peer.id import ID
from libp2p.tools.anyio_service.trio_manager import TrioManager
from multiaddr import Multiaddr

from swarm_shared.base.error_groups import single_error_unwrapped
from swarm_shared.base.errors import FrameError, NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity, public_key_of
from swarm_shared.network.change_watch import ChangeWatch
from swarm_shared.network.dialer import Dialer
from swarm_shared.network.framed_stream import FramedStream
from swarm_shared.network.inbound import Inbound
from swarm_shared.network.keepalive import ConnectionMaintenance
from swarm_shared.network.libp2p.bandwidth import Bandwidth
from swarm_shared.network.libp2p.errors import dial_errors, summary
from swarm_shared.network.libp2p.host import MAX_CONNECTIONS_PER_ADDRESS, build_swarm
from swarm_shared.network.libp2p.tcp import check_ports_are_free
from swarm_shared.network.libp2p.yamux import YamuxStream
from swarm_shared.network.links import Links, muxer_of
from swarm_shared.network.nat.circuit import HOP_PROTOCOL, MESSAGE_SECONDS, STOP_PROTOCOL
from swarm_shared.network.nat.hole_punch import DCUTR_PROTOCOL, HolePuncher
from swarm_shared.network.nat.identify import IDENTIFY_PROTOCOL, read_observed
from swarm_shared.network.nat.identify import answer as answer_identify
from swarm_shared.network.nat.relay_client import RelayClient
from swarm_shared.network.nat.relay_server import RelayLimits, RelayServer
from swarm_shared.network.own_addresses import OwnAddresses
from swarm_shared.protocol.framing import FrameLimits

logger = logging.getLogger(__name__)

PeerCallback = Callable[[PeerId], None]
Callback = Callable[[], None]

CONNECT_SECONDS = 20.0
"""Time for a direct dial, a relay's head start, a circuit, and an abandoned hole punch."""
OPEN_STREAM_SECONDS = 20.0
MAX_RELAY_ADDRESSES = 8
CLOSE_SECONDS = 2.0
"""Longest time to close all connections in an orderly way."""


class Node:
    """The node of one identity; made by `open_node`, valid inside its `async with`."""

    def __init__(
        self,
        identity: Identity,
        max_connections: int,
        max_inbound_streams_per_peer: int,
        max_connections_per_address: int,
        bandwidth: Bandwidth,
    ) -> None:
        self.peer_id = identity.peer_id
        self.bandwidth = bandwidth
        """Shared by all connections of the node; its limits may be set at any time."""
        self.bandwidth.nodes += 1
        self._swarm = swarm = build_swarm(
            identity, max_connections, max_connections_per_address, bandwidth
        )
        self._inbound = Inbound(max_inbound_streams_per_peer)
        self._watch = ChangeWatch(self._network_changed)
        self._links = links = Links(swarm, lambda: self._watch.interfaces)
        self._relays = RelayClient(links, partial(self.connect, from_listening_port=True))
        self._own = OwnAddresses(links, self._relays)
        self._puncher = HolePuncher(links, self._own)
        self._dialer = Dialer(links, self._own, self._relays, self._puncher)
        self._maintenance = ConnectionMaintenance(links, self._puncher)
        self.relay: RelayServer | None = None
        """The relay this node serves, if it does."""
        # What one part does alone, documented there.
        self.serve = self._inbound.serve
        self.link_bytes = self._inbound.traffic.link_bytes
        self.path, self.paths = links.path, links.paths
        self.punch, self.check = self._puncher.punch, self._maintenance.check
        # Callbacks are synchronous.
        self.on_disconnect: list[PeerCallback] = []
        """Called when the last connection to a peer is lost."""
        self.on_path_change: list[PeerCallback] = []
        """Called when a peer's best connection has changed."""
        self.on_addresses: list[Callback] = []
        """Called when `addresses` may have changed."""
        self.on_network_change: list[Callback] = []
        """Called when this machine's addresses changed or it woke up."""
        self._manager = TrioManager(swarm)
        self._swarm.set_stream_handler(self._inbound.accept)
        self._swarm.on_connected = self._maintenance.connected
        self._swarm.on_lost = self._links.changed
        self._links.on_lost = self._peer_lost
        self._links.on_change = lambda peer: self._notify(self.on_path_change, peer)
        self._relays.on_change = self._addresses_changed
        self._inbound.serve_raw(STOP_PROTOCOL, self._relays.handle_stop, public=True)
        self._inbound.serve_raw(DCUTR_PROTOCOL, self._puncher.handle, public=False)
        self._inbound.serve_raw(IDENTIFY_PROTOCOL, self._identify, public=True)

    # State

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which peers can reach this node, each ending in its peer ID; loopback
        last."""
        return tuple(f"{address}/p2p/{self.peer_id}" for address in self._own.all())

    @property
    def listening_port(self) -> int | None:
        """The TCP port that peers dial; None when this node does not listen."""
        return self._own.listening_port

    @property
    def connected_peers(self) -> tuple[PeerId, ...]:
        return tuple(PeerId(peer.to_base58()) for peer in self._swarm.connections)

    @property
    def handler_errors(self) -> dict[str, int]:
        """Number of handler failures of each protocol that are bugs of this side."""
        return dict(self._inbound.handler_errors)

    @property
    def relay_slots(self) -> tuple[PeerId, ...]:
        """The relays at which this node can be reached now."""
        return self._relays.slots

    def is_connected(self, peer: PeerId) -> bool:
        """Whether a connection to the peer is open, direct or relayed."""
        return self._links.best(peer) is not None

    def observed_address(self, peer: PeerId) -> str | None:
        """Return this node's address and port as `peer` sees them; None when it has not reported
        them.

        Known for peers that were connected to with `from_listening_port`, relays among them.
        """
        return self._own.observed.get(peer)

    # Serving

    def admit_only(
        self,
        admits: Callable[[PeerId, str], bool],
        knows: Callable[[PeerId], bool] | None = None,
    ) -> None:
        """Set which remotes may use which protocol; public protocols are open to all.

        `knows`: which remotes are members, where not every admitted remote is. Other remotes are
        limited to fewer connections and streams at once.
        """
        self._inbound.admits = admits
        self._inbound.knows = knows or (lambda peer: admits(peer, ""))
        self._swarm.knows = self._inbound.knows

    def serve_relay(self, limits: RelayLimits, allow: Callable[[PeerId], bool]) -> None:
        """Relay for the peers that `allow` accepts, at both ends of a circuit."""
        self.relay = RelayServer(
            limits, allow, lambda: self._own.dialable()[:MAX_RELAY_ADDRESSES], self._links
        )
        self._inbound.serve_raw(HOP_PROTOCOL, self.relay.handle, public=True)

    def stop_relay(self) -> None:
        """Accept no new slots and circuits; existing ones continue."""
        self._inbound.stop(HOP_PROTOCOL)
        self.relay = None

    # Being reached

    def announce(self, addresses: Sequence[str]) -> None:
        """Add addresses that only others can determine: a router's, a DNS name."""
        if self._own.announce(addresses):
            self._addresses_changed()

    def use_relays(
        self, relays: Mapping[PeerId, Sequence[str]], wanted: int, last: PeerId | None = None
    ) -> None:
        """Hold `wanted` slots at some of `relays`; at `last` only when the others do not serve."""
        self._relays.offer(relays, last)
        self._relays.want(wanted)

    # Reaching others

    async def connect(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        timeout_seconds: float = CONNECT_SECONDS,
        *,
        from_listening_port: bool = False,
    ) -> None:
        """Connect to `peer` at one of `addresses`; does nothing when already connected.

        Uses a relay where no direct path exists, and then hole punching if that succeeds within
        seconds. With `from_listening_port` the remote sees the router's mapping of that port, and
        is asked for it. NetworkError when no address leads to that very peer; LinkTimeout when none
        answers.
        """
        if peer == self.peer_id:
            raise NetworkError(f"{peer} is this node itself")
        _libp2p_id(peer)
        await self._dialer.connect(
            peer, addresses, timeout_seconds, from_listening_port=from_listening_port
        )
        if from_listening_port and peer not in self._own.observed:
            await self._ask_observed(peer)

    async def open_stream(
        self,
        peer: PeerId,
        protocol: str,
        limits: FrameLimits,
        addresses: Sequence[str] = (),
        timeout_seconds: float = OPEN_STREAM_SECONDS,
    ) -> FramedStream:
        """Open a stream to `peer` on its best connection; connects first if necessary.

        NetworkError when the peer cannot be reached or does not serve the protocol.
        """
        _libp2p_id(peer)
        with dial_errors(f"opening {protocol} to {peer}"), trio.fail_after(timeout_seconds):
            if not self.is_connected(peer):
                if not addresses:
                    raise NetworkError(f"{peer} is not connected, and no address of it is known")
                await self.connect(peer, addresses, timeout_seconds)
            stream = await self._links.open(peer, protocol)
        traffic = self._inbound.traffic.link(peer, protocol)
        return FramedStream(stream, protocol, limits, traffic, self._links.is_superseded)

    async def disconnect(self, peer: PeerId) -> None:
        """Close all connections to `peer`."""
        for connection in self._swarm.get_connections(_libp2p_id(peer)):
            await connection.close()

    # Life

    async def listen(self, addresses: Sequence[str]) -> None:
        """Listen at these multiaddrs. NetworkError when one is invalid or its port is in use."""
        parsed = [_parse(address) for address in addresses]
        for address in parsed:
            if [p.name for p in address.protocols()] not in (["ip4", "tcp"], ["ip6", "tcp"]):
                raise NetworkError(
                    f"{address} cannot be listened on; give an address like /ip4/0.0.0.0/tcp/4001"
                )
        check_ports_are_free(parsed)
        await self._manager.wait_started()
        with dial_errors("listening"):
            await self._swarm.listen(*parsed)
        for address in parsed:
            if str(address) not in self._swarm.listeners:
                raise NetworkError(f"{address} cannot be listened on; choose another port")

    async def run(self) -> None:
        """Run the host until cancelled. NetworkError when it fails."""
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._relays.run)
                nursery.start_soon(self._watch.run)
                nursery.start_soon(self._maintenance.run)
                await self._manager.run()
        except Exception as error:
            raise NetworkError(
                f"the network of this node failed ({summary(error)}); start it again"
            ) from error

    async def close(self) -> None:
        """Close all connections at once, then stop listening."""
        async with trio.open_nursery() as nursery:
            for connection in self._swarm.get_connections():
                nursery.start_soon(connection.close)
        for listener in list(self._swarm.listeners.values()):
            await listener.close()

    # Its own addresses

    async def _ask_observed(self, peer: PeerId) -> None:
        best = self._links.best(peer)
        port = None if best is None else muxer_of(best).local_port
        if port is None or port != self.listening_port:
            # A router's mapping of another port is of no use to other peers.
            return
        try:
            with dial_errors(f"asking {peer} for our address"), trio.fail_after(MESSAGE_SECONDS):
                stream = await self._links.open(peer, IDENTIFY_PROTOCOL)
                observed = await read_observed(stream)
                await stream.close()
        except (NetworkError, FrameError) as error:
            logger.debug("%s", error)
            return
        if observed is not None:
            self._own.observed[peer] = observed

    # Events

    def _peer_lost(self, peer: PeerId) -> None:
        self._own.observed.pop(peer, None)
        if self.relay is not None:
            self.relay.forget(peer)
        self._relays.lost(peer)
        self._notify(self.on_disconnect, peer)

    def _notify(self, callbacks: Sequence[Callable[..., None]], *changed: PeerId) -> None:
        for callback in callbacks:
            try:
                callback(*changed)
            except Exception:  # a supervisor: one callback's failure must not stop the others
                self._inbound.handler_errors["callback"] += 1
                logger.exception("a callback for a change failed: %s", ", ".join(changed))

    def _addresses_changed(self) -> None:
        self._notify(self.on_addresses)

    def _network_changed(self) -> None:
        """Handle a change of network or a wake-up: check connections and inform the listeners."""
        self._maintenance.network_changed()
        self._addresses_changed()
        self._notify(self.on_network_change)

    # Raw protocols

    async def _identify(self, stream: YamuxStream) -> None:
        public_key = self._swarm.peerstore.pubkey(_libp2p_id(self.peer_id))
        await answer_identify(
            stream, public_key.serialize(), self._own.dialable(), self._inbound.protocols
        )


def _libp2p_id(peer: PeerId) -> ID:
    public_key_of(peer)
    return ID.from_base58(peer)


def _parse(address: str) -> Multiaddr:
    try:
        return Multiaddr(address)
    except ValueError as error:
        raise NetworkError(
            f"{address!r} is not a multiaddr such as /ip4/192.0.2.1/tcp/4001"
        ) from error


@asynccontextmanager
async def open_node(
    identity: Identity,
    listen_addresses: Sequence[str] = (),
    *,
    max_connections: int = 10_000,
    max_inbound_streams_per_peer: int = 256,
    max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS,
    bandwidth: Bandwidth | None = None,
) -> AsyncIterator[Node]:
    """Run a node until the block ends; closing takes CLOSE_SECONDS at most.

    Without `listen_addresses` it can connect but not be connected to. Port 0 takes any free port.
    NetworkError when a port is not available. Several nodes may share one `bandwidth`.
    """
    node = Node(
        identity, max_connections, max_inbound_streams_per_peer, max_connections_per_address,
        bandwidth or Bandwidth(),
    )  # fmt: skip
    with single_error_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            try:
                await node.listen(listen_addresses)
                yield node
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS):
                    await node.close()
                nursery.cancel_scope.cancel()
