"""Streams of the daemon's host to and from the averaging worker.

A plain unix socket plays the worker's end.
"""

from __future__ import annotations

import contextlib
import socket
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from kits.averaging.memory_carrier import MemoryChannel
from kits.peer_names import named
from kits.waiting import until
from swarm_client.averaging.all_reduce.carrier import IncomingStream
from swarm_client.averaging.all_reduce.frames import HELLO_BYTES, StreamHello
from swarm_client.averaging.all_reduce.routes import Route
from swarm_client.averaging.handle import bridge as bridge_module
from swarm_client.averaging.handle.bridge import PIECE_BYTES, Bridge
from swarm_client.averaging.protocol.bridge import (
    DAEMON_SOCKET,
    WORKER_SOCKET,
    OpenStream,
    StreamArrived,
    StreamNotOpened,
    StreamOpened,
    arrivals,
    encode_head,
    open_answers,
)
from swarm_shared.base.errors import LinkClosed, NetworkError
from swarm_shared.base.json_messages import LENGTH_BYTES, decode_length
from swarm_shared.base.types import PeerId

REMOTE = named("remote")
BYTES = bytes(range(256)) * 20_000


class Daemon:
    """A bridge whose host reaches one remote: the other end of `remote_end`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bridge = Bridge()
        self.bridge.open_channel = self.open
        self.asked: list[tuple[PeerId, bool]] = []
        self.refusal: NetworkError | None = None
        self.delay_seconds = 0.0
        self.given_up = trio.Event()
        self.remote_end: MemoryChannel | None = None
        self.host_end: MemoryChannel | None = None

    async def open(self, peer: PeerId, relayed: bool) -> MemoryChannel:
        self.asked.append((peer, relayed))
        try:
            await trio.sleep(self.delay_seconds)
        except trio.Cancelled:
            self.given_up.set()
            raise
        if self.refusal is not None:
            raise self.refusal
        self.host_end, self.remote_end = MemoryChannel.pair()
        return self.host_end

    async def connect(self, relayed: bool = True) -> trio.SocketStream:
        """As the worker that wants a stream; its answer is still to be read."""
        stream = await trio.open_unix_socket(str(self.folder / DAEMON_SOCKET))
        await stream.send_all(encode_head(OpenStream(peer=REMOTE, relayed=relayed)))
        return stream


@asynccontextmanager
async def daemon(folder: Path) -> AsyncIterator[Daemon]:
    made = Daemon(folder)
    async with made.bridge.running(), made.bridge.listening(folder):
        yield made


async def read_exactly(stream: trio.SocketStream, size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = await stream.receive_some(size - len(data))
        assert piece, f"it ended after {len(data)} of {size} bytes"
        data += piece
    return data


async def read_head(stream: trio.SocketStream, adapter: Any) -> Any:
    length = decode_length(await read_exactly(stream, LENGTH_BYTES))
    return adapter.validate_json(await read_exactly(stream, length))


async def read_all(channel: MemoryChannel, size: int) -> bytes:
    data = bytearray()
    while len(data) < size and (piece := await channel.receive(2**20)):
        data += piece
    return bytes(data)


async def test_bytes_pass_whole_and_in_order_both_ways_at_once(tmp_path: Path) -> None:
    async with daemon(tmp_path) as d:
        async with await d.connect(relayed=False) as stream:
            assert await read_head(stream, open_answers) == StreamOpened(route=Route.HOST)
            assert d.asked == [(REMOTE, False)]
            assert d.remote_end is not None
            got: dict[str, bytes] = {}

            async def remote() -> None:
                assert d.remote_end is not None
                got["remote"] = await read_all(d.remote_end, len(BYTES))

            async def worker() -> None:
                got["worker"] = await read_exactly(stream, len(BYTES))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(remote)
                nursery.start_soon(worker)
                nursery.start_soon(stream.send_all, BYTES)
                await d.remote_end.send(BYTES)
            assert got == {"remote": BYTES, "worker": BYTES}
        # The worker has closed: so does the host's stream.
        assert await d.remote_end.receive(1) == b""


async def test_what_came_before_the_remotes_end_is_read_and_writing_meanwhile_is_no_error(
    tmp_path: Path,
) -> None:
    async with daemon(tmp_path) as d, await d.connect() as stream:
        await read_head(stream, open_answers)
        assert d.remote_end is not None
        await d.remote_end.send(b"farewell")
        await d.remote_end.aclose()
        # The worker writes before it has read; a reset here would lose it the remote's last bytes.
        for _ in range(8):
            await stream.send_all(bytes(PIECE_BYTES))
        assert await read_exactly(stream, 8) == b"farewell"
        assert await stream.receive_some(1) == b""


@pytest.mark.parametrize("silent", ["the remote", "the worker"])
async def test_an_end_that_does_not_read_holds_the_other_back(tmp_path: Path, silent: str) -> None:
    async with daemon(tmp_path) as d, await d.connect() as stream:
        await read_head(stream, open_answers)
        assert d.remote_end is not None
        send = stream.send_all if silent == "the remote" else d.remote_end.send
        sent = 0
        with trio.move_on_after(0.5) as patience:
            while True:
                await send(bytes(64 * 1024))
                sent += 64 * 1024
        assert patience.cancelled_caught
        # A few pieces here and in the channel, and what the socket's own buffers hold.
        assert sent < 16 * PIECE_BYTES


async def test_a_stream_that_cannot_be_had_is_refused_with_the_reason(tmp_path: Path) -> None:
    async with daemon(tmp_path) as d:
        d.refusal = NetworkError("nobody answers")
        async with await d.connect() as stream:
            assert await read_head(stream, open_answers) == StreamNotOpened(reason="nobody answers")
            assert await stream.receive_some(1) == b""


async def test_an_opening_that_the_worker_gives_up_is_given_up_here(tmp_path: Path) -> None:
    async with daemon(tmp_path) as d:
        d.delay_seconds = 1000.0
        stream = await d.connect()
        await until(lambda: d.asked)
        await stream.aclose()
        await d.given_up.wait()


def worker_listener(folder: Path) -> trio.SocketListener:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(folder / WORKER_SOCKET))
    listener.listen()
    listener.setblocking(False)
    return trio.SocketListener(trio.socket.from_stdlib_socket(listener))


async def test_a_stream_that_has_come_is_handed_over_with_its_sender_and_its_greeting(
    tmp_path: Path,
) -> None:
    hello = StreamHello(1, bytes(32), bytes(range(32)))
    async with daemon(tmp_path) as d:
        assert stat.S_IMODE((tmp_path / DAEMON_SOCKET).stat().st_mode) == 0o600
        listener = worker_listener(tmp_path)
        host_end, remote_end = MemoryChannel.pair()
        d.bridge.hand_over(IncomingStream(REMOTE, hello, host_end))
        async with listener, await listener.accept() as stream:
            assert await read_head(stream, arrivals) == StreamArrived(
                sender=REMOTE, route=Route.HOST
            )
            assert StreamHello.decode(await read_exactly(stream, HELLO_BYTES)) == hello
            await stream.send_all(b"accepted")
            assert await remote_end.receive(100) == b"accepted"
        assert await remote_end.receive(1) == b""


async def test_without_a_worker_a_stream_that_has_come_is_dropped(tmp_path: Path) -> None:
    async with daemon(tmp_path) as d:
        host_end, remote_end = MemoryChannel.pair()
        d.bridge.hand_over(IncomingStream(REMOTE, StreamHello(1, bytes(32), bytes(32)), host_end))
        with contextlib.suppress(LinkClosed):
            assert await remote_end.receive(1) == b""


@pytest.mark.parametrize(
    "head",
    [b"", b"\x05", (2**31).to_bytes(4, "little"), (2).to_bytes(4, "little") + b"{}"],
    ids=["nothing", "cut short", "too long", "no request"],
)
async def test_a_head_that_is_none_ends_the_connection_and_opens_nothing(
    tmp_path: Path, head: bytes
) -> None:
    async with daemon(tmp_path) as d:
        async with await trio.open_unix_socket(str(tmp_path / DAEMON_SOCKET)) as stream:
            await stream.send_all(head)
            await stream.send_eof()
            assert await stream.receive_some(1) == b""
        assert d.asked == []


async def test_streams_are_bounded_in_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bridge_module, "MAX_STREAMS", 2)
    async with daemon(tmp_path) as d:
        first, second = await d.connect(), await d.connect()
        for stream in (first, second):
            assert isinstance(await read_head(stream, open_answers), StreamOpened)
        async with await d.connect() as third:
            with contextlib.suppress(trio.BrokenResourceError):
                assert await third.receive_some(1) == b""
        await first.aclose()
        await second.aclose()
