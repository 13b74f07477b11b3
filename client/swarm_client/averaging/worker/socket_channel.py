"""A stream that reaches the averaging worker over a unix socket: from p2pd, or from the daemon."""

from __future__ import annotations

import asyncio
import contextlib

from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.errors import LinkClosed

WRITE_BUFFER_BYTES = 512 * 1024
"""In this process, per stream, before `send` waits: keeps the other process fed while pieces are
encoded."""


class SocketChannel:
    """A channel (averaging.carrier) on an asyncio stream."""

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
