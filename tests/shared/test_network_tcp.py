from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st
from libp2p.io.exceptions import ConnectionClosedError

from swarm_shared.network.libp2p.bandwidth import Bandwidth
from swarm_shared.network.libp2p.tcp import BufferedTcpStream


async def connected_pair() -> tuple[trio.SocketStream, BufferedTcpStream]:
    left, right = trio.socket.socketpair()
    return trio.SocketStream(left), BufferedTcpStream(trio.SocketStream(right))


@given(st.lists(st.integers(0, 70_000), max_size=8), st.lists(st.integers(1, 65_535), max_size=12))
def test_bytes_come_out_in_order_whatever_is_asked_for(sent: list[int], asked: list[int]) -> None:
    async def main() -> None:
        sender, receiver = await connected_pair()
        content = b"".join(
            index.to_bytes(4, "big") * (size // 4) for index, size in enumerate(sent)
        )
        received = bytearray()
        async with sender, trio.open_nursery() as nursery:

            async def send() -> None:
                for start in range(0, len(content), 50_000):
                    await sender.send_all(content[start : start + 50_000])
                await sender.send_eof()

            nursery.start_soon(send)
            for size in asked:
                data = await receiver.read(size)
                assert len(data) == min(size, len(content) - len(received))
                received += data
            while data := await receiver.read():
                received += data
        assert received == content
        assert await receiver.read(10) == b""
        await receiver.close()

    trio.run(main)


@given(st.lists(st.integers(0, 70_000), min_size=1, max_size=8), st.booleans())
def test_pieces_arrive_as_if_they_had_been_joined(sizes: list[int], held_back: bool) -> None:
    """Through a socket that takes a little at a time, with and without a limit of bandwidth."""

    async def main() -> None:
        left, right = trio.socket.socketpair()
        left.setsockopt(trio.socket.SOL_SOCKET, trio.socket.SO_SNDBUF, 4096)
        bandwidth = Bandwidth()
        bandwidth.up.limit(10**9 if held_back else None)
        sender = BufferedTcpStream(trio.SocketStream(left), bandwidth)
        receiver = BufferedTcpStream(trio.SocketStream(right))
        pieces = [bytes([index]) * size for index, size in enumerate(sizes)]
        async with trio.open_nursery() as nursery:

            async def send() -> None:
                await sender.write_pieces(pieces)
                await sender.close()

            nursery.start_soon(send)
            received = bytearray()
            while data := await receiver.read():
                received += data
        assert received == b"".join(pieces)
        assert bandwidth.up.bytes == len(received)
        await receiver.close()

    trio.run(main)


async def test_pieces_for_a_remote_that_is_gone_end_the_connection() -> None:
    left, right = trio.socket.socketpair()
    sender = BufferedTcpStream(trio.SocketStream(left))
    right.close()
    with pytest.raises(ConnectionClosedError, match="lost"):
        await sender.write_pieces((b"length", bytes(1000)))
    await sender.close()


async def test_a_view_holds_until_the_next_read() -> None:
    sender, receiver = await connected_pair()
    async with sender:
        await sender.send_all(b"first." + b"second")
        assert bytes(await receiver.read_view(6)) == b"first."
        assert bytes(await receiver.read_view(6)) == b"second"
    assert bytes(await receiver.read_view(6)) == b""
    await receiver.close()


async def test_a_length_that_no_message_has_is_refused_before_memory_is_taken() -> None:
    sender, receiver = await connected_pair()
    async with sender:
        for size in (65_536, 2**40):
            with pytest.raises(ConnectionClosedError, match=str(size)):
                await receiver.read(size)
    await receiver.close()


async def test_a_quiet_connection_keeps_a_small_buffer_and_a_busy_one_a_large_one() -> None:
    sender, receiver = await connected_pair()
    async with sender, trio.open_nursery() as nursery:
        for _ in range(100):
            await sender.send_all(bytes(100))
            await receiver.read(100)
        assert len(receiver._view) == 4096
        nursery.start_soon(sender.send_all, bytes(4 << 20))
        for _ in range(64):
            await receiver.read(65_535)
        assert len(receiver._view) == 256 * 1024
        nursery.cancel_scope.cancel()
    await receiver.close()
