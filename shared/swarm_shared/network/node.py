"""A peer's end of the network: connect, serve protocols, open streams.

Owns the life of the host and every handler's supervision. Building the host is in `host`,
frames are in `stream`. Runs on trio.
"""

from __future__ import annotations

import ipaddress
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial

import psutil
import trio
from libp2p.abc import INetConn, INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.tools.anyio_service.trio_manager import TrioManager
from multiaddr import Multiaddr

from swarm_shared.errors import LinkClosed, LinkTimeout, NetworkError, ProtocolError, SwarmError
from swarm_shared.identity import Identity, public_key_of
from swarm_shared.network.errors import dial_errors, summary
from swarm_shared.network.host import NodeSwarm, build_host
from swarm_shared.network.stream import FramedStream
from swarm_shared.network.tcp import check_ports_are_free
from swarm_shared.network.traffic import LinkTraffic, TrafficCounter
from swarm_shared.types import PeerId
from swarm_shared.wire import FrameLimits

logger = logging.getLogger(__name__)

Handler = Callable[[FramedStream], Awaitable[None]]
DisconnectCallback = Callable[[PeerId], None]

CONNECT_SECONDS = 15.0
OPEN_STREAM_SECONDS = 15.0
DIAL_STAGGER_SECONDS = 0.25
"""Head start of each address over the next (happy eyeballs, RFC 8305)."""
MAX_ADDRESSES_DIALLED = 16
CLOSE_SECONDS = 2.0
"""How long closing the node waits for good-byes to be sent, over all connections."""


class Node:
    """Made by `open_node`; valid inside its `async with`."""

    def __init__(
        self, identity: Identity, max_connections: int, max_inbound_streams_per_peer: int
    ) -> None:
        self.peer_id = identity.peer_id
        self._host = build_host(identity, max_connections)
        swarm = self._host.get_network()
        assert isinstance(swarm, NodeSwarm)
        self._swarm = swarm
        self._max_inbound_streams = max_inbound_streams_per_peer
        self._inbound_streams: Counter[PeerId] = Counter()
        self._handler_errors: Counter[str] = Counter()
        self._traffic = TrafficCounter()
        self._disconnect_callbacks: list[DisconnectCallback] = []
        self._dials: dict[PeerId, trio.Lock] = {}
        self._manager = TrioManager(swarm)
        self._swarm.set_stream_handler(self._accept_stream)
        self._swarm.on_peer_lost = self._peer_lost

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where others can reach this node, each ending in its peer ID; loopback last."""
        found: dict[str, None] = {}
        for listener in self._swarm.listeners.values():
            for address in listener.get_addrs():
                for dialable in _dialable(address):
                    found[f"{dialable}/p2p/{self.peer_id}"] = None
        return tuple(sorted(found, key=lambda text: "/127." in text or "/::1/" in text))

    @property
    def connected_peers(self) -> tuple[PeerId, ...]:
        return tuple(PeerId(peer.to_base58()) for peer in self._swarm.connections)

    @property
    def handler_errors(self) -> dict[str, int]:
        """How often the handlers of each protocol failed by a fault of this side."""
        return dict(self._handler_errors)

    def is_connected(self, peer: PeerId) -> bool:
        return any(not connection.is_closed for connection in self._connections(peer))

    def traffic(self) -> list[LinkTraffic]:
        """What framed streams carried since the node was opened."""
        return self._traffic.totals()

    def serve(self, protocol: str, handler: Handler, limits: FrameLimits) -> None:
        """Runs `handler` for each stream that a remote opens with `protocol`.

        The stream is closed when the handler returns and reset when it raises. What it raises
        stays here: logged once, with its traceback when it is a fault of this side.
        """
        self._host.set_stream_handler(
            TProtocol(protocol), partial(self._handle, protocol, handler, limits)
        )

    def on_disconnect(self, callback: DisconnectCallback) -> None:
        """Calls back, synchronously, when the last connection to a peer is gone."""
        self._disconnect_callbacks.append(callback)

    async def connect(
        self,
        peer: PeerId,
        addresses: Sequence[str],
        timeout_seconds: float = CONNECT_SECONDS,
    ) -> None:
        """Connects to `peer` at one of `addresses`; does nothing when already connected.

        NetworkError when none of them leads to that very peer; LinkTimeout when none answers.
        """
        lock = self._dials.setdefault(peer, trio.Lock())
        try:
            async with lock:
                if self.is_connected(peer):
                    return
                if peer == self.peer_id:
                    raise NetworkError(f"{peer} is this node itself")
                targets = _parse_addresses(peer, addresses)
                await self._dial_first(peer, targets, timeout_seconds)
        finally:
            if not lock.statistics().tasks_waiting and not lock.locked():
                self._dials.pop(peer, None)

    async def open_stream(
        self,
        peer: PeerId,
        protocol: str,
        limits: FrameLimits,
        addresses: Sequence[str] = (),
        timeout_seconds: float = OPEN_STREAM_SECONDS,
    ) -> FramedStream:
        """A new stream to `peer`; connects first when there are `addresses` and need be.

        NetworkError when the peer cannot be reached or does not speak the protocol.
        """
        with dial_errors(f"opening {protocol} to {peer}"), trio.fail_after(timeout_seconds):
            if not self.is_connected(peer):
                if not addresses:
                    raise NetworkError(f"{peer} is not connected, and no address of it is known")
                await self.connect(peer, addresses, timeout_seconds)
            stream = await self._swarm.new_stream(_libp2p_id(peer))
            await _negotiate(stream, peer, protocol)
        assert isinstance(stream, NetStream)
        return FramedStream(stream, protocol, limits, self._traffic)

    async def disconnect(self, peer: PeerId) -> None:
        """Closes all connections to `peer`."""
        for connection in self._connections(peer):
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

    # Connections

    def _connections(self, peer: PeerId) -> list[INetConn]:
        connections: list[INetConn] = self._swarm.get_connections(_libp2p_id(peer))
        return connections

    async def _dial_first(
        self, peer: PeerId, targets: list[Multiaddr], timeout_seconds: float
    ) -> None:
        """Dials all targets, each a little after the one before; the first to succeed wins."""
        reasons: list[str] = []
        answered = False

        async def dial(target: Multiaddr, failed: trio.Event) -> None:
            nonlocal answered
            try:
                with dial_errors(f"{target}"):
                    await self._swarm.dial_addr(target, _libp2p_id(peer))
            except NetworkError as error:
                reasons.append(str(error))
                failed.set()
                return
            answered = True
            nursery.cancel_scope.cancel()

        with trio.move_on_after(timeout_seconds) as scope:
            async with trio.open_nursery() as nursery:
                for target in targets:
                    failed = trio.Event()
                    nursery.start_soon(dial, target, failed)
                    with trio.move_on_after(DIAL_STAGGER_SECONDS):
                        await failed.wait()
        if answered or self.is_connected(peer):
            return
        if scope.cancelled_caught:
            raise LinkTimeout(
                f"{peer} did not answer within {timeout_seconds:g} s at "
                f"{', '.join(map(str, targets))}"
            )
        raise NetworkError(f"{peer} cannot be reached: {'; '.join(reasons)}")

    def _peer_lost(self, peer_id: ID) -> None:
        peer = PeerId(peer_id.to_base58())
        for callback in self._disconnect_callbacks:
            try:
                callback(peer)
            except Exception:  # a supervisor: one listener's fault must not stop the others
                self._handler_errors["on_disconnect"] += 1
                logger.exception("what was to be done at the loss of %s failed", peer)

    # Streams from remotes

    async def _accept_stream(self, stream: INetStream) -> None:
        """The entry of every stream that a remote opens. Never raises: an error that leaves
        here would stop the whole host."""
        remote = PeerId(stream.muxed_conn.peer_id.to_base58())
        if self._inbound_streams[remote] >= self._max_inbound_streams:
            logger.debug("%s has too many streams open, one more is refused", remote)
            await stream.reset()
            return
        self._inbound_streams[remote] += 1
        try:
            await self._host._swarm_stream_handler(stream)
        except Exception as error:  # noqa: BLE001 (a remote's garbage makes py-libp2p raise anything)
            logger.debug("a stream from %s was refused: %s", remote, summary(error))
            await stream.reset()
        finally:
            self._inbound_streams[remote] -= 1
            if not self._inbound_streams[remote]:
                del self._inbound_streams[remote]

    async def _handle(
        self, protocol: str, handler: Handler, limits: FrameLimits, stream: INetStream
    ) -> None:
        assert isinstance(stream, NetStream)
        framed = FramedStream(stream, protocol, limits, self._traffic)
        try:
            await handler(framed)
        except LinkClosed as error:
            logger.debug("%s: %s", protocol, error)
        except (NetworkError, ProtocolError) as error:
            logger.info("%s with %s ended: %s", protocol, framed.remote, error)
        except SwarmError as error:
            logger.warning("%s with %s ended: %s", protocol, framed.remote, error)
        except Exception:  # a supervisor: one stream's trouble stays its own
            self._handler_errors[protocol] += 1
            logger.exception(
                "the handler of %s failed on a stream with %s", protocol, framed.remote
            )
        else:
            await framed.close()
        finally:
            await framed.reset()


@asynccontextmanager
async def open_node(
    identity: Identity,
    listen_addresses: Sequence[str] = (),
    *,
    max_connections: int = 10_000,
    max_inbound_streams_per_peer: int = 256,
) -> AsyncIterator[Node]:
    """Runs a node until the block ends; then ends within CLOSE_SECONDS or so.

    Without `listen_addresses` it can connect but not be connected to. Port 0 takes any free
    port. NetworkError when a port cannot be had.
    """
    node = Node(identity, max_connections, max_inbound_streams_per_peer)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            try:
                await node.listen(listen_addresses)
                yield node
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS):
                    await node.close()
                nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The nursery wraps what the block raised; the caller expects it as it was.
        if len(group.exceptions) != 1:
            raise
        failure = group.exceptions[0]
    else:
        return
    raise failure


async def _negotiate(stream: INetStream, peer: PeerId, protocol: str) -> None:
    """Asks for the protocol (multistream-select) in one round trip; py-libp2p takes two."""
    messages = MultiselectCommunicator(stream)
    agreed = False
    try:
        await messages.write(MULTISELECT_PROTOCOL_ID)
        await messages.write(protocol)
        if await messages.read() != MULTISELECT_PROTOCOL_ID:
            raise NetworkError(f"{peer} does not speak multistream-select")
        if await messages.read() != protocol:
            raise NetworkError(f"{peer} does not serve {protocol}")
        agreed = True
    finally:
        if not agreed:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await stream.reset()


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


def _parse_addresses(peer: PeerId, addresses: Sequence[str]) -> list[Multiaddr]:
    """The dialable ones, without the peer ID at their end. NetworkError if none is left."""
    suffix = f"/p2p/{peer}"
    parsed: list[Multiaddr] = []
    for address in addresses:
        try:
            target = _parse(address.removesuffix(suffix))
        except NetworkError:
            logger.debug("skipping %r, an address of %s", address, peer)
            continue
        names = {protocol.name for protocol in target.protocols()}
        if "tcp" in names and not names & {"p2p", "ws", "wss"}:
            parsed.append(target)
    if not parsed:
        raise NetworkError(f"{peer} has no address that can be dialled: {', '.join(addresses)}")
    return parsed[:MAX_ADDRESSES_DIALLED]


def _dialable(address: Multiaddr) -> list[str]:
    """The address itself, or for a wildcard one for each of this machine's addresses."""
    protocols = {protocol.name for protocol in address.protocols()}
    version = "ip6" if "ip6" in protocols else "ip4"
    host, port = str(address.value_for_protocol(version)), address.value_for_protocol("tcp")
    if not ipaddress.ip_address(host).is_unspecified:
        return [f"/{version}/{host}/tcp/{port}"]
    hosts = [
        interface.address
        for interfaces in psutil.net_if_addrs().values()
        for interface in interfaces
    ]
    found = []
    for text in hosts:
        try:
            ip = ipaddress.ip_address(text)
        except ValueError:
            # A hardware address, or a link-local one with its zone.
            continue
        if f"ip{ip.version}" == version and not ip.is_link_local:
            found.append(f"/{version}/{ip}/tcp/{port}")
    return found
