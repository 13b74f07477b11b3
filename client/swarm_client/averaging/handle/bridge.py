"""Carries streams of the daemon's libp2p host to and from its averaging worker (trio).

Rounds run in the worker, because summing and hivemind must stay out of the daemon; the host belongs
to the daemon. Where p2pd does not connect a pair, the stream passes through both: bytes are piped
between the host's stream and a unix socket, a bounded piece at a time, each direction at the speed
of its slower end. In both directions the daemon decides which peers may have a stream.
"""

from __future__ import annotations

import contextlib
import logging
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
from swarm_shared.base.json_messages import PrefixedDecoder
from swarm_shared.base.local_server import listen_privately
from swarm_shared.base.types import PeerId

PIECE_BYTES = 256 * 1024
HEAD_SECONDS = 5.0
SEND_TIMEOUT_SECONDS = 120.0
"""Time limit of one send, in seconds. Longer than any stall limit of a round, which normally ends a
stream that does not move; this only removes a stream whose round has ended."""
MAX_STREAMS = 4096
"""Most streams of both directions at once: a round of the largest group has twice as many as it has
members."""
_LISTEN_BACKLOG = 128

logger = logging.getLogger(__name__)

OpenChannel = Callable[[PeerId, bool], Awaitable[Channel]]
"""Opens a stream to a peer, a relayed one only if the flag permits it. May raise NetworkError."""


class Bridge:
    """The bridge. `running` surrounds the use of streams, `listening` the life of one worker."""

    def __init__(self) -> None:
        self.open_channel: OpenChannel = _no_host
        self._folder: Path | None = None
        self._streams = 0
        self._nursery: trio.Nursery | None = None

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the streams, which outlive the round whose last bytes they carry, and its worker."""
        async with trio.open_nursery() as self._nursery:
            yield
            self._nursery.cancel_scope.cancel()

    @asynccontextmanager
    async def listening(self, folder: Path) -> AsyncIterator[None]:
        """Serve the worker whose sockets lie in `folder`."""
        listener = listen_privately(folder / DAEMON_SOCKET, _LISTEN_BACKLOG)
        self._folder = folder
        assert self._nursery is not None, "a bridge runs before it listens"
        socket_listener = trio.SocketListener(listener)
        async with trio.open_nursery() as nursery:
            serve = partial(trio.serve_listeners, handler_nursery=self._nursery)
            nursery.start_soon(serve, self._open, [socket_listener])
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
        except Exception:  # a supervisor: one stream's failure must not end the others
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
            logger.info("a request of the averaging worker for a stream is invalid: %s", error)
            return
        channel: Channel | None = None
        reason = "the worker has closed the connection"
        async with trio.open_nursery() as nursery:
            # The worker gives up a route by closing the connection, when another route was
            # faster.
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
        """Hand the worker a stream that its round waits for."""
        assert self._nursery is not None, "rounds run in a worker only while the bridge does"
        self._nursery.start_soon(self._hand_over, incoming)

    async def _hand_over(self, incoming: IncomingStream) -> None:
        channel = incoming.channel
        head = encode_head(StreamArrived(sender=incoming.sender, route=channel.route))
        try:
            if self._folder is None:
                raise OSError("it has ended")
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
    """Send `first` to the worker, then pipe both ways until both ends have ended; close the
    channel."""
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
    """Pipe what the remote sends to the worker."""
    try:
        while piece := await channel.receive(PIECE_BYTES):
            await connection.send_all(memoryview(piece))
    except (NetworkError, ProtocolError) as error:
        logger.debug("a bridged stream broke: %s", error)
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return  # the worker has closed it; `_pipe_to_remote` sees the same
    # The worker can still read what has arrived before.
    with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
        await connection.send_eof()


async def _pipe_to_remote(connection: trio.SocketStream, channel: Channel) -> None:
    """Pipe what the worker sends to the remote. Ends with the worker's use of the stream."""
    broken = False
    while True:
        try:
            piece = await connection.receive_some(PIECE_BYTES)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            await channel.abort()  # dropped by the worker with unread data
            return
        if not piece:
            break
        if broken:
            continue  # the worker sees the break in what it reads; an error would discard that
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
    decoder = PrefixedDecoder(open_requests)  # nothing follows the head before its answer
    try:
        with trio.fail_after(HEAD_SECONDS):
            while (request := decoder.next_message()) is None:
                piece = await connection.receive_some(MAX_HEAD_BYTES)
                if not piece:
                    raise LinkClosed("it ended")
                decoder.feed(piece)
            return request
    except (trio.TooSlowError, trio.BrokenResourceError, FrameError) as error:
        raise LinkClosed(f"{error!r}") from error


async def _cancel_at_end(connection: trio.SocketStream, scope: trio.CancelScope) -> None:
    """Cancel the scope when the worker closes. It sends nothing before the answer, so that any
    readable event is the end."""
    with contextlib.suppress(trio.BrokenResourceError):
        await connection.receive_some(1)
    scope.cancel()


async def _no_host(peer: PeerId, relayed: bool) -> Channel:
    raise NetworkError("the daemon's host is not ready yet")
