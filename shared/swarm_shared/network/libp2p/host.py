"""The py-libp2p swarm: TCP, Noise and yamux, and nothing else.

Owns what is switched off or replaced in py-libp2p 0.8.1, each with its reason. By default py-libp2p
also offers a plaintext protocol (in which any remote can claim any peer ID), TLS, mplex, and dials
peers by itself. Its host is not used: it answers identify requests and pings, whose handlers let a
remote write into the peer store. Streams from remotes go to `swarm_shared.network.inbound`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import libp2p.network.connection.swarm_connection as swarm_connection_module
import trio
from libp2p.abc import IMuxedConn, ISecureConn
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.trio import TrioTCPStream
from libp2p.network.auto_connector import AutoConnector
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from swarm_shared.base.endpoint import address_group
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.network.libp2p.bandwidth import Bandwidth
from swarm_shared.network.libp2p.tcp import BufferedTcp, BufferedTcpStream
from swarm_shared.network.libp2p.yamux import YamuxConnection

logger = logging.getLogger(__name__)

KeyT = TypeVar("KeyT")

HANDSHAKE_SECONDS = 10.0
NEGOTIATE_SECONDS = 10.0
MAX_PENDING_HANDSHAKES = 128
"""Connections that are not authenticated yet; further ones are refused at once."""

MAX_PENDING_PER_ADDRESS = 32

MAX_CONNECTIONS_PER_ADDRESS = 128
"""Connections from one IPv4 address or one IPv6 /64: a household or a company, not a flood."""

MAX_UNKNOWN_PER_ADDRESS = 32
"""Connections from one address whose remotes are not (yet) members."""

UNKNOWN_PEERS_BURST_BYTES = 16 * 2**20
UNKNOWN_PEERS_BYTES_PER_SECOND = 4 * 2**20
"""Rate at which bytes of all unknown peers at one address are read, with handshakes and frames
counted as bytes: a flood costs processor time."""
HANDSHAKE_COST_BYTES = 64 * 1024

MAX_CONNECTIONS_PER_PEER = 4
"""Connections of one peer: two ends that dial each other at once make two, and relayed ones may
exist besides."""


def build_swarm(
    identity: Identity,
    max_connections: int,
    max_connections_per_address: int,
    bandwidth: Bandwidth,
) -> NodeSwarm:
    """Return a swarm with the identity's key that has not been started."""
    _quieten_libp2p()
    private_key = Ed25519PrivateKey.from_bytes(identity.private_seed)
    key_pair = KeyPair(private_key, private_key.get_public_key())
    peer_id = ID.from_pubkey(key_pair.public_key)
    peerstore = PeerStore()
    peerstore.add_key_pair(peer_id, key_pair)
    noise = NoiseTransport(key_pair, noise_privkey=create_x25519_key_pair().private_key)
    upgrader = NoiseYamuxUpgrader(
        secure_transports_by_protocol={NOISE_PROTOCOL: noise},
        muxer_transports_by_protocol={TProtocol(YAMUX_PROTOCOL): Yamux},
        negotiate_timeout=int(HANDSHAKE_SECONDS),
    )
    # No resource manager: its default limits connections to 60 a minute per peer and 1000
    # streams in all, waits instead of refusing, and keeps counts of streams that ended.
    swarm = NodeSwarm(
        peer_id,
        peerstore,
        upgrader,
        transports=[BufferedTcp(bandwidth)],
        retry_config=RetryConfig(max_retries=0),
        connection_config=_connection_config(max_connections),
    )
    swarm.auto_connector = NoAutoConnector(swarm)
    swarm.max_connections_per_address = max_connections_per_address
    swarm.bandwidth = bandwidth
    return swarm


def _connection_config(max_connections: int) -> ConnectionConfig:
    return ConnectionConfig(
        max_connections=max_connections,
        min_connections=0,
        low_watermark=0,
        high_watermark=max_connections,
        # Never reached (see `NodeSwarm.add_conn`): trimming would close connections in use.
        max_connections_per_peer=max_connections,
        dial_timeout=HANDSHAKE_SECONDS,
        inbound_upgrade_timeout=HANDSHAKE_SECONDS,
        outbound_upgrade_timeout=HANDSHAKE_SECONDS,
        outbound_stream_protocol_negotiation_timeout=NEGOTIATE_SECONDS,
        inbound_stream_protocol_negotiation_timeout=NEGOTIATE_SECONDS,
    )


class NoiseYamuxUpgrader(TransportUpgrader):  # type: ignore[misc]
    """Negotiates as py-libp2p does, then runs our own muxer (`swarm_shared.network.libp2p.yamux`).

    py-libp2p's registry of muxers cannot select it: for yamux it always makes its own class.
    """

    async def upgrade_connection(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        negotiated = await super().upgrade_connection(conn, peer_id)
        muxer = YamuxConnection(conn, peer_id, negotiated.is_initiator)
        for name in ("negotiated_muxer_protocol", "negotiated_security_protocol"):
            setattr(muxer, name, getattr(negotiated, name, None))
        return muxer


class NoAutoConnector(AutoConnector):  # type: ignore[misc]
    """Never dials on its own; the original does so whatever the watermarks are."""

    async def maybe_connect(self) -> None:
        return

    def record_disconnect(self, peer_id: ID) -> None:
        """Remember nothing: only `maybe_connect` forgets it, and a remote can make any number of
        IDs."""


class NodeSwarm(Swarm):  # type: ignore[misc]
    """py-libp2p's swarm with different acceptance of connections.

    The original counts every connection ever accepted against its limit, ended ones too, so that a
    node that is up for long accepts none any more.
    """

    max_connections_per_address = MAX_CONNECTIONS_PER_ADDRESS
    on_connected: Callable[[SwarmConn], None] | None = None
    on_lost: Callable[[SwarmConn], None] | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.bandwidth = Bandwidth()
        self._pending: Counter[str] = Counter()
        self._from_address: Counter[str] = Counter()
        self._strangers: dict[str, set[YamuxConnection]] = {}
        self._strangers_rate = RateLimit(UNKNOWN_PEERS_BURST_BYTES, UNKNOWN_PEERS_BYTES_PER_SECOND)
        self.knows: Callable[[PeerId], bool] = lambda peer: True
        self.expected_as_initiator: dict[tuple[str, int], ID] = {}
        """Remote endpoints whose accepted connection is one end of a hole punch in which this side
        has the initiator's role although the remote's packet came first."""

    async def add_conn(self, muxed_conn: IMuxedConn, direction: str = "unknown") -> SwarmConn:
        """Refuse the newest connection beyond the limit; the original closes one that may be in
        use."""
        existing = self.connections.get(muxed_conn.peer_id, ())
        if len(existing) >= MAX_CONNECTIONS_PER_PEER:
            await muxed_conn.close()
            raise SwarmException(f"{muxed_conn.peer_id} has {len(existing)} connections already")
        connection = await super().add_conn(muxed_conn, direction)
        if self.on_connected is not None and not connection.is_closed:
            self.on_connected(connection)
        return connection

    def remove_conn(self, swarm_conn: SwarmConn) -> None:
        """Remove a connection that has ended, before its streams' handlers are informed."""
        was_listed = swarm_conn in self.connections.get(swarm_conn.muxed_conn.peer_id, ())
        super().remove_conn(swarm_conn)
        if was_listed and self.on_lost is not None:
            self.on_lost(swarm_conn)

    async def _handle_inbound_connection(
        self, read_write_closer: ReadWriteCloser, maddr: Multiaddr
    ) -> None:
        if isinstance(read_write_closer, TrioTCPStream):
            read_write_closer = BufferedTcpStream(read_write_closer.stream, self.bandwidth)
        place = read_write_closer.get_remote_address() or ("", 0)
        address = address_group(place[0])
        if (
            self._from_address[address] >= self.max_connections_per_address
            or self._pending[address] >= MAX_PENDING_PER_ADDRESS
            or self._pending.total() >= MAX_PENDING_HANDSHAKES
            or self._strangers_rate.take(address, HANDSHAKE_COST_BYTES)
        ):
            await read_write_closer.close()
            return
        self._from_address[address] += 1
        try:
            muxer = await self._upgrade_inbound(read_write_closer, maddr, place[:2])
            if muxer is None:
                return
            if not self._takes(muxer, address):
                await muxer.close()
            # Returning would close the socket.
            await muxer.event_closed.wait()
            self._forget_stranger(muxer, address)
        finally:
            take_one(self._from_address, address)

    def _takes(self, muxer: YamuxConnection, address: str) -> bool:
        """Whether there is room for one more connection of an unknown peer."""
        if self.knows(muxer.remote):
            return True
        strangers = self._strangers.setdefault(address, set())
        if len(strangers) >= MAX_UNKNOWN_PER_ADDRESS:
            strangers -= {stranger for stranger in strangers if self.knows(stranger.remote)}
        if len(strangers) >= MAX_UNKNOWN_PER_ADDRESS:
            return False
        strangers.add(muxer)
        muxer.throttle = partial(self._throttle, muxer, address)
        return True

    def _throttle(self, muxer: YamuxConnection, address: str, cost: int) -> float:
        seconds = self._strangers_rate.take(address, min(cost, UNKNOWN_PEERS_BURST_BYTES))
        if seconds and self.knows(muxer.remote):
            muxer.throttle = None
            return 0.0
        return seconds

    def _forget_stranger(self, muxer: YamuxConnection, address: str) -> None:
        strangers = self._strangers.get(address)
        if strangers is not None:
            strangers.discard(muxer)
            if not strangers:
                del self._strangers[address]

    async def _upgrade_inbound(
        self, stream: ReadWriteCloser, maddr: Multiaddr, place: tuple[str, int]
    ) -> YamuxConnection | None:
        """Return the running connection; None when it was refused."""
        address = address_group(place[0])
        expected = self.expected_as_initiator.get(place)
        self._pending[address] += 1
        try:
            if expected is not None:
                raw = RawConnection(stream, True)
                # The other way round py-libp2p sets no limit to the whole handshake.
                with trio.fail_after(HANDSHAKE_SECONDS):
                    muxer = (await self.upgrade_outbound_raw_conn(raw, expected)).muxed_conn
            else:
                muxer = await self.upgrade_inbound_raw_conn(RawConnection(stream, False), maddr)
        except Exception as error:  # noqa: BLE001 (an unknown peer's bytes make it raise anything)
            logger.debug("a connection to %s was refused: %r", maddr, error)
            await stream.close()
            return None
        finally:
            take_one(self._pending, address)
        assert isinstance(muxer, YamuxConnection)
        return muxer


def take_one(counter: Counter[KeyT], key: KeyT) -> None:
    """Count one less; a key of which there are none is dropped."""
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def _quieten_libp2p() -> None:
    """Keep libp2p's logging off the terminal unless its own LIBP2P_DEBUG asks for it.

    Its connection module logs through the root logger, which would also install a handler on it;
    that module gets a logger of its own.
    """
    swarm_connection_module.logging = logging.getLogger("libp2p.network.connection")
    if os.environ.get("LIBP2P_DEBUG"):
        return
    libp2p_logger = logging.getLogger("libp2p")
    libp2p_logger.addHandler(logging.NullHandler())
    libp2p_logger.setLevel(logging.CRITICAL)
    libp2p_logger.propagate = False
    logging.getLogger("multiaddr").setLevel(logging.WARNING)
