"""Streams that remotes open: who may, how many, and what becomes of their errors.

Every protocol of this process is served through here, so that none can forget to ask whether the
remote is admitted.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import trio
from libp2p.abc import INetStream
from libp2p.custom_types import TProtocol
from libp2p.host.basic_host import BasicHost
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.exceptions import MuxedStreamError

from swarm_shared.errors import LinkClosed, NetworkError, ProtocolError, SwarmError
from swarm_shared.network.errors import summary
from swarm_shared.network.stream import FramedStream
from swarm_shared.network.traffic import TrafficCounter
from swarm_shared.network.yamux_stream import YamuxStream
from swarm_shared.types import PeerId
from swarm_shared.wire import FrameLimits

logger = logging.getLogger(__name__)

Handler = Callable[[FramedStream], Awaitable[None]]
RawHandler = Callable[[YamuxStream], Awaitable[None]]


class Inbound:
    """`admits` says whether a remote may use a protocol that is not public."""

    def __init__(self, host: BasicHost, max_streams_per_peer: int) -> None:
        self._host = host
        self._max_streams = max_streams_per_peer
        self._open: Counter[PeerId] = Counter()
        self.handler_errors: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        """Streams of remotes that are not admitted, by protocol."""
        self.traffic = TrafficCounter()
        self.admits: Callable[[PeerId, str], bool] = lambda peer, protocol: True

    def serve(self, protocol: str, handler: Handler, limits: FrameLimits, *, public: bool) -> None:
        self._set(protocol, partial(self._handle, protocol, handler, limits, public))

    def serve_raw(self, protocol: str, handler: RawHandler, *, public: bool) -> None:
        self._set(protocol, partial(self._handle_raw, protocol, handler, public))

    def _set(self, protocol: str, handler: Callable[[INetStream], Awaitable[None]]) -> None:
        self._host.set_stream_handler(TProtocol(protocol), handler)

    async def accept(self, stream: INetStream) -> None:
        """The entry of every stream that a remote opens. Never raises: an error that leaves
        here would stop the whole host."""
        remote = PeerId(stream.muxed_conn.peer_id.to_base58())
        if self._open[remote] >= self._max_streams:
            logger.debug("%s has too many streams open, one more is refused", remote)
            await stream.reset()
            return
        self._open[remote] += 1
        try:
            await self._host._swarm_stream_handler(stream)
        except Exception as error:  # noqa: BLE001 (a remote's garbage makes py-libp2p raise anything)
            logger.debug("a stream from %s was refused: %s", remote, summary(error))
            await stream.reset()
        finally:
            self._open[remote] -= 1
            if not self._open[remote]:
                del self._open[remote]

    def _refuses(self, remote: PeerId, protocol: str, public: bool) -> bool:
        if public or self.admits(remote, protocol):
            return False
        self.refused[protocol] += 1
        logger.debug("%s is not admitted to %s", remote, protocol)
        return True

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
                await handler(framed)
                await framed.close()
        except LinkClosed as error:
            logger.debug("%s: %s", protocol, error)
        except (NetworkError, ProtocolError) as error:
            logger.info("%s with %s ended: %s", protocol, framed.remote, error)
        except SwarmError as error:
            logger.warning("%s with %s ended: %s", protocol, framed.remote, error)
        except Exception:  # a supervisor: one stream's trouble stays its own
            self.handler_errors[protocol] += 1
            logger.exception(
                "the handler of %s failed on a stream with %s", protocol, framed.remote
            )
        finally:
            await framed.reset()

    async def _handle_raw(
        self, protocol: str, handler: RawHandler, public: bool, stream: INetStream
    ) -> None:
        assert isinstance(stream, NetStream)
        muxed = stream.muxed_stream
        assert isinstance(muxed, YamuxStream), "the host runs no other muxer"
        remote = PeerId(muxed.connection.peer_id.to_base58())
        try:
            if not self._refuses(remote, protocol, public):
                await handler(muxed)
                # What the remote sends on is dropped, and the stream forgotten.
                muxed.stop_reading()
                return
        except (SwarmError, MuxedStreamError, trio.TooSlowError) as error:
            logger.debug("%s with %s ended: %s", protocol, remote, error)
        except Exception:  # a supervisor: one stream's trouble stays its own
            self.handler_errors[protocol] += 1
            logger.exception("the handler of %s failed on a stream with %s", protocol, remote)
        with trio.CancelScope(shield=True), trio.move_on_after(1.0):
            await muxed.reset()
