"""The averaging worker's end of the link to the daemon (asyncio)."""

from __future__ import annotations

import asyncio
import contextlib
import socket

from swarm_client.averaging.protocol.messages import DaemonMessage, daemon_messages
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import LENGTH_BYTES, decode_length, encode_prefixed, parse


class DaemonLink:
    """Messages from and to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def inherit(cls, descriptor: int) -> DaemonLink:
        """Open the link over the socket that the daemon passed as `--fd`."""
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        return cls(reader, writer)

    async def receive(self) -> DaemonMessage | None:
        """Wait for the next message; None when the daemon has ended."""
        try:
            length = decode_length(await self._reader.readexactly(LENGTH_BYTES))
            return parse(daemon_messages, await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, message: FrozenModel) -> None:
        self._writer.write(encode_prefixed(message))

    async def flush(self) -> None:
        """Send what is queued and close the link."""
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
