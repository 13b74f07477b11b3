"""A peer's end of the network: connect, serve protocols, open streams.

Puts the parts together and owns their life: connections are chosen in `links`, made in `dialer`,
`relay_client` and `hole_punch`, looked after in `upkeep`; streams from remotes are supervised in
`inbound`. Building the host is in `host`, frames are in `stream`. Runs on trio.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.tools.anyio_service.trio_manager import TrioManager
from multiaddr import Multiaddr

from swarm_shared.base.errors import FrameError, NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity, public_key_of
from swarm_shared.network.change_watch import ChangeWatch
from swarm_shared.network.dialer import Dialer
from swarm_shared.network.framed_stream import FramedStream
from swarm_shared.network.inbound import Handler, Inbound, RawHandler
from swarm_shared.network.keepalive import ConnectionMaintenance
from swarm_shared.network.libp2p.bandwidth import Bandwidth
from swarm_shared.network.libp2p.errors import dial_errors, summary
from swarm_shared.network.libp2p.host import MAX_CONNECTIONS_PER_ADDRESS, NodeSwarm, build_host
from swarm_shared.network.libp2p.tcp import check_ports_are_free
from swarm_shared.network.libp2p.yamux_stream import YamuxStream
from swarm_shared.network.links import Links, muxer_of
from swarm_shared.network.nat.circuit import HOP_PROTOCOL, MESSAGE_SECONDS, STOP_PROTOCOL
from swarm_shared.network.nat.hole_punch import DCUTR_PROTOCOL, HolePuncher
from swarm_shared.network.nat.identify import IDENTIFY_PROTOCOL, read_observed
from swarm_shared.network.nat.identify import answer as answer_identify
from swarm_shared.network.nat.relay_client import RelayClient
from swarm_shared.network.nat.relay_server import RelayLimits, RelayServer
from swarm_shared.network.outbound import StreamOpener
from swarm_shared.network.own_addresses import OwnAddresses
from swarm_shared.network.traffic import LinkTraffic
from swarm_shared.protocol import LinkBytes, LinkPath
from swarm_shared.protocol.framing import FrameLimits

logger = logging.getLogger(__name__)

PeerCallback = Callable[[PeerId], None]

CONNECT_SECONDS = 20.0
"""A direct dial, a relay's head start, a circuit, and a hole that is given up."""
OPEN_STREAM_SECONDS = 20.0
MAX_RELAY_ADDRESSES = 8
MAX_STREAMS_OF_PROTOCOL = 64
"""Of one remote, unless a protocol says otherwise."""


class Node:
    """Made by `opening.open_node`; valid inside its `async with`."""

    def __init__(
        self,
        identity: Identity,
        max_connections: int,
        max_inbound_streams_per_peer: int,
        max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.peer_id = identity.peer_id
        self.bandwidth = bandwidth or Bandwidth()
        """Of all its connections together; limits may be set at any time."""
        self.bandwidth.nodes += 1
        self._host = build_host(
            identity, max_connections, max_connections_per_address, self.bandwidth
        )
        swarm = self._host.get_network()
        assert isinstance(swarm, NodeSwarm)
        self._swarm = swarm
        self._links = Links(swarm)
        self._streams = StreamOpener(self._links)
        self._inbound = Inbound(self._host, max_inbound_streams_per_peer)
        self._watch = ChangeWatch(self._network_changed)
        self._relays = RelayClient(
            self.peer_id, swarm, self._connect_to_relay, self._streams.open_raw
        )
        self._own = OwnAddresses(swarm, self._relays, lambda: self._watch.interfaces)
        self._puncher = HolePuncher(
            swarm, self._own.punchable, self._own.source, self._streams.open_raw,
            self._links.has_direct, lambda: self._watch.interfaces,
        )  # fmt: skip
        self._dialer = Dialer(
            swarm, self._links, self._relays, self._puncher, lambda: self._watch.interfaces,
            self._own.source,
        )  # fmt: skip
        self._maintenance = ConnectionMaintenance(
            swarm, self._links, self._puncher, lambda: self._watch.interfaces
        )
        self._relay: RelayServer | None = None
        self._disconnect_callbacks: list[PeerCallback] = []
        self._path_callbacks: list[PeerCallback] = []
        self._address_callbacks: list[Callable[[], None]] = []
        self._network_callbacks: list[Callable[[], None]] = []
        self._manager = TrioManager(swarm)
        self._swarm.set_stream_handler(self._inbound.accept)
        self._swarm.on_connected = self._maintenance.connected
        self._swarm.on_lost = self._links.changed
        self._links.on_lost = self._peer_lost
        self._links.on_change = self._path_changed
        self._relays.on_change = self._addresses_changed
        self._serve_raw(STOP_PROTOCOL, self._relays.handle_stop, public=True)
        self._serve_raw(DCUTR_PROTOCOL, self._puncher.handle)
        self._serve_raw(IDENTIFY_PROTOCOL, self._identify, public=True)

    # What is known

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can reach this node, each ending in its peer ID; loopback last."""
        return tuple(f"{address}/p2p/{self.peer_id}" for address in self._own.all())

    @property
    def listening_port(self) -> int | None:
        """The TCP port that others dial; None when this node does not listen."""
        return self._own.listening_port

    @property
    def connected_peers(self) -> tuple[PeerId, ...]:
        return tuple(PeerId(peer.to_base58()) for peer in self._swarm.connections)

    @property
    def handler_errors(self) -> dict[str, int]:
        """How often the handlers of each protocol failed by a fault of this side."""
        return dict(self._inbound.handler_errors)

    @property
    def relay_slots(self) -> tuple[PeerId, ...]:
        """The relays at which this node can be reached now."""
        return self._relays.slots

    @property
    def relay(self) -> RelayServer | None:
        """What this node does for others, when it does."""
        return self._relay

    def is_connected(self, peer: PeerId) -> bool:
        return self._links.best(peer) is not None

    def path(self, peer: PeerId) -> LinkPath | None:
        """The best connection to `peer`; None when there is none."""
        return self._links.path(peer)

    def paths(self) -> list[LinkPath]:
        """The best connection to every connected peer."""
        return self._links.paths()

    def traffic(self) -> list[LinkTraffic]:
        """What framed streams carried since the node was opened."""
        return self._inbound.traffic.totals()

    def link_bytes(self) -> tuple[LinkBytes, ...]:
        """The same, per remote and protocol, as peers report it."""
        return self._inbound.traffic.link_bytes()

    def observed_address(self, peer: PeerId) -> str | None:
        """How `peer` sees this node's address and port; None when it has not said so.

        Known of peers that were connected to with `from_listening_port`, relays among them.
        """
        return self._own.observed.get(peer)

    # What is served

    def serve(
        self,
        protocol: str,
        handler: Handler,
        limits: FrameLimits,
        *,
        public: bool = False,
        max_streams_per_peer: int = MAX_STREAMS_OF_PROTOCOL,
    ) -> None:
        """Runs `handler` for each stream that a remote opens with `protocol`.

        The stream is closed when the handler returns and reset when it raises. What it raises
        stays here: logged once, with its traceback when it is a fault of this side. A protocol
        that is not `public` is refused to remotes that `admits` does not know.
        """
        self._inbound.serve(
            protocol, handler, limits, public=public, max_streams_per_peer=max_streams_per_peer
        )

    def admit_only(
        self,
        admits: Callable[[PeerId, str], bool],
        knows: Callable[[PeerId], bool] | None = None,
    ) -> None:
        """From now on, who may use which protocol; those served as public are for everybody.

        `knows`: who belongs here, when not everybody does who is admitted. Of others fewer
        connections and streams are kept at once.
        """
        self._inbound.admits = admits
        self._inbound.knows = knows or (lambda peer: admits(peer, ""))
        self._swarm.knows = self._inbound.knows

    def serve_relay(self, limits: RelayLimits, allow: Callable[[PeerId], bool]) -> None:
        """Relays for the peers that `allow` names, at both ends of a circuit."""
        self._relay = RelayServer(
            limits,
            allow,
            lambda: self._own.dialable()[:MAX_RELAY_ADDRESSES],
            self._streams.open_raw,
        )
        self._serve_raw(HOP_PROTOCOL, self._relay.handle, public=True)

    def stop_relay(self) -> None:
        """No new slots and circuits; those there are go on."""
        self._host.multiselect.handlers.pop(TProtocol(HOP_PROTOCOL), None)
        self._relay = None

    # Being reached

    def announce(self, addresses: Sequence[str]) -> None:
        """Addresses of this node that only others can know: a router's, a name's."""
        if self._own.announce(addresses):
            self._addresses_changed()

    def use_relays(
        self, relays: Mapping[PeerId, Sequence[str]], wanted: int, last: PeerId | None = None
    ) -> None:
        """Hold `wanted` slots at some of `relays`, at `last` only when others do not serve."""
        self._relays.offer(relays, last)
        self._relays.want(wanted)

    def on_addresses(self, callback: Callable[[], None]) -> None:
        """Calls back, synchronously, when `addresses` may have changed."""
        self._address_callbacks.append(callback)

    def on_disconnect(self, callback: PeerCallback) -> None:
        """Calls back, synchronously, when the last connection to a peer is gone."""
        self._disconnect_callbacks.append(callback)

    def on_path_change(self, callback: PeerCallback) -> None:
        """Calls back, synchronously, when a peer's best connection is another one than before."""
        self._path_callbacks.append(callback)

    def on_network_change(self, callback: Callable[[], None]) -> None:
        """Calls back, synchronously, when this machine's addresses changed or it woke up."""
        self._network_callbacks.append(callback)

    # Reaching others

    async def connect(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        timeout_seconds: float = CONNECT_SECONDS,
        *,
        from_listening_port: bool = False,
    ) -> None:
        """Connects to `peer` at one of `addresses`; does nothing when already connected.

        Through a relay where nothing else leads there, and then by a punched hole if that works
        within seconds. With `from_listening_port` the remote sees the router's mapping of that
        port, and is asked for it. NetworkError when no address leads to that very peer;
        LinkTimeout when none answers.
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
        """A new stream to `peer` on its best connection; connects first when need be.

        NetworkError when the peer cannot be reached or does not speak the protocol.
        """
        _libp2p_id(peer)
        with dial_errors(f"opening {protocol} to {peer}"), trio.fail_after(timeout_seconds):
            if not self.is_connected(peer):
                if not addresses:
                    raise NetworkError(f"{peer} is not connected, and no address of it is known")
                await self.connect(peer, addresses, timeout_seconds)
            stream = await self._streams.open(peer, protocol)
        return FramedStream(
            stream, protocol, limits, self._inbound.traffic, self._links.is_superseded
        )

    async def punch(self, peer: PeerId) -> bool:
        """Try to make a relayed connection a direct one. False: it stays as it is."""
        return await self._puncher.punch(peer)

    def check(self, peer: PeerId) -> None:
        """Makes sure in the background that the connections to `peer` live, and closes dead ones:
        there is reason to believe that its network has changed."""
        self._maintenance.check(peer)

    async def disconnect(self, peer: PeerId) -> None:
        """Closes all connections to `peer`."""
        for connection in self._swarm.get_connections(_libp2p_id(peer)):
            await connection.close()

    # Life

    async def listen(self, addresses: Sequence[str]) -> None:
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
        """Runs the host until cancelled. NetworkError when it fails."""
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
        """Says good-bye on all connections at once, then stops listening."""
        async with trio.open_nursery() as nursery:
            for connection in self._swarm.get_connections():
                nursery.start_soon(connection.close)
        for listener in list(self._swarm.listeners.values()):
            await listener.close()

    # Its own addresses

    async def _connect_to_relay(self, relay: PeerId, addresses: Sequence[str]) -> None:
        await self.connect(relay, addresses, from_listening_port=True)

    async def _ask_observed(self, peer: PeerId) -> None:
        best = self._links.best(peer)
        port = None if best is None else muxer_of(best).local_port
        if port is None or port != self.listening_port:
            # Of another port a router's mapping tells nothing that others could use.
            return
        try:
            with dial_errors(f"asking {peer} who we are"), trio.fail_after(MESSAGE_SECONDS):
                stream = await self._streams.open_raw(peer, IDENTIFY_PROTOCOL)
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
        if self._relay is not None:
            self._relay.forget(peer)
        self._relays.lost(peer)
        self._tell(self._disconnect_callbacks, peer)

    def _path_changed(self, peer: PeerId) -> None:
        self._tell(self._path_callbacks, peer)

    def _tell(self, callbacks: Sequence[PeerCallback], peer: PeerId) -> None:
        for callback in callbacks:
            try:
                callback(peer)
            except Exception:  # a supervisor: one listener's fault must not stop the others
                self._inbound.handler_errors["callback"] += 1
                logger.exception("what was to be done about the link to %s failed", peer)

    def _addresses_changed(self) -> None:
        for callback in self._address_callbacks:
            callback()

    def _network_changed(self) -> None:
        """Another network, or awake after sleep: what is dead must be noticed, and tried anew."""
        self._maintenance.network_changed()
        self._addresses_changed()
        for callback in self._network_callbacks:
            callback()

    # Raw protocols

    def _serve_raw(self, protocol: str, handler: RawHandler, *, public: bool = False) -> None:
        self._inbound.serve_raw(protocol, handler, public=public)

    async def _identify(self, stream: YamuxStream) -> None:
        protocols = tuple(str(protocol) for protocol in self._host.multiselect.handlers)
        public_key = self._swarm.peerstore.pubkey(_libp2p_id(self.peer_id))
        await answer_identify(stream, public_key.serialize(), self._own.dialable(), protocols)


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
