"""Streams opened by remotes: admission, limits and supervision of their handlers.

Every protocol of this process is served through here, so that none can omit the check of admission.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final, TypeVar

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.stream_muxer.exceptions import MuxedStreamError

from swarm_shared.base.error_groups import expected_error
from swarm_shared.base.errors import LinkClosed, NetworkError, ProtocolError, SwarmError
from swarm_shared.base.types import PeerId
from swarm_shared.network.framed_stream import FramedStream, TrafficCounter
from swarm_shared.network.libp2p.errors import summary
from swarm_shared.network.libp2p.host import NEGOTIATE_SECONDS, take_one
from swarm_shared.network.libp2p.yamux import YamuxStream
from swarm_shared.protocol.framing import FrameLimits

logger = logging.getLogger(__name__)

Handler = Callable[[FramedStream], Awaitable[None]]
RawHandler = Callable[[YamuxStream], Awaitable[None]]
_KeyT = TypeVar("_KeyT")


MAX_UNKNOWN_PEER_STREAMS: Final = 8
"""Streams open at once of a remote that is not a member: room for a hello on every public protocol.
What it sends is stored until a handler reads it, so that streams take memory."""

MAX_STREAMS_OF_PROTOCOL: Final = 64
"""Streams of one remote, unless a protocol sets another limit."""


class Inbound:
    """Serves protocols. `admits` decides whether a remote may use a protocol that is not public,
    `knows` whether the remote is a member at all."""

    def __init__(self, max_streams_per_peer: int) -> None:
        self._max_streams = max_streams_per_peer
        self._served = Multiselect()
        self._open: Counter[PeerId] = Counter()
        self._open_of_protocol: Counter[tuple[PeerId, str]] = Counter()
        self.handler_errors: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Streams of remotes that are not admitted, by protocol."""
        self.traffic = TrafficCounter(lambda peer: self.knows(peer))
        self.admits: Callable[[PeerId, str], bool] = lambda peer, protocol: True
        self.knows: Callable[[PeerId], bool] = lambda peer: True

    @property
    def protocols(self) -> tuple[str, ...]:
        return tuple(map(str, self._served.handlers))

    def serve(
        self,
        protocol: str,
        handler: Handler,
        limits: FrameLimits,
        *,
        public: bool = False,
        max_streams_per_peer: int = MAX_STREAMS_OF_PROTOCOL,
    ) -> None:
        """Run `handler` for each stream that a remote opens with `protocol`.

        The stream is closed when the handler returns and reset when it raises. Exceptions stay
        here: logged once, with the traceback when it is a fault of this side. A protocol that is
        not `public` is refused to remotes that `admits` rejects.
        """

        async def run(stream: YamuxStream) -> None:
            remote = stream.connection.remote
            traffic = self.traffic.link(remote, protocol, lasts=self.knows(remote))
            async with FramedStream(stream, protocol, limits, traffic) as framed:
                await handler(framed)

        self._set(protocol, run, public, max_streams_per_peer)

    def serve_raw(self, protocol: str, handler: RawHandler, *, public: bool) -> None:
        """Run `handler` for each stream of a protocol without frames; its errors end the stream
        alone."""

        async def run(stream: YamuxStream) -> None:
            try:
                await handler(stream)
                await stream.hang_up()
            except (SwarmError, MuxedStreamError, trio.TooSlowError) as error:
                logger.debug("%s with %s ended: %s", protocol, stream.connection.remote, error)
            finally:
                # No more than tidying up where both ends have closed the stream.
                await stream.reset()

        self._set(protocol, run, public, self._max_streams)

    def stop(self, protocol: str) -> None:
        """Accept no new streams of the protocol."""
        self._served.remove_handler(TProtocol(protocol))

    def _set(self, protocol: str, run: RawHandler, public: bool, max_streams: int) -> None:
        async def accept(stream: YamuxStream) -> None:
            handle = partial(self._supervise, protocol, run, public)
            key = (stream.connection.remote, protocol)
            await self._bounded(self._open_of_protocol, key, max_streams, handle, stream)

        self._served.add_handler(TProtocol(protocol), accept)

    async def accept(self, opened: INetStream) -> None:
        """Handle a stream that a remote opens. Never raises: an error here would stop the whole
        host."""
        assert isinstance(opened, NetStream)
        stream = opened.muxed_stream
        assert isinstance(stream, YamuxStream), "the host runs no other muxer"
        remote, max_streams = stream.connection.remote, self._max_streams
        if not self.knows(remote):
            max_streams = min(MAX_UNKNOWN_PEER_STREAMS, max_streams)
        try:
            await self._bounded(self._open, remote, max_streams, self._negotiate, stream)
        except Exception as error:  # noqa: BLE001 (py-libp2p raises anything for garbage)
            logger.debug("a stream from %s was refused: %s", remote, summary(error))
            await stream.reset()

    async def _bounded(
        self,
        counter: Counter[_KeyT],
        key: _KeyT,
        max_streams: int,
        handle: RawHandler,
        stream: YamuxStream,
    ) -> None:
        if counter[key] >= max_streams:
            logger.debug("%s has %d streams open, one more is refused", key, max_streams)
            await stream.reset()
            return
        counter[key] += 1
        try:
            await handle(stream)
        finally:
            take_one(counter, key)

    async def _negotiate(self, stream: YamuxStream) -> None:
        messages = MultiselectCommunicator(stream)
        _, accept = await self._served.negotiate(messages, int(NEGOTIATE_SECONDS))
        await accept(stream)

    async def _supervise(
        self, protocol: str, run: RawHandler, public: bool, stream: YamuxStream
    ) -> None:
        remote = stream.connection.remote
        try:
            if public or self.admits(remote, protocol):
                if self.knows(remote):
                    stream.extend_window()
                await run(stream)
            else:
                self.refused[protocol] += 1
                logger.debug("%s is not admitted to %s", remote, protocol)
                await stream.reset()
        except Exception as error:  # noqa: BLE001 (a supervisor: a failure stays in its stream)
            self._log_failure(protocol, remote, error)

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
