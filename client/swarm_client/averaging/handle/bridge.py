"""Carries streams of the daemon's libp2p host to and from its averaging worker. trio.

The worker runs the rounds, because summing and hivemind have no place in the daemon; the host is
the daemon's. So where p2pd does not connect a pair, its stream goes through both: bytes are piped
between the host's stream and a unix socket, a bounded piece at a time, each direction as fast as
its slower end. Who may open a stream to whom is the daemon's decision, on either side of it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import trio

from swarm_client.averaging.all_reduce.carrier import Channel, IncomingStream
from swarm_client.averaging.protocol.bridge import (
    DAEMON_SOCKET,
    MAX_HEAD_BYTES,
    WORKER_SOCKET,
    OpenStream,
    StreamArrived,
    StreamNotOpened,
    StreamOpened,
    encode_head,
    open_requests,
)
from swarm_shared.base.errors import FrameError, LinkClosed, NetworkError, ProtocolError
from swarm_shared.base.json_messages import LENGTH_BYTES, decode_length, parse
from swarm_shared.base.types import PeerId

PIECE_BYTES = 256 * 1024
HEAD_SECONDS = 5.0
SEND_TIMEOUT_SECONDS = 120.0
"""Longer than any stall limit of a round, which is what ends a stream that does not move; this
only clears away one whose round is gone."""
MAX_STREAMS = 4096
"""Of both kinds at once: a round of the largest group has twice as many as it has members."""
_LISTEN_BACKLOG = 128

logger = logging.getLogger(__name__)

OpenChannel = Callable[[PeerId, bool], Awaitable[Channel]]
"""Opens a stream to a peer; a relayed one only if the flag says so. NetworkError otherwise."""


class Bridge:
    """`running` for as long as streams may be carried, `listening` around each worker's life."""

    def __init__(self) -> None:
        self.open_channel: OpenChannel = _no_host
        self._folder: Path | None = None
        self._streams = 0
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Streams outlive the round whose last bytes they pipe, and the worker that ran it."""
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def listening(self, folder: Path) -> AsyncIterator[None]:
        """Serve the worker whose sockets lie in `folder`."""
        path = folder / DAEMON_SOCKET
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_LISTEN_BACKLOG)
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
        self._folder = folder
        assert self._nursery is not None, "a bridge runs before it listens"
        ours = trio.SocketListener(trio.socket.from_stdlib_socket(listener))
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_listeners, handler_nursery=self._nursery)
            nursery.start_soon(serve, self._open, [ours])
            try:
                yield
            finally:
                self._folder = None
                nursery.cancel_scope.cancel()

    async def _supervised(
        self, work: Callable[[trio.SocketStream], Awaitable[None]], connection: trio.SocketStream
    ) -> None:
        if self._streams >= MAX_STREAMS:
            logger.warning("%s bridged streams at once; one more is refused", MAX_STREAMS)
            return
        self._streams += 1
        try:
            await work(connection)
        except Exception:  # a supervisor: one stream's trouble stays its own
            logger.exception("a bridged stream failed by a fault of this program")
        finally:
            self._streams -= 1

    # ------------------------------------------------------------------- streams that we open

    async def _open(self, connection: trio.SocketStream) -> None:
        """Serve one connection of the worker's."""
        await self._supervised(self._open_for, connection)

    async def _open_for(self, connection: trio.SocketStream) -> None:
        try:
            request = await _read_request(connection)
        except LinkClosed as error:
            logger.info("the averaging worker asked for no stream: %s", error)
            return
        channel: Channel | None = None
        reason = "the worker does not want it any more"
        async with trio.open_nursery() as nursery:
            # A route that another one has overtaken is given up by closing the connection.
            nursery.start_soon(_cancel_at_end, connection, nursery.cancel_scope)
            try:
                channel = await self.open_channel(request.peer, request.relayed)
            except (NetworkError, ProtocolError) as error:
                reason = str(error)
            nursery.cancel_scope.cancel()
        if channel is None:
            with contextlib.suppress(trio.BrokenResourceError):
                await connection.send_all(encode_head(StreamNotOpened(reason=reason[:500])))
            return
        await pipe(connection, channel, encode_head(StreamOpened(route=channel.route)))

    # ------------------------------------------------------------- streams that have come to us

    def hand_over(self, incoming: IncomingStream) -> None:
        """Give the worker a stream that its round is waiting for."""
        assert self._nursery is not None, "rounds run in a worker only while the bridge does"
        self._nursery.start_soon(self._hand_over, incoming)

    async def _hand_over(self, incoming: IncomingStream) -> None:
        channel = incoming.channel
        head = encode_head(StreamArrived(sender=incoming.sender, route=channel.route))
        try:
            if self._folder is None:
                raise OSError("it is not there any more")
            connection = await trio.open_unix_socket(str(self._folder / WORKER_SOCKET))
        except OSError as error:
            logger.info("a stream could not be handed to the averaging worker: %s", error)
        else:
            async with connection:
                await self._supervised(
                    lambda ours: pipe(ours, channel, head + incoming.hello.encode()), connection
                )
        await channel.abort()  # does nothing where `pipe` has closed it


async def pipe(connection: trio.SocketStream, channel: Channel, first: bytes) -> None:
    """Send `first` to the worker, then pipe both ways until both ends have ended. The channel is
    closed afterwards."""
    try:
        with contextlib.suppress(trio.BrokenResourceError):
            await connection.send_all(first)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_pipe_to_worker, channel, connection)
            await _pipe_to_remote(connection, channel)
    finally:
        with trio.CancelScope(shield=True):
            await channel.abort()


async def _pipe_to_worker(channel: Channel, connection: trio.SocketStream) -> None:
    """What the remote sends, to the worker."""
    try:
        while piece := await channel.receive(PIECE_BYTES):
            await connection.send_all(memoryview(piece))
    except (NetworkError, ProtocolError) as error:
        logger.debug("a bridged stream broke: %s", error)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the worker is done with it; `_pipe_to_remote` sees the same
    # The worker can still read what has come before.
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await connection.send_eof()


async def _pipe_to_remote(connection: trio.SocketStream, channel: Channel) -> None:
    """What the worker sends, to the remote. Ends with the worker's use of the stream."""
    broken = False
    while True:
        try:
            piece = await connection.receive_some(PIECE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await channel.abort()  # dropped by the worker, with something of it unread
            return
        if not piece:
            break
        if broken:
            continue  # it learns of that from what it reads, and would lose that by an error here
        try:
            with trio.fail_after(SEND_TIMEOUT_SECONDS):
                await channel.send(piece)
        except (NetworkError, ProtocolError, trio.TooSlowError) as error:
            logger.debug("a bridged stream broke: %s", error)
            broken = True
    if not broken:
        with contextlib.suppress(NetworkError, ProtocolError):
            await channel.aclose()
    else:
        await channel.abort()


async def _read_request(connection: trio.SocketStream) -> OpenStream:
    try:
        with trio.fail_after(HEAD_SECONDS):
            prefix = await _read_exactly(connection, LENGTH_BYTES)
            length = decode_length(prefix, MAX_HEAD_BYTES)
            return parse(open_requests, await _read_exactly(connection, length))
    except (trio.TooSlowError, trio.BrokenResourceError, FrameError) as error:
        raise LinkClosed(f"{error!r}") from error


async def _read_exactly(connection: trio.SocketStream, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        piece = await connection.receive_some(size - len(data))
        if not piece:
            raise LinkClosed("it ended")
        data += piece
    return bytes(data)


async def _cancel_at_end(connection: trio.SocketStream, scope: trio.CancelScope) -> None:
    """The worker says nothing until it is answered, so that whatever can be read is the end."""
    with contextlib.suppress(trio.BrokenResourceError):
        await connection.receive_some(1)
    scope.cancel()


async def _no_host(peer: PeerId, relayed: bool) -> Channel:
    raise NetworkError("the daemon's host is not there yet")
