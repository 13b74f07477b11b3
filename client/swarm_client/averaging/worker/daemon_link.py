"""The averaging worker's end of the link to the daemon. asyncio."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct

from pydantic import BaseModel

from swarm_client.averaging.protocol.messages import DaemonMessage, daemon_messages

# swarm_client.ipc.child_process has the same framing, but imports trio: 0.2 s of CPU for each
# volunteer.
_LENGTH = struct.Struct("<I")
_MAX_MESSAGE_BYTES = 16 * 2**20


class DaemonLink:
    """Messages from and to the daemon."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def inherit(cls, descriptor: int) -> DaemonLink:
        reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor))
        return cls(reader, writer)

    async def receive(self) -> DaemonMessage | None:
        """None when the daemon has ended."""
        try:
            (length,) = _LENGTH.unpack(await self._reader.readexactly(_LENGTH.size))
            assert length <= _MAX_MESSAGE_BYTES, "the daemon never sends that much"
            return daemon_messages.validate_json(await self._reader.readexactly(length))
        except (asyncio.IncompleteReadError, ConnectionError):
            return None

    def send(self, message: BaseModel) -> None:
        body = message.model_dump_json().encode()
        self._writer.write(_LENGTH.pack(len(body)) + body)

    async def flush(self) -> None:
        self._writer.close()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()
