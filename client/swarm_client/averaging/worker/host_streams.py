"""Streams of the averaging worker, and those of the daemon's libp2p host among them (asyncio).

The host lives in the daemon, so each of its streams is a unix connection to or from the daemon,
whose end is `swarm_client.averaging.handle.bridge`. Both sockets lie in a folder that only this
user can enter.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from pathlib import Path
from typing import TypeVar

import anyio
from pydantic import TypeAdapter

from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.all_reduce.routes import Route
from swarm_client.averaging.protocol.bridge import (
    DAEMON_SOCKET,
    MAX_HEAD_BYTES,
    WORKER_SOCKET,
    OpenStream,
    StreamArrived,
    StreamOpened,
    arrivals,
    encode_head,
    open_answers,
)
from swarm_shared.base.errors import FrameError, LinkClosed, NetworkError
from swarm_shared.base.json_messages import LENGTH_BYTES, decode_length, parse
from swarm_shared.base.types import PeerId

HOST_PREFIX = "host/"
HEAD_SECONDS = 5.0
"""Time limit for the head of a stream from the daemon, in seconds."""
READ_BUFFER_BYTES = 256 * 1024
WRITE_BUFFER_BYTES = 512 * 1024
"""Bytes buffered per stream before `send` waits: enough to keep the other process supplied while
pieces are encoded."""

logger = logging.getLogger(__name__)

HeadT = TypeVar("HeadT")


class SocketChannel:
    """A channel (`swarm_client.averaging.all_reduce.carrier`) on an asyncio stream of p2pd or of
    the daemon."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: Route
    ) -> None:
        self.route = route
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    async def send(self, data: bytes | memoryview) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise LinkClosed(f"the stream is closed: {error}") from error

    async def receive(self, max_bytes: int) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise LinkClosed(f"the stream was dropped: {error}") from error

    async def aclose(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError as error:
            raise LinkClosed(f"the stream was dropped at its end: {error}") from error

    async def abort(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class HostStreams:
    """Opens streams through the daemon, and passes the streams that it hands over to `hub`."""

    def __init__(self, folder: Path, hub: IncomingHub) -> None:
        self._folder = folder
        self._hub = hub

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(
            self._accept, self._folder / WORKER_SOCKET, limit=READ_BUFFER_BYTES
        )

    async def open(self, peer: PeerId, *, relayed: bool) -> SocketChannel:
        """Open a stream to `peer`; `relayed` permits a relayed connection. NetworkError if none."""
        try:
            reader, writer = await asyncio.open_unix_connection(
                self._folder / DAEMON_SOCKET, limit=READ_BUFFER_BYTES
            )
        except OSError as error:
            raise NetworkError(f"the daemon takes no streams: {error}") from error
        try:
            writer.write(encode_head(OpenStream(peer=peer, relayed=relayed)))
            answer = await _read_head(reader, open_answers)
            if not isinstance(answer, StreamOpened):
                raise NetworkError(answer.reason)
        except BaseException:
            writer.transport.abort()
            raise
        return SocketChannel(reader, writer, answer.route)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with anyio.fail_after(HEAD_SECONDS):
                arrival: StreamArrived = await _read_head(reader, arrivals)
            channel = SocketChannel(reader, writer, arrival.route)
            await self._hub.accept(host_remote_name(arrival.sender), channel)
        except (NetworkError, TimeoutError) as error:
            logger.info("a stream from the daemon failed: %s", error)
            writer.transport.abort()
        except Exception:  # a supervisor: asyncio would only print it
            logger.exception("a stream from the daemon failed")
            writer.transport.abort()


def host_remote_name(peer: PeerId) -> str:
    """The name of a peer's host in the worker's `IncomingHub`.

    The name of a p2pd is the bare peer ID, so that no p2pd can pass for another peer's host.
    """
    return f"{HOST_PREFIX}{peer}"


async def _read_head(reader: asyncio.StreamReader, adapter: TypeAdapter[HeadT]) -> HeadT:
    try:
        length = decode_length(await reader.readexactly(LENGTH_BYTES), MAX_HEAD_BYTES)
        return parse(adapter, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkClosed("the daemon closed the stream") from error
    except FrameError as error:
        raise LinkClosed(f"the daemon sent a malformed head: {error}") from error
