"""Attackers against a node: what they send, who they claim to be, how much they send."""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from itertools import cycle

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import Ed25519PrivateKey, create_new_key_pair
from libp2p.crypto.keys import KeyPair, PublicKey
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.basic_host import BasicHost
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.insecure.transport import PLAINTEXT_PROTOCOL_ID, InsecureTransport
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamReset
from libp2p.stream_muxer.mplex.mplex import MPLEX_PROTOCOL_ID, Mplex
from multiaddr import Multiaddr

from kits.network.nodes import read_to_the_end
from kits.waiting import until
from swarm_shared.base.errors import FrameError, NetworkError
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, Node, open_node
from swarm_shared.network.libp2p import yamux
from swarm_shared.network.libp2p.host import MAX_CONNECTIONS_PER_PEER
from swarm_shared.network.libp2p.yamux import (
    FIRST_WINDOW_BYTES,
    INITIAL_WINDOW_BYTES,
    YamuxConnection,
    YamuxStream,
)
from swarm_shared.network.libp2p.yamux_frames import data_header

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
LIMITS = FrameLimits(max_header_bytes=1000, max_payload_bytes=100_000)
ECHO = "/test/echo/1"


class Victim:
    """A node that serves ECHO, and who has spoken to it."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.remotes: list[str] = []
        self.frame_errors: list[str] = []
        self.refused = trio.Event()

    async def handle(self, stream: FramedStream) -> None:
        self.remotes.append(stream.remote)
        try:
            while True:
                frame = await stream.receive()
                await stream.send(frame.header, frame.payload)
        except FrameError as error:
            self.frame_errors.append(str(error))
            self.refused.set()
            raise

    async def works(self) -> bool:
        """Whether an honest newcomer is served."""
        async with open_node(Identity.generate()) as honest:
            stream = await honest.open_stream(self.node.peer_id, ECHO, LIMITS, self.node.addresses)
            await stream.send(b"hello")
            return (await stream.receive(timeout_seconds=10)).header == b"hello"


@asynccontextmanager
async def a_victim() -> AsyncIterator[Victim]:
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        victim = Victim(node)
        node.serve(ECHO, victim.handle, LIMITS)
        yield victim


@asynccontextmanager
async def running(host: BasicHost) -> AsyncIterator[BasicHost]:
    async with host.run([Multiaddr(ANY_PORT)]):
        yield host


def peer_info(node: Node) -> PeerInfo:
    address = node.addresses[0].removesuffix(f"/p2p/{node.peer_id}")
    return PeerInfo(ID.from_base58(node.peer_id), [Multiaddr(address)])


def noise_host(key_pair: KeyPair, noise_key_pair: KeyPair | None = None, **options) -> BasicHost:
    noise = NoiseTransport(
        noise_key_pair or key_pair, noise_privkey=create_x25519_key_pair().private_key
    )
    return new_host(key_pair=key_pair, sec_opt={NOISE_PROTOCOL: noise}, **options)


def plaintext_host() -> BasicHost:
    key_pair = create_new_key_pair()
    insecure = InsecureTransport(key_pair)
    return new_host(key_pair=key_pair, sec_opt={TProtocol(PLAINTEXT_PROTOCOL_ID): insecure})


def listen_address(host: BasicHost) -> str:
    return str(host.get_addrs()[0])


async def raw_stream(attacker: Node, victim: Node) -> YamuxStream:
    """A negotiated stream to write any bytes to."""
    stream = await attacker.open_stream(victim.peer_id, ECHO, LIMITS, victim.addresses)
    return stream._stream


async def unread_stream(attacker: Node, victim: Node) -> FramedStream:
    """A stream of which the victim reads nothing."""

    async def never_read(stream: FramedStream) -> None:
        await trio.sleep_forever()

    victim.serve("/test/silent/1", never_read, LIMITS)
    return await attacker.open_stream(victim.peer_id, "/test/silent/1", LIMITS, victim.addresses)


def connection_of(node: Node) -> YamuxConnection:
    [connection] = node._swarm.get_connections()
    return connection.muxed_conn


# Who somebody is


async def test_a_plaintext_peer_cannot_connect_to_a_node() -> None:
    async with a_victim() as victim, running(plaintext_host()) as attacker:
        with pytest.raises(SwarmException, match="unable to connect"):
            await attacker.connect(peer_info(victim.node))
        assert victim.node.connected_peers == ()
        assert await victim.works()


async def test_a_node_does_not_connect_to_a_plaintext_peer() -> None:
    async with running(plaintext_host()) as attacker, open_node(Identity.generate()) as node:
        peer = attacker.get_id().to_base58()
        with pytest.raises(NetworkError, match=r"not supported.*/noise"):
            await node.connect(peer, [listen_address(attacker)])
        assert node.connected_peers == ()


async def test_a_peer_with_another_key_than_the_one_dialled_is_refused() -> None:
    expected = Identity.generate().peer_id
    async with a_victim() as victim, open_node(Identity.generate()) as node:
        address = victim.node.addresses[0].removesuffix(f"/p2p/{victim.node.peer_id}")
        for addresses in ([address], [f"{address}/p2p/{expected}"], list(victim.node.addresses)):
            with pytest.raises(NetworkError):
                await node.connect(expected, addresses)
        assert node.connected_peers == ()
        assert victim.remotes == []


class ForgedPrivateKey(Ed25519PrivateKey):
    """Signs with its own key and presents somebody else's public key."""

    presented: PublicKey

    def get_public_key(self) -> PublicKey:
        return self.presented


@pytest.mark.parametrize("forged", [False, True])
async def test_nobody_can_speak_for_another_peer_id(forged: bool) -> None:
    """A handshake with the public key of another peer needs that peer's signature."""
    own, other = create_new_key_pair(), create_new_key_pair()
    key = ForgedPrivateKey.from_bytes(own.private_key.to_bytes())
    key.presented = other.public_key if forged else own.public_key
    attacker_host = noise_host(own, KeyPair(key, key.presented))
    async with a_victim() as victim, running(attacker_host) as attacker:
        if not forged:
            await attacker.connect(peer_info(victim.node))
            stream = await attacker.new_stream(ID.from_base58(victim.node.peer_id), [ECHO])
            await stream.write(struct.pack(">IQ", 2, 0) + b"hi")
            assert await stream.read(14) == struct.pack(">IQ", 2, 0) + b"hi"
            assert victim.remotes == [ID.from_pubkey(own.public_key).to_base58()]
            return

        async def attack() -> None:
            # Noise's third message is the initiator's last word: it learns of the refusal later.
            await attacker.connect(peer_info(victim.node))
            await attacker.new_stream(ID.from_base58(victim.node.peer_id), [ECHO])

        with pytest.raises(BaseLibp2pError):
            await attack()
        assert victim.node.connected_peers == ()
        assert victim.remotes == []


async def test_a_peer_that_offers_mplex_only_is_refused() -> None:
    mplex = {TProtocol(MPLEX_PROTOCOL_ID): Mplex}
    attacker_host = noise_host(create_new_key_pair(), muxer_opt=mplex)
    async with a_victim() as victim, running(attacker_host) as attacker:
        with pytest.raises(SwarmException, match="unable to connect"):
            await attacker.connect(peer_info(victim.node))
        assert victim.node.connected_peers == ()


# What somebody sends


@pytest.mark.parametrize(
    "garbage",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\xff" * 100_000,
        # A multistream message of 2^63 - 1 bytes, before anybody has proved anything.
        b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"\x13/multistream/1.0.0\n\x07/noise\n" + b"\xff\xff" + b"x" * 65_535,
        b"\x13/multistream/1.0.0\n\x07/noise\n\x00\x00\x00\x00",
        b"\x03\xff\xfe\n",
    ],
)
async def test_garbage_on_the_port_does_no_harm(garbage: bytes) -> None:
    async with a_victim() as victim:
        port = int(victim.node.addresses[0].split("/")[4])
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream:
            with suppress(trio.BrokenResourceError):
                await stream.send_all(garbage)
                await stream.send_eof()
                # Until the victim hangs up.
                while await stream.receive_some(65_536):
                    pass
        assert await victim.works()


@pytest.mark.parametrize("garbage", [b"\x03\xff\xfe\n", b"\xff" * 50, b"\x00", b"\x05abcd\n"])
async def test_garbage_in_the_negotiation_of_a_stream_does_no_harm(garbage: bytes) -> None:
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        await attacker.connect(victim.node.peer_id, victim.node.addresses)
        stream = await connection_of(attacker).open_stream()
        await stream.write(b"\x13/multistream/1.0.0\n" + garbage)
        await stream.close()
        with pytest.raises(MuxedStreamReset):
            await read_to_the_end(stream)
        assert await victim.works()
        assert victim.remotes == victim.remotes[-1:]


async def test_an_oversized_frame_is_refused_at_its_first_bytes() -> None:
    for header_bytes, payload_bytes in ((2**32 - 1, 0), (1001, 0), (5, 2**63), (5, 100_001)):
        async with a_victim() as victim, open_node(Identity.generate()) as attacker:
            stream = await raw_stream(attacker, victim.node)
            await stream.write(struct.pack(">IQ", header_bytes, payload_bytes))
            await victim.refused.wait()
            assert "allowed" in victim.frame_errors[0]
            assert victim.node.handler_errors == {}
            with pytest.raises(MuxedStreamReset):
                await stream.read()


async def test_a_frame_that_is_cut_short_is_refused() -> None:
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        stream = await raw_stream(attacker, victim.node)
        await stream.write(struct.pack(">IQ", 5, 100) + b"abcde" + bytes(99))
        await stream.close()
        await victim.refused.wait()
        assert "1 bytes before its end" in victim.frame_errors[0]


async def test_who_sends_more_than_was_granted_is_disconnected() -> None:
    """py-libp2p's own muxer would keep all of it in memory."""
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        framed = await unread_stream(attacker, victim.node)
        stream = framed._stream
        [theirs] = connection_of(victim.node)._streams.values()
        stream._send_window = 2**40
        lost = trio.Event()
        victim.node.on_disconnect.append(lambda peer: lost.set())
        with pytest.raises(MuxedStreamReset):
            await stream.write(bytes(1 << 28))
        await lost.wait()
        assert sum(len(chunk) for chunk in theirs._chunks) <= FIRST_WINDOW_BYTES
        assert await victim.works()


def held_bytes(stream: YamuxStream) -> int:
    """The memory of what has arrived on a stream and was not read, whatever objects hold it."""
    return sys.getsizeof(stream._chunks) + sum(
        sys.getsizeof(chunk) + (sys.getsizeof(chunk.obj) if isinstance(chunk, memoryview) else 0)
        for chunk in stream._chunks
    )


@pytest.mark.parametrize(
    "sizes", [(1,), (13,), (200,), (4095,), (4096, 1), (1, 30_000), (65_000, 1, 1)], ids=str
)
@pytest.mark.parametrize("together", [False, True], ids=["a-message-each", "many-in-a-message"])
async def test_a_window_is_charged_by_the_memory_it_takes_however_the_data_is_cut(
    sizes: tuple[int, ...], together: bool
) -> None:
    """Frames of one byte on a stream that is not read cost 379 bytes of memory each."""
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        framed = await unread_stream(attacker, victim.node)
        stream, connection = framed._stream, framed._stream.connection
        [theirs] = connection_of(victim.node)._streams.values()
        before = theirs._receive_window
        frames = [bytes(size) for size, _ in zip(cycle(sizes), range(2_000), strict=False)]
        while sum(map(len, frames)) > INITIAL_WINDOW_BYTES:
            frames.pop()
        for frame in frames:
            connection.queue.put(data_header(stream.stream_id, len(frame)) + frame)
            while connection.queue.queued_bytes and not together:
                await trio.sleep(0)
        sent = sum(map(len, frames))
        await until(lambda: before - theirs._receive_window >= sent, 20)
        assert held_bytes(theirs) <= 2.5 * sent + 1024, "bytes of the window, and bytes held"


async def test_who_asks_for_answers_and_does_not_read_them_is_disconnected() -> None:
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        await attacker.connect(victim.node.peer_id, victim.node.addresses)
        connection = connection_of(attacker)
        theirs = connection_of(victim.node)
        # The victim's socket is full as soon as its answers are not read.
        raw = connection._channel._raw.stream.stream.socket
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)

        async def deaf(*_: object) -> int:
            return await trio.sleep_forever()

        connection._channel._raw.stream._fill = deaf
        ping = struct.pack(">BBHII", 0, 2, 1, 0, 7)
        most = 0
        with trio.move_on_after(30):
            while not theirs.is_closed:
                if connection.queue.queued_bytes < 1 << 20:
                    connection.queue.put(ping * 5000)
                most = max(most, theirs.queue.queued_bytes)
                await trio.sleep(0)
        assert theirs.is_closed
        assert most < 1 << 20
        assert await victim.works()


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack(">BBHII", 1, 0, 0, 1, 0),  # a version that does not exist
        struct.pack(">BBHII", 0, 9, 0, 1, 0),  # a type that does not exist
        struct.pack(">BBHII", 0, 1, 1, 2, 0),  # opens a stream under the victim's numbers
        struct.pack(">BBHII", 0, 1, 1, 0, 0),  # opens the connection's own stream
    ],
)
async def test_who_breaks_the_muxers_rules_is_disconnected(frame: bytes) -> None:
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        await attacker.connect(victim.node.peer_id, victim.node.addresses)
        lost = trio.Event()
        victim.node.on_disconnect.append(lambda peer: lost.set())
        connection_of(attacker).queue.put(frame)
        await lost.wait()
        assert await victim.works()


async def test_an_announced_frame_takes_no_memory_and_holds_up_nobody_else() -> None:
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        await attacker.connect(victim.node.peer_id, victim.node.addresses)
        connection_of(attacker).queue.put(struct.pack(">BBHII", 0, 0, 1, 1, 2**32 - 1) + b"x")
        assert await victim.works()


async def test_a_peer_may_hold_so_many_connections_and_no_more() -> None:
    identity = Identity.generate()
    async with a_victim() as victim, AsyncExitStack() as nodes:
        for count in range(1, MAX_CONNECTIONS_PER_PEER + 1):
            node = await nodes.enter_async_context(open_node(identity))
            await node.open_stream(victim.node.peer_id, ECHO, LIMITS, victim.node.addresses)
            assert len(victim.node._swarm.get_connections()) == count
        node = await nodes.enter_async_context(open_node(identity))
        with pytest.raises(NetworkError):
            await node.open_stream(victim.node.peer_id, ECHO, LIMITS, victim.node.addresses)
        assert len(victim.node._swarm.get_connections()) == MAX_CONNECTIONS_PER_PEER
        assert await victim.works()


async def test_more_streams_than_the_muxer_allows_are_reset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(yamux, "MAX_REMOTE_STREAMS", 4)
    async with a_victim() as victim, open_node(Identity.generate()) as attacker:
        await attacker.connect(victim.node.peer_id, victim.node.addresses)
        streams = [await connection_of(attacker).open_stream() for _ in range(5)]
        with pytest.raises(MuxedStreamReset):
            await read_to_the_end(streams[-1])
        assert connection_of(victim.node)._remote_streams == 4
        assert await victim.works()
