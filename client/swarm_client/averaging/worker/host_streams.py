"""Streams of the daemon's libp2p host, in the averaging worker. asyncio.

The host lives in the daemon, so each of its streams is a unix socket to or from the daemon here;
the other end is `bridge`. Both sockets lie in a folder that only this user can enter.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import TypeVar

import anyio
from pydantic import TypeAdapter

from swarm_client.averaging.all_reduce.incoming import IncomingHub
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
from swarm_client.averaging.worker.socket_channel import SocketChannel
from swarm_shared.base.errors import FrameError, LinkClosed, NetworkError
from swarm_shared.base.json_messages import LENGTH_BYTES, decode_length, parse
from swarm_shared.base.types import PeerId

HOST_PREFIX = "host/"
HEAD_SECONDS = 5.0
READ_BUFFER_BYTES = 256 * 1024

logger = logging.getLogger(__name__)

HeadT = TypeVar("HeadT")


class HostStreams:
    """Opens streams through the daemon and takes those that it hands over to `hub`."""

    def __init__(self, folder: Path, hub: IncomingHub) -> None:
        self._folder = folder
        self._hub = hub

    async def serve(self) -> asyncio.Server:
        return await asyncio.start_unix_server(
            self._accept, self._folder / WORKER_SOCKET, limit=READ_BUFFER_BYTES
        )

    async def open(self, peer: PeerId, *, relayed: bool) -> SocketChannel:
        """`relayed`: a relayed connection will do. NetworkError when none can be had."""
        try:
            reader, writer = await asyncio.open_unix_connection(
                self._folder / DAEMON_SOCKET, limit=READ_BUFFER_BYTES
            )
        except OSError as error:
            raise NetworkError(f"the daemon takes no streams: {error}") from error
        opened = False
        try:
            writer.write(encode_head(OpenStream(peer=peer, relayed=relayed)))
            answer = await _read_head(reader, open_answers)
            if not isinstance(answer, StreamOpened):
                raise NetworkError(answer.reason)
            opened = True
        finally:
            if not opened:
                writer.transport.abort()
        return SocketChannel(reader, writer, answer.route)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            with anyio.fail_after(HEAD_SECONDS):
                arrival: StreamArrived = await _read_head(reader, arrivals)
            channel = SocketChannel(reader, writer, arrival.route)
            await self._hub.accept(host_remote_name(arrival.sender), channel)
        except (NetworkError, TimeoutError) as error:
            logger.info("a stream from the daemon came to nothing: %s", error)
            writer.transport.abort()
        except Exception:  # a supervisor: asyncio would only print it
            logger.exception("a stream from the daemon failed")
            writer.transport.abort()


def host_remote_name(peer: PeerId) -> str:
    """A peer's name in the worker's waiting room when it comes over the host; its p2pd's is the
    bare peer ID. Nobody can be taken for somebody else by calling its p2pd like their host."""
    return f"{HOST_PREFIX}{peer}"


async def _read_head(reader: asyncio.StreamReader, adapter: TypeAdapter[HeadT]) -> HeadT:
    try:
        length = decode_length(await reader.readexactly(LENGTH_BYTES), MAX_HEAD_BYTES)
        return parse(adapter, await reader.readexactly(length))
    except (asyncio.IncompleteReadError, OSError) as error:
        raise LinkClosed("the daemon closed the stream") from error
    except FrameError as error:
        raise LinkClosed(f"the daemon sent a malformed head: {error}") from error
