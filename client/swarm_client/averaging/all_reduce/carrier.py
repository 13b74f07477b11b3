"""What the all-reduce needs from a network.

A carrier opens byte streams to members and hands over the streams that members open to us. Who
is at the other end is authenticated by the carrier, before the first byte. Errors of a broken
stream are NetworkError (LinkClosed, LinkTimeout) or ProtocolError, from either loop. Which way a
stream goes is its carrier's choice, for each stream anew; the round does not care.
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
    """One authenticated, ordered, reliable byte stream."""

    @property
    def route(self) -> Route:
        """By which way it goes."""

    async def send(self, data: bytes | memoryview) -> None:
        """Returns when the bytes are on their way and more may be sent (backpressure)."""

    async def receive(self, max_bytes: int) -> bytes | bytearray | memoryview:
        """At least one byte, or nothing at the end of the stream."""

    async def aclose(self) -> None:
        """End the stream; what was sent still arrives."""

    async def abort(self) -> None:
        """Drop the stream at once; the remote's next read fails or ends. Never raises."""


@dataclass(frozen=True, slots=True)
class IncomingStream:
    """A stream that member `sender` opened to us for this round."""

    sender: PeerId
    hello: StreamHello
    channel: Channel


class IncomingStreams:
    """The streams of one round as they come."""

    def __init__(self, stream: MemoryObjectReceiveStream[IncomingStream]) -> None:
        self._stream = stream
        self.late_abort_frame = b""
        """For members that come after the round has failed: the ABORT frame they have missed."""

    async def receive(self) -> IncomingStream:
        return await self._stream.receive()

    def undelivered(self) -> list[IncomingStream]:
        """The round is over; nobody will look at these."""
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
        """A new stream to a member of the round. NetworkError when it cannot be had."""

    def incoming(self, spec: RoundSpec, tag: bytes) -> AbstractContextManager[IncomingStreams]:
        """While open, streams of this round's members are delivered; others are refused."""
