"""Our muxer against py-libp2p's own, on a stock py-libp2p host at the other end."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

import pytest
import trio
import trio.testing
from libp2p import new_host
from libp2p.abc import INetStream
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.host.basic_host import BasicHost
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.exceptions import MuxedStreamReset
from libp2p.stream_muxer.yamux.yamux import Yamux
from libp2p.transport.tcp.tcp import TCP
from libp2p.transport.upgrader import TransportUpgrader
from multiaddr import Multiaddr

from kits.network.nodes import ANY_PORT, ECHO, echo
from swarm_shared.base.errors import LinkClosed
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, Node, open_node
from swarm_shared.network.libp2p import yamux
from swarm_shared.network.libp2p.yamux import FIRST_WINDOW_BYTES, MAX_WINDOW_BYTES

LIMITS = FrameLimits(max_payload_bytes=8 << 20)
PAYLOAD = bytes(range(256)) * 8192


async def read_exactly(stream: INetStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        data += await stream.read(size - len(data))
    return bytes(data)


async def stock_echo(stream: INetStream) -> None:
    while True:
        prefix = await read_exactly(stream, 12)
        rest = await read_exactly(stream, sum(struct.unpack(">IQ", prefix)))
        await stream.write(prefix + rest)


@asynccontextmanager
async def stock_host_and_node() -> AsyncIterator[tuple[BasicHost, Node]]:
    key_pair = create_new_key_pair()
    noise = NoiseTransport(key_pair, noise_privkey=create_x25519_key_pair().private_key)
    host = new_host(key_pair=key_pair, sec_opt={NOISE_PROTOCOL: noise})
    async with (
        host.run([Multiaddr(ANY_PORT)]),
        open_node(Identity.generate(), [ANY_PORT]) as node,
    ):
        host.set_stream_handler(ECHO, stock_echo)
        node.serve(ECHO, echo, LIMITS)
        yield host, node


@asynccontextmanager
async def echo_server_and_client() -> AsyncIterator[tuple[Node, Node]]:
    async with (
        open_node(Identity.generate(), [ANY_PORT]) as server,
        open_node(Identity.generate()) as client,
    ):
        server.serve(ECHO, echo, LIMITS)
        yield server, client


async def test_frames_go_to_a_stock_host_and_back() -> None:
    async with stock_host_and_node() as (host, node):
        peer = host.get_id().to_base58()
        stream = await node.open_stream(peer, ECHO, LIMITS, [str(host.get_addrs()[0])])
        for _ in range(3):
            await stream.send(b"header", PAYLOAD)
            frame = await stream.receive()
            assert (frame.header, frame.payload) == (b"header", PAYLOAD)
        [connection] = host.get_network().connections[ID.from_base58(node.peer_id)]
        assert isinstance(connection.muxed_conn, Yamux)


async def test_frames_come_from_a_stock_host_and_go_back() -> None:
    async with stock_host_and_node() as (host, node):
        address = node.addresses[0].removesuffix(f"/p2p/{node.peer_id}")
        peer_id = ID.from_base58(node.peer_id)
        await host.connect(PeerInfo(peer_id, [Multiaddr(address)]))
        stream = await host.new_stream(peer_id, [ECHO])
        whole = struct.pack(">IQ", 6, len(PAYLOAD)) + b"header" + PAYLOAD
        for _ in range(3):
            await stream.write(whole)
            assert await read_exactly(stream, len(whole)) == whole
        await stream.close()


@pytest.mark.parametrize("how", ["close", "reset", "disconnect"])
async def test_the_end_of_a_stock_hosts_stream_is_noticed(how: str) -> None:
    async with stock_host_and_node() as (host, node):

        async def end(stream: INetStream) -> None:
            if how == "disconnect":
                await host.disconnect(ID.from_base58(node.peer_id))
            else:
                await getattr(stream, how)()

        host.set_stream_handler("/test/end/1", end)
        peer = host.get_id().to_base58()
        stream = await node.open_stream(peer, "/test/end/1", LIMITS, [str(host.get_addrs()[0])])
        with pytest.raises(LinkClosed):
            await stream.receive(timeout_seconds=10)


async def test_frames_in_one_message_with_the_end_of_the_negotiation_are_not_lost() -> None:
    """go-libp2p and rust-libp2p do not wait for the answer before they send their first."""
    key_pair = create_new_key_pair()
    noise = NoiseTransport(key_pair, noise_privkey=create_x25519_key_pair().private_key)
    upgrader = TransportUpgrader({NOISE_PROTOCOL: noise}, {})
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        raw = await TCP().dial(Multiaddr(node.addresses[0]))
        session = await upgrader.upgrade_security(raw, True, ID.from_base58(node.peer_id))
        ping = struct.pack(">BBHII", 0, 2, 1, 0, 77)
        await session.write(b"\x13/multistream/1.0.0\n\x0d/yamux/1.0.0\n" + ping)
        answer = struct.pack(">BBHII", 0, 2, 2, 0, 77)
        received = b""
        while answer not in received:
            received += await session.read()
        await session.close()


async def test_a_window_grows_while_it_holds_back_a_reader_that_keeps_up() -> None:
    async with echo_server_and_client() as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO, LIMITS, server.addresses)
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                for _ in range(4):
                    await stream.send(b"", bytes(8 << 20))

            nursery.start_soon(send)
            for _ in range(4):
                await stream.receive()
        sizes = [
            stream._window_size
            for node in (server, client)
            for connection in node._swarm.get_connections()
            for stream in connection.muxed_conn._streams.values()
        ]
        assert max(sizes) > FIRST_WINDOW_BYTES
        assert max(sizes) <= MAX_WINDOW_BYTES


async def test_a_remote_that_is_silent_for_long_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when its machine loses power: no reset, no end, and pings stay unanswered."""
    monkeypatch.setattr(yamux, "KEEPALIVE_SECONDS", 0.05)
    monkeypatch.setattr(yamux, "SILENCE_SECONDS", 0.2)
    async with echo_server_and_client() as (server, client):
        stream = await client.open_stream(server.peer_id, ECHO, LIMITS, server.addresses)
        await stream.send(b"hello")
        await stream.receive()
        [connection] = server._swarm.get_connections()
        hang = trio.Event()

        async def deaf(wanted: int) -> int:
            await hang.wait()
            return 0

        connection.muxed_conn._channel._raw.stream._fill = deaf
        connection.muxed_conn.queue_control = lambda *_: None
        with pytest.raises(LinkClosed):
            await stream.receive(timeout_seconds=10)
        hang.set()


async def test_streams_that_are_lost_while_they_wait_to_send_do_not_strand_the_others() -> None:
    async with echo_server_and_client() as (server, client):
        await client.connect(server.peer_id, server.addresses)
        streams = [await client.open_stream(server.peer_id, ECHO, LIMITS) for _ in range(9)]
        [connection] = client._swarm.get_connections()
        channel = connection.muxed_conn._channel
        write, proceed = channel.write, trio.Event()

        async def held_up(messages: list[bytes]) -> None:
            await proceed.wait()
            await write(messages)

        channel.write = held_up
        async with trio.open_nursery() as nursery:

            async def send(stream: FramedStream, lives: bool) -> None:
                with nullcontext() if lives else pytest.raises(LinkClosed):
                    await stream.send(b"", PAYLOAD)

            for index, stream in enumerate(streams):
                nursery.start_soon(send, stream, index == 8)
                await trio.testing.wait_all_tasks_blocked()
            for stream in streams[:8]:
                stream._stream.lose(MuxedStreamReset("lost"))
            proceed.set()
        assert (await streams[8].receive()).payload == PAYLOAD
