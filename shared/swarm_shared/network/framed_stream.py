"""A stream of frames between two authenticated peers, and the bytes of frames on each link."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self
from weakref import WeakValueDictionary

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from swarm_shared.base.errors import FrameError, LinkClosed, LinkTimeout
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.errors import stream_errors
from swarm_shared.network.libp2p.yamux import YamuxConnection, YamuxStream
from swarm_shared.network.nat.identify import remote_multiaddr
from swarm_shared.protocol import LinkBytes
from swarm_shared.protocol.framing import Buffer, Frame, FrameDecoder, FrameLimits, encode_frame

STALL_BYTES = 1024 * 1024
"""Bytes of progress that `stall_seconds` refers to."""

MAX_LINKS = 25_000
"""Links whose bytes are remembered. Of further ones, and of remotes that are not members, they are
counted while a stream is open: a remote can make any number of IDs."""


@dataclass(slots=True, eq=False, weakref_slot=True)
class LinkTraffic:
    """Bytes over one link since the node was opened."""

    sent: int = 0
    received: int = 0


class TrafficCounter:
    """The counters of all links of a node. `knows`: which remotes are members."""

    def __init__(self, knows: Callable[[PeerId], bool]) -> None:
        self._knows = knows
        self._links: dict[tuple[PeerId, str], LinkTraffic] = {}
        self._passing: WeakValueDictionary[tuple[PeerId, str], LinkTraffic] = WeakValueDictionary()
        """Counters of remotes that are not members, each for as long as a stream uses it."""

    def link(self, remote: PeerId, protocol: str, *, lasts: bool = True) -> LinkTraffic:
        """Return the counter of one link, which the caller keeps and adds to in place. `lasts`:
        whether it is remembered after that; if the remote becomes a member, it is in any case."""
        key = (remote, protocol)
        link = self._links.get(key) or self._passing.get(key)
        if link is None:
            link = LinkTraffic()
            if lasts and len(self._links) < MAX_LINKS:
                self._links[key] = link
            else:
                self._passing[key] = link
        return link

    def link_bytes(self) -> tuple[LinkBytes, ...]:
        """Return the bytes of framed streams per remote and protocol since the node was opened, in
        the form in which peers report them."""
        self._remember_members()
        return tuple(
            LinkBytes(remote=remote, protocol=protocol, sent=link.sent, received=link.received)
            for (remote, protocol), link in (*self._links.items(), *self._passing.items())
            if link.sent or link.received
        )

    def _remember_members(self) -> None:
        """Remember the links of remotes that have become members; where there are many, forget
        those of remotes that are members no more."""
        if len(self._links) > MAX_LINKS // 2:
            for key in [key for key in self._links if not self._knows(key[0])]:
                self._passing[key] = self._links.pop(key)
        for key, link in list(self._passing.items()):
            if len(self._links) < MAX_LINKS and self._knows(key[0]):
                self._links[key] = link
                del self._passing[key]


class AssemblyBudget:
    """Bounds the memory of frames that have not arrived whole, over many streams.

    Beyond it the frame is given up that began longest ago: of a remote that sends, a frame arrives
    in seconds, and one that is never ended becomes the oldest.
    """

    def __init__(self) -> None:
        self._held: dict[FrameDecoder, int] = {}
        """Bytes of each begun frame, the one that began first in front."""
        self._total = 0

    def hold(self, decoder: FrameDecoder, most_bytes: int) -> None:
        """Record what a decoder holds now, of `most_bytes` for all of them."""
        held = decoder.held_bytes
        self._total += held - self._held.get(decoder, 0)
        self._held[decoder] = held
        if not held:
            self.forget(decoder)
        while self._total > most_bytes and self._held:
            oldest = next(iter(self._held))
            self.forget(oldest)
            oldest.give_up("the frame took too long, and its memory was needed for others")

    def forget(self, decoder: FrameDecoder) -> None:
        """Its stream is over, or has no frame begun."""
        self._total -= self._held.pop(decoder, 0)


class FramedStream:
    """A stream on which one task may receive while several send, a frame at a time.

    An idle owner must keep receiving: frames that are not received hold back the remote's sending
    (on this stream only).
    """

    def __init__(
        self,
        stream: YamuxStream,
        protocol: str,
        limits: FrameLimits,
        traffic: LinkTraffic,
        is_superseded: Callable[[YamuxConnection], bool] = lambda connection: False,
    ) -> None:
        self._stream = stream
        self.protocol = protocol
        self._is_superseded = is_superseded
        self.remote = stream.connection.remote
        """The remote's peer ID, proved by the connection's Noise handshake."""
        self._decoder = FrameDecoder(limits)
        self._frames: deque[Frame] = deque()
        self._send_lock = trio.Lock()
        self._closed = False
        self._traffic = traffic
        self._budget: tuple[AssemblyBudget, int] | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the stream, or reset it when the block raised."""
        if kind is None:
            await self.close()
        else:
            await self.reset()

    def __repr__(self) -> str:
        return f"FramedStream({self.protocol} with {self.remote})"

    @property
    def remote_address(self) -> str | None:
        """The address the remote's packets come from, as a multiaddr; None behind a relay."""
        return remote_multiaddr(self._stream.connection.get_remote_address())

    @property
    def superseded(self) -> bool:
        """Whether there is a better connection to the remote by now, which a new stream would
        use."""
        return self._is_superseded(self._stream.connection)

    def expect(self, limits: FrameLimits) -> None:
        """Set the limits from the next frame on; they grow once the remote has authenticated."""
        self._decoder.expect(limits)

    def assemble_within(self, budget: AssemblyBudget, most_bytes: int) -> None:
        """Give up the oldest frame that is not whole where all with this budget hold more than
        `most_bytes`."""
        self._budget = budget, most_bytes

    async def send(
        self,
        header: bytes,
        payload: Buffer | Sequence[Buffer] = b"",
        timeout_seconds: float | None = None,
        *,
        stall_seconds: float | None = None,
    ) -> None:
        """Send a frame; waits while the remote does not take more.

        The payload must not change before this returns. LinkClosed when the stream is lost,
        LinkTimeout after `timeout_seconds`, or after `stall_seconds` in which the remote takes less
        than STALL_BYTES. A frame that a time-out or a cancellation cuts in the middle ends the
        stream: the remote could not find the next frame's start.
        """
        pieces = encode_frame(header, payload)
        with self._deadline(timeout_seconds, "sending to"):
            async with self._send_lock:
                await self._write(pieces, stall_seconds)
        self._traffic.sent += sum(memoryview(piece).nbytes for piece in pieces)

    async def receive(self, timeout_seconds: float | None = None) -> Frame:
        """Return the next frame.

        LinkClosed at the end of the stream or when it is lost; FrameError when the remote sends
        something that is not a frame, too long or cut short (the stream is then reset); LinkTimeout
        after `timeout_seconds`. After a time-out, as after cancellation, nothing is lost and the
        stream stays usable.
        """
        with self._deadline(timeout_seconds, "receiving from"):
            # Any number of frames may be ready: let other tasks run. Waiting does so by itself.
            if self._frames or self._stream.readable:
                await trio.lowlevel.checkpoint()
            while not self._frames:
                await self._read()
        frame = self._frames.popleft()
        self._traffic.received += frame.size_bytes
        return frame

    async def close(self) -> None:
        """End the stream after everything that was sent. Nothing more can be received."""
        if self._closed:
            return
        self._end()
        await self._stream.hang_up()

    async def reset(self) -> None:
        """End the stream at once; whatever is in flight is dropped."""
        if self._closed:
            return
        self._end()
        await self._stream.reset()

    def _end(self) -> None:
        self._closed = True
        if self._budget is not None:
            self._budget[0].forget(self._decoder)

    async def _write(self, pieces: list[Buffer], stall_seconds: float | None) -> None:
        before = self._stream.written_bytes
        try:
            with stream_errors(f"sending to {self.remote}"):
                for piece in pieces if stall_seconds is None else _slices(pieces):
                    with self._deadline(stall_seconds, "sending to"):
                        await self._stream.write(piece)
        except BaseException:
            if self._stream.written_bytes != before:
                await self.reset()
            raise

    async def _read(self) -> None:
        try:
            with stream_errors(f"receiving from {self.remote}"):
                try:
                    data = await self._stream.read_chunk()
                except MuxedStreamEOF:
                    self._decoder.finish()
                    raise
            frames = self._decoder.feed(data)
            self._frames.extend(frames)
            if self._budget is not None and not self._closed:
                budget, most_bytes = self._budget
                if frames:
                    budget.forget(self._decoder)  # what it holds now began just now
                budget.hold(self._decoder, most_bytes)
        except FrameError:
            await self.reset()
            raise

    @contextmanager
    def _deadline(self, timeout_seconds: float | None, doing: str) -> Iterator[None]:
        if self._closed:
            raise LinkClosed(f"{doing} {self.remote}: the stream is closed here")
        if timeout_seconds is None:
            yield
            return
        with trio.move_on_after(timeout_seconds) as scope:
            yield
        if scope.cancelled_caught:
            raise LinkTimeout(f"{doing} {self.remote} took more than {timeout_seconds:g} s")


def _slices(pieces: Sequence[Buffer]) -> Iterator[Buffer]:
    for piece in pieces:
        view = memoryview(piece).cast("B")
        for start in range(0, len(view), STALL_BYTES):
            yield view[start : start + STALL_BYTES]
