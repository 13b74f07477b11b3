"""The network interface of the all-reduce.

A carrier opens byte streams to members and delivers the streams that members open to us. It
authenticates the remote before the first byte. A broken stream raises NetworkError (LinkClosed,
LinkTimeout) or ProtocolError under either event loop. The carrier chooses the route of each stream;
the round does not depend on it.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

import anyio
from anyio.streams.memory import MemoryObjectReceiveStream

from swarm_client.averaging.all_reduce.frames import StreamHello
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.types import PeerId


class Channel(Protocol):
    """An authenticated, ordered, reliable byte stream."""

    @property
    def route(self) -> Route:
        """The route that the stream takes."""

    async def send(self, data: bytes | memoryview) -> None:
        """Send bytes; returns when more may be sent (backpressure)."""

    async def receive(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """Receive at least one byte, or nothing at the end of the stream."""

    async def aclose(self) -> None:
        """End the stream; what was sent still arrives."""

    async def abort(self) -> None:
        """Drop the stream at once; the next read of the remote fails or ends. Never raises."""


@dataclass(frozen=True, slots=True)
class IncomingStream:
    """A stream that member `sender` opened to us for this round."""

    sender: PeerId
    hello: StreamHello
    channel: Channel


class IncomingStreams:
    """The streams of one round, in order of arrival."""

    def __init__(self, stream: MemoryObjectReceiveStream[IncomingStream]) -> None:
        self._stream = stream
        self.late_abort_frame = b""
        """ABORT frame for members whose stream arrives after the round has failed."""

    async def receive(self) -> IncomingStream:
        """Wait for the next stream."""
        return await self._stream.receive()

    def undelivered(self) -> list[IncomingStream]:
        """Close after the end of the round, and return the streams that it did not take."""
        late: list[IncomingStream] = []
        while True:
            try:
                late.append(self._stream.receive_nowait())
            except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
                break
        self._stream.close()
        return late


class Carrier(Protocol):
    """The network of one round."""

    async def open(self, peer: PeerId) -> Channel:
        """Open a new stream to a member of the round. NetworkError if that fails."""

    def incoming(self, spec: RoundSpec) -> AbstractContextManager[IncomingStreams]:
        """Deliver streams of this round's members while open, and refuse others."""
