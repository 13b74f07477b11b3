"""Streams opened by remotes: admission, limits and supervision of their handlers.

Every protocol of this process is served through here, so that none can omit the check of admission.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.exceptions import MuxedStreamError

from swarm_shared.base.error_groups import expected_error
from swarm_shared.base.errors import LinkClosed, NetworkError, ProtocolError, SwarmError
from swarm_shared.base.types import PeerId
from swarm_shared.network.framed_stream import FramedStream, TrafficCounter
from swarm_shared.network.libp2p.errors import summary
from swarm_shared.network.libp2p.host import take_one
from swarm_shared.network.libp2p.yamux import YamuxStream
from swarm_shared.protocol.framing import FrameLimits

logger = logging.getLogger(__name__)

Handler = Callable[[FramedStream], Awaitable[None]]
RawHandler = Callable[[YamuxStream], Awaitable[None]]


MAX_UNKNOWN_PEER_STREAMS: Final = 8
"""Streams open at once of a remote that is not a member: room for a hello on every public protocol.
What it sends is stored until a handler reads it, so that streams take memory."""


class Inbound:
    """Serves protocols. `admits` decides whether a remote may use a protocol that is not public,
    `knows` whether the remote is a member at all."""

    def __init__(self, host: BasicHost, max_streams_per_peer: int) -> None:
        self._host = host
        self._max_streams = max_streams_per_peer
        self._open: Counter[PeerId] = Counter()
        self._open_of_protocol: Counter[tuple[PeerId, str]] = Counter()
        self.handler_errors: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Streams of remotes that are not admitted, by protocol."""
        self.traffic = TrafficCounter()
        self.admits: Callable[[PeerId, str], bool] = lambda peer, protocol: True
        self.knows: Callable[[PeerId], bool] = lambda peer: True

    def serve(
        self,
        protocol: str,
        handler: Handler,
        limits: FrameLimits,
        *,
        public: bool,
        max_streams_per_peer: int,
    ) -> None:
        handle = partial(self._handle, protocol, handler, limits, public)
        self._set(protocol, partial(self._count, protocol, max_streams_per_peer, handle))

    def serve_raw(self, protocol: str, handler: RawHandler, *, public: bool) -> None:
        self._set(protocol, partial(self._handle_raw, protocol, handler, public))

    def _set(self, protocol: str, handler: Callable[[INetStream], Awaitable[None]]) -> None:
        self._host.set_stream_handler(TProtocol(protocol), handler)

    async def accept(self, stream: INetStream) -> None:
        """Handle a stream that a remote opens. Never raises: an error here would stop the whole
        host."""
        remote = PeerId(stream.muxed_conn.peer_id.to_base58())
        most = (
            self._max_streams
            if self.knows(remote)
            else min(MAX_UNKNOWN_PEER_STREAMS, self._max_streams)
        )
        if self._open[remote] >= most:
            logger.debug("%s has too many streams open, one more is refused", remote)
            await stream.reset()
            return
        self._open[remote] += 1
        try:
            await self._host._swarm_stream_handler(stream)
        except Exception as error:  # noqa: BLE001 (py-libp2p raises anything for garbage)
            logger.debug("a stream from %s was refused: %s", remote, summary(error))
            await stream.reset()
        finally:
            take_one(self._open, remote)

    async def _count(
        self,
        protocol: str,
        most: int,
        handle: Callable[[INetStream], Awaitable[None]],
        stream: INetStream,
    ) -> None:
        key = (PeerId(stream.muxed_conn.peer_id.to_base58()), protocol)
        if self._open_of_protocol[key] >= most:
            logger.debug(
                "%s has %d streams of %s open, one more is refused", key[0], most, protocol
            )
            await stream.reset()
            return
        self._open_of_protocol[key] += 1
        try:
            await handle(stream)
        finally:
            take_one(self._open_of_protocol, key)

    def _refuses(self, remote: PeerId, protocol: str, public: bool) -> bool:
        if public or self.admits(remote, protocol):
            return False
        self.refused[protocol] += 1
        logger.debug("%s is not admitted to %s", remote, protocol)
        return True

    def _welcome(self, remote: PeerId, stream: NetStream) -> None:
        muxed = stream.muxed_stream
        if isinstance(muxed, YamuxStream) and self.knows(remote):
            muxed.extend_window()

    async def _handle(
        self,
        protocol: str,
        handler: Handler,
        limits: FrameLimits,
        public: bool,
        stream: INetStream,
    ) -> None:
        assert isinstance(stream, NetStream)
        framed = FramedStream(stream, protocol, limits, self.traffic)
        try:
            if not self._refuses(framed.remote, protocol, public):
                self._welcome(framed.remote, stream)
                await handler(framed)
                await framed.close()
        except Exception as error:  # noqa: BLE001 (a supervisor: a failure stays in its stream)
            self._log_failure(protocol, framed.remote, error)
        finally:
            await framed.reset()

    def _log_failure(self, protocol: str, remote: PeerId, error: Exception) -> None:
        cause = expected_error(error)
        if isinstance(cause, LinkClosed):
            logger.debug("%s: %s", protocol, cause)
        elif isinstance(cause, NetworkError | ProtocolError):
            logger.info("%s with %s ended: %s", protocol, remote, cause)
        elif cause is not None:
            logger.warning("%s with %s ended: %s", protocol, remote, cause)
        else:
            self.handler_errors[protocol] += 1
            logger.error(
                "the handler of %s failed on a stream with %s", protocol, remote, exc_info=error
            )

    async def _handle_raw(
        self, protocol: str, handler: RawHandler, public: bool, stream: INetStream
    ) -> None:
        assert isinstance(stream, NetStream)
        muxed = stream.muxed_stream
        assert isinstance(muxed, YamuxStream), "the host runs no other muxer"
        remote = PeerId(muxed.connection.peer_id.to_base58())
        try:
            if not self._refuses(remote, protocol, public):
                self._welcome(remote, stream)
                await handler(muxed)
                # Whatever else the remote sends is dropped.
                await muxed.close()
                muxed.stop_reading()
                return
        except (SwarmError, MuxedStreamError, trio.TooSlowError) as error:
            logger.debug("%s with %s ended: %s", protocol, remote, error)
        except Exception:  # a supervisor: a failure stays in its stream
            self.handler_errors[protocol] += 1
            logger.exception("the handler of %s failed on a stream with %s", protocol, remote)
        with trio.CancelScope(shield=True), trio.move_on_after(1.0):
            await muxed.reset()
