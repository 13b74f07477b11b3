"""A stream that carries frames between two authenticated peers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Self

import trio
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from swarm_shared.base.errors import FrameError, LinkClosed, LinkTimeout
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.errors import stream_errors
from swarm_shared.network.libp2p.yamux import YamuxConnection
from swarm_shared.network.libp2p.yamux_stream import YamuxStream
from swarm_shared.network.nat.identify import remote_multiaddr
from swarm_shared.network.traffic import TrafficCounter
from swarm_shared.protocol.framing import Buffer, Frame, FrameDecoder, FrameLimits, encode_frame

STALL_BYTES = 1024 * 1024

# A stream that ends must tell the remote, but nobody waits for that long.
_GOODBYE_SECONDS = 1.0


class FramedStream:
    """One task may receive while others send; several may send at once, a frame at a time.

    Whoever has nothing else to do must keep receiving: frames that nobody takes hold back the
    remote's sending (on this stream only).
    """

    def __init__(
        self,
        stream: NetStream,
        protocol: str,
        limits: FrameLimits,
        traffic: TrafficCounter,
        is_superseded: Callable[[YamuxConnection], bool] = lambda connection: False,
    ) -> None:
        muxed = stream.muxed_stream
        assert isinstance(muxed, YamuxStream), "the host runs no other muxer"
        self._stream = stream
        self._muxed = muxed
        self._protocol = protocol
        self._is_superseded = is_superseded
        self._remote = PeerId(muxed.connection.peer_id.to_base58())
        self._decoder = FrameDecoder(limits)
        self._frames: deque[Frame] = deque()
        self._send_lock = trio.Lock()
        self._closed = False
        self._sent = traffic.counter(self._remote, protocol, "sent")
        self._received = traffic.counter(self._remote, protocol, "received")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Closes the stream, or resets it when the block raised."""
        if kind is None:
            await self.close()
        else:
            await self.reset()

    def __repr__(self) -> str:
        return f"FramedStream({self._protocol} with {self._remote})"

    @property
    def remote(self) -> PeerId:
        """Who is at the other end: proved by the connection's Noise handshake."""
        return self._remote

    @property
    def remote_address(self) -> str | None:
        """Where the other end's packets come from, as a multiaddr; None behind a relay."""
        return remote_multiaddr(self._muxed.connection.get_remote_address())

    @property
    def superseded(self) -> bool:
        """There is a better connection to the remote by now: a new stream would use it."""
        return self._is_superseded(self._muxed.connection)

    @property
    def protocol(self) -> str:
        return self._protocol

    def expect(self, limits: FrameLimits) -> None:
        """What is accepted from the next frame on: more from somebody who has said who it is."""
        self._decoder.expect(limits)

    async def send(
        self,
        header: bytes,
        payload: Buffer | Sequence[Buffer] = b"",
        timeout_seconds: float | None = None,
        *,
        stall_seconds: float | None = None,
    ) -> None:
        """Queues a frame for sending; waits while the remote does not take more.

        The payload must not change before this returns. LinkClosed when the stream is gone,
        LinkTimeout when `timeout_seconds` pass, or `stall_seconds` in which the remote takes less
        than STALL_BYTES. A frame that a time-out or a cancellation cuts in the middle ends the
        stream: the remote could not find the next frame's start.
        """
        pieces = encode_frame(header, payload)
        with self._deadline(timeout_seconds, "sending to"):
            async with self._send_lock:
                await self._write(pieces, stall_seconds)
        self._sent[0] += 1
        self._sent[1] += sum(memoryview(piece).nbytes for piece in pieces)

    async def receive(self, timeout_seconds: float | None = None) -> Frame:
        """The next frame.

        LinkClosed at the end of the stream or when it is lost; FrameError when the remote
        sends something that is not a frame, too long or cut short (the stream is then reset);
        LinkTimeout when `timeout_seconds` pass. After a time-out, as after cancellation,
        nothing is lost and the stream can be used on.
        """
        with self._deadline(timeout_seconds, "receiving from"):
            # Frames may lie ready in any number: give others a turn. Who has to wait gives it so.
            if self._frames or self._muxed.readable:
                await trio.lowlevel.checkpoint()
            while not self._frames:
                await self._read()
        frame = self._frames.popleft()
        self._received[0] += 1
        self._received[1] += frame.size_bytes
        return frame

    async def close(self) -> None:
        """Ends the stream behind what was sent. Nothing more can be received."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True), trio.move_on_after(_GOODBYE_SECONDS):
            await self._stream.close()
        self._muxed.stop_reading()

    async def reset(self) -> None:
        """Ends the stream at once; what is under way is dropped."""
        if self._closed:
            return
        self._closed = True
        with trio.CancelScope(shield=True), trio.move_on_after(_GOODBYE_SECONDS):
            await self._stream.reset()

    async def _write(self, pieces: list[Buffer], stall_seconds: float | None) -> None:
        before = self._muxed.written_bytes
        try:
            with stream_errors(f"sending to {self._remote}"):
                for piece in pieces if stall_seconds is None else _slices(pieces):
                    with self._deadline(stall_seconds, "sending to"):
                        await self._muxed.write(piece)
        except BaseException:
            if self._muxed.written_bytes != before:
                await self.reset()
            raise

    async def _read(self) -> None:
        try:
            with stream_errors(f"receiving from {self._remote}"):
                try:
                    data = await self._muxed.read_chunk()
                except MuxedStreamEOF:
                    self._decoder.finish()
                    raise
            self._frames.extend(self._decoder.feed(data))
        except FrameError:
            await self.reset()
            raise

    @contextmanager
    def _deadline(self, timeout_seconds: float | None, doing: str) -> Iterator[None]:
        if self._closed:
            raise LinkClosed(f"{doing} {self._remote}: the stream is closed here")
        if timeout_seconds is None:
            yield
            return
        with trio.move_on_after(timeout_seconds) as scope:
            yield
        if scope.cancelled_caught:
            raise LinkTimeout(f"{doing} {self._remote} took more than {timeout_seconds:g} s")


def _slices(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), STALL_BYTES):
            yield view[start : start + STALL_BYTES]
