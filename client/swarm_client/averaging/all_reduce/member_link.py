"""One stream of a round: frames in order, an outbox that survives the round's failure, and the time
of the last received bytes.

A pump task does the writing, not the task that queues a frame: a cancellation would cut a frame
short, no ABORT frame could follow it, and the other end would learn of a failure without its
reason. The pump therefore outlives the round's work by a short grace period.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import anyio

from swarm_client.averaging.all_reduce.carrier import Channel
from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.frames import (
    HEADER_BYTES,
    MAX_ABORT_BYTES,
    TAG_BYTES,
    Abort,
    FrameKind,
    Header,
    StreamHello,
)
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.types import PeerId

WRITE_BYTES = 256 * 1024
"""Bytes per write. Smaller writes cost py-libp2p a third more CPU."""
READ_BYTES = 256 * 1024
OUTBOX_FRAMES = 4
"""Frames of at most a piece each that wait for the network, per stream."""
READ_ABORT_SECONDS = 0.25
LINGER_SECONDS = 5.0
"""Seconds that the other end has to read the last frame; the round is complete here already."""

HEARTBEATS_PER_SECOND = 100
"""Most heartbeats of a link, with as many in advance: the shortest stall limit takes 40. Each costs
its reader several microseconds and its sender 24 bytes."""

NO_PAYLOAD = range(1)
"""The permitted sizes of a frame without payload."""

_QUEUE_FULL = (anyio.WouldBlock, anyio.BrokenResourceError, anyio.ClosedResourceError)

OutgoingFrame = tuple[bytes, memoryview | bytes]


def abort_frame(spec: RoundSpec, failure: RoundFailed) -> bytes:
    """The ABORT frame that carries the failure of this member."""
    members, culprit = spec.members, failure.culprit
    index = members.index(culprit) if culprit in members else None
    payload = Abort(failure.failure, index, failure.reason).encode()
    header = Header(
        FrameKind.ABORT, spec.my_index, spec.tag[:TAG_BYTES], payload_bytes=len(payload)
    )
    return header.encode() + payload


class MemberLink:
    """A stream to or from `peer`, whose index in the group is `peer_index`."""

    def __init__(
        self,
        channel: Channel,
        peer: PeerId,
        spec: RoundSpec,
        *,
        on_failure: Callable[[RoundFailed], None],
        to_reducer: bool = False,
    ) -> None:
        self.channel = channel
        self.to_reducer = to_reducer
        """Whether the other end sums, and this end takes its sums."""
        self.peer = peer
        self.peer_index = spec.members.index(peer)
        self.bytes_sent = 0
        self.bytes_received = 0
        self.accepted = False
        self.finished = False
        """True once nothing more is due from either end: neither timed nor kept alive."""
        self.sends_heartbeats = True
        self.peer_aborted = False
        """True once the other end has sent an ABORT frame and needs none from us."""
        self.last_received_at = self._opened_at = anyio.current_time()
        self._heartbeats = 0
        self.awaited_since: float | None = None
        """The time since which the round here cannot go on without this member; None while it
        can."""
        self.received_elements = 0.0
        """Elements of pieces or sums that have come, with the part of the one under way."""
        self._awaited_before_seconds = 0.0
        self.pumped = anyio.Event()
        """Set when the pump has nothing left to write, or cannot write."""
        self._keep_open = False
        self._lingers = False
        self._lingering = False
        self._header_bytes = bytearray()
        self._payload_left = 0
        self._spec = spec
        self._on_failure = on_failure
        self._my_index = spec.my_index
        self._short_tag = spec.tag[:TAG_BYTES]
        self._queue, self._queued = anyio.create_memory_object_stream[OutgoingFrame](OUTBOX_FRAMES)

    @property
    def route(self) -> Route:
        """The route of the stream."""
        return self.channel.route

    # ----------------------------------------------------------------------------- waiting

    def begin_wait(self) -> None:
        """Start to count the time in which the round here cannot go on without this member."""
        self.awaited_since = anyio.current_time()

    def end_wait(self) -> None:
        """Add the time since `begin_wait` to the time waited."""
        self._awaited_before_seconds = self.awaited_seconds(anyio.current_time())
        self.awaited_since = None

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Count the time within as time in which the round here cannot go on without this
        member."""
        self.begin_wait()
        try:
            yield
        finally:
            self.end_wait()

    def awaited_seconds(self, now: float) -> float:
        """Return the seconds for which the round here has waited for this member, in all."""
        current = 0.0 if self.awaited_since is None else now - self.awaited_since
        return self._awaited_before_seconds + current

    # --------------------------------------------------------------------------------- sending

    async def send_hello(self, digest: bytes) -> None:
        hello = StreamHello(self._my_index, self._spec.tag, digest).encode()
        await self._put((hello, b""))

    async def send(
        self,
        kind: FrameKind,
        *,
        piece: int = 0,
        exponent: int = 0,
        payload: memoryview | bytes = b"",
    ) -> None:
        """Queue a frame; waits while the outbox is full. The payload must not change afterwards."""
        await self._put((self._header(kind, len(payload), piece, exponent), payload))

    async def _put(self, frame: OutgoingFrame) -> None:
        try:
            await self._queue.send(frame)
        except anyio.BrokenResourceError as error:
            raise self._lost("broke") from error

    def queue_heartbeat(self) -> None:
        """Queue a heartbeat, unless queued frames already prove that this end is alive."""
        if self.accepted and self.sends_heartbeats and not self.finished:
            with contextlib.suppress(*_QUEUE_FULL):
                self._queue.send_nowait((self._header(FrameKind.HEARTBEAT, 0), b""))

    def finish(self, *, closes_last: bool = False) -> None:
        """End sending: the pump closes the stream after the last frame.

        With `closes_last` the other end closes first. p2pd resets a stream when its near end
        closes, and a reset overtakes what the far end has not read yet.
        """
        self._lingers = closes_last
        self._queue.close()

    def abort(self, failure: RoundFailed) -> None:
        """Drop what is queued and send an ABORT frame; the stream stays open."""
        self._keep_open = True
        try:
            while True:
                self._queued.receive_nowait()
        except (anyio.WouldBlock, anyio.EndOfStream, anyio.ClosedResourceError):
            pass
        with contextlib.suppress(*_QUEUE_FULL):
            self._queue.send_nowait((abort_frame(self._spec, failure), b""))
        self._queue.close()

    async def pump(self) -> None:
        """Write what is queued. After `finish` close the stream; after `abort` wait for
        cancellation."""
        clean = False
        try:
            async for header, payload in self._queued:
                await self._write(header)
                view = memoryview(payload)
                for offset in range(0, len(view), WRITE_BYTES):
                    await self._write(view[offset : offset + WRITE_BYTES])
            if self._keep_open:
                self.pumped.set()
                await anyio.sleep_forever()
            if self._lingers:
                await self._linger()
            await self.channel.aclose()
            clean = True
        except (NetworkError, ProtocolError) as error:
            self.pumped.set()
            # The other end may have written its reason before it closed: the reader of this
            # stream finds it, or the end of the stream. Once all is sent only the reader counts.
            await anyio.sleep(READ_ABORT_SECONDS)
            if self.sends_heartbeats and not self.finished:
                self._on_failure(self._lost(f"broke while sending ({error})"))
        finally:
            self._queued.close()
            if not clean:
                with anyio.CancelScope(shield=True):
                    await self.channel.abort()
            self.pumped.set()

    async def _linger(self) -> None:
        """Wait until the other end has read everything and closed."""
        self._lingering = True
        with contextlib.suppress(NetworkError, ProtocolError):
            with anyio.move_on_after(LINGER_SECONDS):
                while await self.channel.receive(HEADER_BYTES):
                    pass

    async def _write(self, data: bytes | memoryview) -> None:
        await self.channel.send(data)
        self.bytes_sent += len(data)

    def _header(self, kind: FrameKind, length: int, piece: int = 0, exponent: int = 0) -> bytes:
        header = Header(kind, self._my_index, self._short_tag, piece, exponent, length)
        return header.encode()

    # ------------------------------------------------------------------------------- receiving

    async def receive(
        self, kind: FrameKind, *, piece: int = 0, sizes: range = NO_PAYLOAD
    ) -> Header:
        """Receive the header of the next frame, which must be the expected one, with a payload of
        one of these sizes.

        The payload, if any, must be read next with `receive_into`. An ABORT frame is raised as the
        failure that it carries.
        """
        while True:
            header = await self._receive_header()
            if header.kind is not FrameKind.HEARTBEAT:
                break
            self._heartbeats += 1
            seconds = self.last_received_at - self._opened_at
            if self._heartbeats > HEARTBEATS_PER_SECOND * (1 + seconds):
                raise self.violated(f"sent {self._heartbeats} heartbeats in {seconds:.0f} s")
        if header.kind is FrameKind.ABORT:
            await self._raise_abort(header)
        if (header.kind, header.piece) != (kind, piece) or header.payload_bytes not in sizes:
            expected_bytes = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
            raise self.violated(
                f"sent {header.kind.name} {header.piece} of {header.payload_bytes} bytes where "
                f"{kind.name} {piece} of {expected_bytes} bytes is due"
            )
        return header

    async def receive_into(self, target: memoryview, elements: int = 0) -> None:
        """Fill `target` with payload bytes, which encode so many elements."""
        filled = 0
        while filled < len(target):
            chunk = await self._receive_some(min(READ_BYTES, len(target) - filled))
            target[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
            self._payload_left -= len(chunk)
            self.received_elements += elements * len(chunk) / len(target)

    async def drain(self) -> None:
        """After a failure, read until the other end reports that it knows, or closes.

        If this end closed earlier, with data unread, the stream would be reset (by p2pd, as by TCP)
        and our reason lost. Continues wherever the cancelled reader has stopped.
        """
        if self._lingering:
            await self.pumped.wait()  # the pump reads it already, and the last frame is sent
            return
        with contextlib.suppress(RoundFailed):
            while True:
                while self._payload_left:
                    chunk = await self._receive_some(min(READ_BYTES, self._payload_left))
                    self._payload_left -= len(chunk)
                if (await self._receive_header()).kind is FrameKind.ABORT:
                    return

    async def _receive_header(self) -> Header:
        # Kept in the link and not on the stack, so that a cancellation loses nothing (see drain).
        while len(self._header_bytes) < HEADER_BYTES:
            self._header_bytes += await self._receive_some(HEADER_BYTES - len(self._header_bytes))
        try:
            header = Header.decode(self._header_bytes)
        except ProtocolError as error:
            raise self.violated(str(error)) from error
        self._header_bytes.clear()
        self._payload_left = header.payload_bytes
        if header.tag != self._short_tag or header.sender != self.peer_index:
            raise self.violated("sent a frame of another round or in another member's name")
        if header.payload_bytes and header.kind in (
            FrameKind.ACCEPT,
            FrameKind.BYE,
            FrameKind.HEARTBEAT,
        ):
            raise self.violated(f"sent a {header.kind.name} frame with a payload")
        return header

    async def _receive_some(self, max_bytes: int) -> bytes | bytearray | memoryview:
        try:
            chunk = await self.channel.receive(max_bytes)
        except NetworkError as error:
            raise self._lost(f"broke ({error})") from error
        except ProtocolError as error:
            raise self.violated(str(error)) from error
        if not chunk:
            raise self._lost("ended in the middle of the round")
        self.last_received_at = anyio.current_time()
        self.bytes_received += len(chunk)
        return chunk

    async def _raise_abort(self, header: Header) -> None:
        if header.payload_bytes > MAX_ABORT_BYTES:
            raise self.violated(f"sent an abort frame of {header.payload_bytes} bytes")
        payload = bytearray(header.payload_bytes)
        await self.receive_into(memoryview(payload))
        members = self._spec.members
        try:
            abort = Abort.decode(payload, len(members))
        except ProtocolError as error:
            raise self.violated(str(error)) from error
        self.peer_aborted = True
        raise RoundFailed(
            abort.reason,
            None if abort.culprit is None else members[abort.culprit],
            failure=abort.failure,
            aborted_by=self.peer,
        )

    # -------------------------------------------------------------------------------- failures

    def violated(self, what: str) -> RoundFailed:
        """Return the failure of a member that breaks the protocol; `what` completes the
        sentence."""
        return self._failed(f"member {self.peer} {what}", RoundFailure.PROTOCOL)

    def stalled(self, seconds: float) -> RoundFailed:
        """Return the failure of a member that has been silent for so many seconds."""
        reason = f"member {self.peer} sent nothing for {seconds:g} s"
        return self._failed(reason, RoundFailure.STALLED)

    def too_slow(self, seconds: float) -> RoundFailed:
        """Return the failure of a member for which the round has waited for so many seconds."""
        reason = f"member {self.peer} let the round wait for {seconds:.0f} s"
        return self._failed(reason, RoundFailure.STALLED)

    def _lost(self, what: str) -> RoundFailed:
        # p2pd is a separate program that can die while its member lives. The host's connections
        # belong to the member's own process.
        failure = RoundFailure.CARRIER if self.route.over_p2pd else RoundFailure.LOST
        return self._failed(f"the stream with member {self.peer} {what}", failure)

    def _failed(self, reason: str, failure: RoundFailure) -> RoundFailed:
        return RoundFailed(reason, self.peer, failure=failure, route=self.route)
