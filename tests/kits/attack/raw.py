"""Connections to a victim, built layer by layer; an attacker stops at any of them.

socket          nothing is sent
secured         the Noise handshake is done: the victim knows a peer ID
muxed           yamux is agreed on: frames of any kind can be sent
"""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import astuple, dataclass, field, replace

import trio
from libp2p.crypto.ed25519 import Ed25519PrivateKey
from libp2p.crypto.keys import KeyPair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_client import MultiselectClient
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_PROTOCOL
from libp2p.transport.upgrader import TransportUpgrader

from swarm_shared.identity.keys import Identity
from swarm_shared.network.libp2p.noise_channel import MAX_PLAINTEXT_BYTES, NoiseChannel
from swarm_shared.network.libp2p.tcp import BufferedTcpStream

DATA, WINDOW_UPDATE, PING, GO_AWAY = range(4)
SYN, ACK, FIN, RST = 1, 2, 4, 8

MULTISTREAM = "/multistream/1.0.0"


@dataclass(slots=True)
class Tally:
    """What the attackers of this process have got through to victims."""

    connections: int = 0
    handshakes: int = 0
    """Noise and yamux agreed on, which takes answers of the victim."""
    streams: int = 0
    bytes: int = 0
    """Written to connections with a handshake, multiplexer headers included."""

    def since(self, before: Tally) -> Tally:
        """What has got through after `before`, a copy of the tally of that time."""
        return Tally(
            self.connections - before.connections, self.handshakes - before.handshakes,
            self.streams - before.streams, self.bytes - before.bytes,
        )  # fmt: skip

    def reaches(self, least: Tally) -> bool:
        """Whether every part of it is at least that of `least`."""
        return all(
            mine >= theirs for mine, theirs in zip(astuple(self), astuple(least), strict=True)
        )


tally = Tally()


PATIENCE_SECONDS = 60.0
"""Limit for an attack to get through on a machine that is shared with its victim."""


async def got_through(least: Tally, seconds: float) -> Tally:
    """Wait for `seconds`, and until `least` has got through since the call; return what has.

    A fixed time alone would fail on a slow machine, where the attackers are slow too. The wait ends
    after PATIENCE_SECONDS more at the latest; the caller asserts what it needs.
    """
    before = replace(tally)
    await trio.sleep(seconds)
    with trio.move_on_after(PATIENCE_SECONDS):
        while not tally.since(before).reaches(least):
            await trio.sleep(0.1)
    return tally.since(before)


@dataclass(frozen=True)
class Target:
    """The peer and the address of a victim."""

    peer: str
    port: int
    host: str = "127.0.0.1"

    @property
    def address(self) -> str:
        return f"/ip4/{self.host}/tcp/{self.port}"

    @classmethod
    def of(cls, address: str) -> Target:
        """`/ip4/HOST/tcp/PORT/p2p/PEER`"""
        _, _, host, _, port, _, peer = address.split("/")
        return cls(peer, int(port), host)


def key_pair_of(identity: Identity) -> KeyPair:
    private = Ed25519PrivateKey.from_bytes(identity.private_seed)
    return KeyPair(private, private.get_public_key())


def yamux_frame(kind: int, flags: int, stream: int, value: int, data: bytes = b"") -> bytes:
    return struct.pack(">BBHII", 0, kind, flags, stream, value) + data


def multistream(*lines: str) -> bytes:
    """Encode messages of multistream-select, each prefixed with its length."""
    return b"".join(bytes([len(line) + 1]) + line.encode() + b"\n" for line in lines)


@dataclass
class Muxed:
    """A connection that frames can be written to, well-formed or not."""

    identity: Identity
    channel: NoiseChannel
    socket: trio.SocketStream
    next_stream: int = 1
    closed: trio.Event = field(default_factory=trio.Event)

    async def write(self, content: bytes) -> None:
        """Write any number of bytes, in as many messages as needed."""
        for start in range(0, len(content), MAX_PLAINTEXT_BYTES):
            part = content[start : start + MAX_PLAINTEXT_BYTES]
            await self.channel.write([part])
            tally.bytes += len(part)

    async def open(self, *protocols: str, more: bytes = b"") -> int:
        """Open a stream and ask for a protocol, without waiting for an answer."""
        number, self.next_stream = self.next_stream, self.next_stream + 2
        head = multistream(MULTISTREAM, *protocols) if protocols else b""
        await self.write(
            yamux_frame(WINDOW_UPDATE, SYN, number, 0)
            + (yamux_frame(DATA, 0, number, len(head) + len(more), head + more))
        )
        tally.streams += 1
        return number

    async def send(self, stream: int, data: bytes) -> None:
        await self.write(yamux_frame(DATA, 0, stream, len(data), data))

    async def drain(self) -> None:
        """Read and discard until the victim closes the connection."""
        try:
            while True:
                await self.channel.read()
        except Exception:  # noqa: BLE001 (every way of ending counts)
            self.closed.set()


ATTACKERS_HOST = "127.0.0.66"
"""Attackers come from one address, honest peers from another: limits are per address."""


async def connect(target: Target) -> trio.SocketStream:
    stream = await trio.open_tcp_stream(target.host, target.port, local_address=ATTACKERS_HOST)
    tally.connections += 1
    return stream


@asynccontextmanager
async def muxed(target: Target, identity: Identity | None = None) -> AsyncIterator[Muxed]:
    socket = await connect(target)
    async with socket:
        yield await upgrade(socket, target, identity or Identity.generate())


async def upgrade(socket: trio.SocketStream, target: Target, identity: Identity) -> Muxed:
    noise = NoiseTransport(
        key_pair_of(identity), noise_privkey=create_x25519_key_pair().private_key
    )
    raw = RawConnection(BufferedTcpStream(socket), True)
    upgrader = TransportUpgrader({NOISE_PROTOCOL: noise}, {})
    secured = await upgrader.upgrade_security(raw, True, ID.from_base58(target.peer))
    await MultiselectClient().select_one_of((YAMUX_PROTOCOL,), MultiselectCommunicator(secured))
    tally.handshakes += 1
    return Muxed(identity, NoiseChannel(secured), socket)
