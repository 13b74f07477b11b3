"""Yamux for py-libp2p's host: many streams over one encrypted connection.

The protocol is yamux 1.0.0 (github.com/hashicorp/yamux/blob/master/spec.md), the same that
py-libp2p and go-libp2p speak; the host, Noise and the transport stay py-libp2p's. Only its
muxer is replaced, because py-libp2p 0.8.1's

- can dead-lock: its reader waits for the write lock to answer pings, opened streams and
  resets, so two ends that both fill their socket wait for each other for ever;
- keeps whatever a remote sends: a receive window that is overrun is logged, not enforced;
- breaks the whole connection when a task is cancelled in the middle of a write;
- polls for send window every 10 ms and splits each frame over two Noise messages.

Rules here: the reader never waits for the writer; one task writes, fed by a bounded queue,
so a cancelled caller never cuts a frame; what a remote may make us hold is bounded by the
windows we granted; a connection that is silent for long is closed.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from noise.exceptions import NoiseInvalidMessage

from swarm_shared.network.noise_channel import MAX_PLAINTEXT_BYTES, NoiseChannel

logger = logging.getLogger(__name__)

_HEADER = struct.Struct(">BBHII")
_HEADER_BYTES = _HEADER.size
_DATA, _WINDOW_UPDATE, _PING, _GO_AWAY = 0, 1, 2, 3
_SYN, _ACK, _FIN, _RST = 1, 2, 4, 8
_NORMAL_TERMINATION, _PROTOCOL_ERROR = 0, 1

INITIAL_WINDOW_BYTES = 256 * 1024
"""What the protocol grants on every stream before anything is said."""
MAX_WINDOW_BYTES = 16 * 1024 * 1024
"""Largest window granted, as in go-yamux: 100 ms of 160 MB/s."""
FIRST_WINDOW_BYTES = 1024 * 1024
"""Granted when a stream opens, so that a first frame of ordinary size need not wait for a
window to grow, which takes a round trip for each doubling."""
EXTRA_WINDOW_BUDGET_BYTES = 64 * 1024 * 1024
"""Window beyond the initial one that a connection grants over all its streams."""
MIN_RTT_SECONDS = 0.02
"""Windows grow as if the link were at least so long: an idle loopback measures 1 ms, which
says nothing about the time a busy event loop takes to answer."""

MAX_FRAME_PAYLOAD_BYTES = MAX_PLAINTEXT_BYTES - _HEADER_BYTES
"""A frame that just fits one Noise message is encrypted and sent in one piece."""
MESSAGES_PER_WRITE = 4
SEND_QUEUE_BYTES = MESSAGES_PER_WRITE * MAX_PLAINTEXT_BYTES
"""Queued ahead of the socket: enough to keep it busy, little enough to keep pings quick."""
MAX_QUEUED_CONTROL_FRAMES = 4096
"""Answers owed to a remote that sends requests and does not read."""
MAX_REMOTE_STREAMS = 1024
ACCEPT_BACKLOG = 256
KEEPALIVE_SECONDS = 5.0
SILENCE_SECONDS = 20.0
"""No byte for so long, with pings unanswered: the remote machine is gone (power, cable, NAT
entry). Shorter would drop peers whose process is starved by its own computing."""
FLUSH_SECONDS = 1.0
"""How long closing waits for what is queued."""

# What a connection that ends may raise here: nothing to report.
_CONNECTION_ENDED = (
    IOException,
    RawConnError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    NoiseInvalidMessage,
)


class YamuxViolation(MuxedStreamError):  # type: ignore[misc]
    """The remote broke the protocol's rules."""


class YamuxStream(IMuxedStream):  # type: ignore[misc]
    """One stream. Reads and writes may run at once; each of them in one task at a time."""

    def __init__(self, connection: YamuxConnection, stream_id: int) -> None:
        self.muxed_conn = connection
        self.connection = connection
        self.stream_id = stream_id
        self._chunks: deque[memoryview] = deque()
        self._readable = trio.Event()
        self._writable = trio.Event()
        self._send_window = INITIAL_WINDOW_BYTES
        self._receive_window = INITIAL_WINDOW_BYTES
        self._window_size = INITIAL_WINDOW_BYTES
        self._unacknowledged = 0
        self._last_update_seconds = trio.current_time()
        self._fin_sent = False
        self._fin_received = False
        self._error: MuxedStreamError | None = None
        self.written_bytes = 0

    def grant_first_window(self) -> int:
        """What to grant beyond the initial window when the stream opens."""
        growth = self.connection.take_window_budget(FIRST_WINDOW_BYTES - INITIAL_WINDOW_BYTES)
        self._window_size += growth
        self._receive_window += growth
        return growth

    async def read(self, n: int | None = None) -> bytes:
        """At least one and at most `n` bytes. Cancelling it loses nothing.

        MuxedStreamEOF at the end, MuxedStreamReset when the stream is lost; both only after
        everything that had arrived.
        """
        await trio.lowlevel.checkpoint()
        chunk = await self.read_chunk()
        if n is not None and 0 <= n < len(chunk):
            self._chunks.appendleft(chunk[n:])
            self._unacknowledged -= len(chunk) - n
            chunk = chunk[:n]
        return bytes(chunk)

    async def read_chunk(self) -> memoryview:
        """As `read`, without a copy. Does not yield to other tasks when there is something."""
        while not self._chunks:
            if self._fin_received:
                raise MuxedStreamEOF("the remote ended the stream")
            if self._error is not None:
                raise self._error
            await self._readable.wait()
        chunk = self._chunks.popleft()
        self._grant(len(chunk))
        return chunk

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Returns when everything is queued for sending. Cancelling it may leave a part sent."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            await self._wait_until_writable()
            size = min(len(view) - position, self._send_window, MAX_FRAME_PAYLOAD_BYTES)
            self._send_window -= size
            head = _HEADER.pack(0, _DATA, 0, self.stream_id, size)
            self.connection.queue(head + view[position : position + size])
            position += size
            self.written_bytes += size

    async def close(self) -> None:
        """Ends the writing side; what the remote still sends can be read."""
        await trio.lowlevel.checkpoint()
        if self._fin_sent or self._error is not None:
            return
        self._fin_sent = True
        self.connection.queue_control(_WINDOW_UPDATE, _FIN, self.stream_id, 0)
        self._writable.set()
        if self._fin_received:
            self.connection.forget(self)

    def stop_reading(self) -> None:
        """Drops what has arrived; the remote is told by a reset if it sends more."""
        if self._error is None:
            self._error = MuxedStreamClosed("the stream is closed here")
        self._chunks.clear()
        self._readable.set()
        self.connection.forget(self)

    async def reset(self) -> None:
        """Ends both directions at once; what is queued or unread is dropped."""
        await trio.lowlevel.checkpoint()
        if self._error is None:
            self.connection.queue_control(_WINDOW_UPDATE, _RST, self.stream_id, 0)
        self._chunks.clear()
        self.lose(MuxedStreamReset("the stream was reset here"))
        self.connection.forget(self)

    def lose(self, error: MuxedStreamError) -> None:
        """Ends the stream with an error that readers and writers will see."""
        if self._error is None:
            self._error = error
        self._readable.set()
        self._writable.set()

    def receive(self, data: memoryview) -> None:
        """Data from the remote. YamuxViolation when it exceeds what was granted."""
        if len(data) > self._receive_window or self._fin_received:
            raise YamuxViolation(f"stream {self.stream_id} got more than was granted")
        self._receive_window -= len(data)
        self._chunks.append(data)
        self._wake_reader()

    def receive_end(self) -> None:
        self._fin_received = True
        self._wake_reader()
        if self._fin_sent:
            self.connection.forget(self)

    def receive_credit(self, size: int) -> None:
        # The largest window is 16 MiB here and 2^32 in the protocol; more is nonsense, and
        # keeping the sum small keeps it an ordinary integer.
        self._send_window = min(self._send_window + size, 2**32)
        self._wake_writer()

    @property
    def extra_window_bytes(self) -> int:
        return self._window_size - INITIAL_WINDOW_BYTES

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("use trio's cancel scopes")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.connection.get_remote_address()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
    ) -> None:
        await self.close()

    def _wake_reader(self) -> None:
        self._readable.set()
        self._readable = trio.Event()

    def _wake_writer(self) -> None:
        self._writable.set()
        self._writable = trio.Event()

    async def _wait_until_writable(self) -> None:
        while True:
            if self._error is not None:
                raise self._error
            if self._fin_sent:
                raise MuxedStreamClosed("the stream is closed for writing")
            if self._send_window <= 0:
                await self._writable.wait()
            elif not await self.connection.wait_for_room():
                return

    def _grant(self, size: int) -> None:
        """Gives the remote credit for what was read, in steps of half a window.

        Reading half a window in less than four round trips means that the window, not the
        reader, is what limits the stream: it doubles (go-yamux does the same).
        """
        self._unacknowledged += size
        if self._error is not None or self._fin_received:
            return
        if self._unacknowledged < self._window_size // 2:
            return
        now = trio.current_time()
        credit = self._unacknowledged
        if now - self._last_update_seconds < 4 * self.connection.rtt_seconds:
            growth = min(self._window_size, MAX_WINDOW_BYTES - self._window_size)
            growth = self.connection.take_window_budget(growth)
            self._window_size += growth
            credit += growth
        self._last_update_seconds = now
        self._unacknowledged = 0
        self._receive_window += credit
        self.connection.queue_control(_WINDOW_UPDATE, 0, self.stream_id, credit)


class YamuxConnection(IMuxedConn):  # type: ignore[misc]
    """The muxer's end of one connection. `start` runs it until it is closed or lost."""

    def __init__(
        self, secured_conn: ISecureConn, peer_id: ID, is_initiator: bool | None = None
    ) -> None:
        self.secured_conn = secured_conn
        self._channel = NoiseChannel(secured_conn)
        self.peer_id = peer_id
        self.on_close: Callable[[], Awaitable[Any]] | None = None
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self._is_initiator = secured_conn.is_initiator if is_initiator is None else is_initiator
        self._next_stream_id = 1 if self._is_initiator else 2
        self._streams: dict[int, YamuxStream] = {}
        self._remote_streams = 0
        self._accept_send, self._accept_receive = trio.open_memory_channel[YamuxStream](
            ACCEPT_BACKLOG
        )
        self._queue: deque[bytes] = deque()
        self._queued_bytes = 0
        self._queued_control_frames = 0
        self._queue_filled = trio.Event()
        self._flushed = trio.Event()
        self._room = trio.lowlevel.ParkingLot()
        self._closing = False
        self._scope = trio.CancelScope()
        self._window_budget = EXTRA_WINDOW_BUDGET_BYTES
        self._receiving: YamuxStream | None = None
        self._receiving_flags = 0
        self._missing_bytes = 0
        self._last_heard_seconds = trio.current_time()
        self._ping_sent_seconds: float | None = None
        self.rtt_seconds = MIN_RTT_SECONDS

    # What py-libp2p's swarm asks of a muxer.

    @property
    def is_initiator(self) -> bool:
        return self._is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._closing

    @property
    def is_closed(self) -> bool:
        return self.event_closed.is_set()

    async def start(self) -> None:
        """Runs the connection. Never raises but for cancellation: one bad remote must not
        take down the host that runs all connections."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._run, self._send_loop)
                    nursery.start_soon(self._run, self._receive_loop)
                    nursery.start_soon(self._run, self._keepalive_loop)
                    self.event_started.set()
        finally:
            self.event_started.set()
            await self._shut_down()

    async def close(self, error_code: int = _NORMAL_TERMINATION) -> None:
        """Sends what is queued, says good-bye and ends the connection, within a second."""
        if not self.event_started.is_set():
            await self._shut_down()
            return
        if not self._closing:
            self.queue_control(_GO_AWAY, 0, 0, error_code)
            self._closing = True
            with trio.move_on_after(FLUSH_SECONDS):
                await self._flushed.wait()
            self._scope.cancel()
        with trio.move_on_after(FLUSH_SECONDS):
            await self.event_closed.wait()

    async def open_stream(self) -> IMuxedStream:
        await trio.lowlevel.checkpoint()
        if self._closing:
            raise MuxedConnUnavailable("the connection is closed")
        stream = YamuxStream(self, self._next_stream_id)
        self._next_stream_id += 2
        self._streams[stream.stream_id] = stream
        self.queue_control(_WINDOW_UPDATE, _SYN, stream.stream_id, stream.grant_first_window())
        return stream

    async def accept_stream(self) -> IMuxedStream:
        try:
            return await self._accept_receive.receive()
        except trio.EndOfChannel as error:
            raise MuxedConnUnavailable("the connection is closed") from error

    def get_transport_addresses(self) -> Any:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> Any:
        return self.secured_conn.get_connection_type()

    def get_remote_address(self) -> tuple[str, int] | None:
        address: tuple[str, int] | None = self.secured_conn.get_remote_address()
        return address

    # What streams ask of their connection. None of these waits for the network.

    def queue(self, frame: bytes) -> None:
        """Puts a frame behind those that wait to be sent."""
        self._queue.append(frame)
        self._queued_bytes += len(frame)
        self._queue_filled.set()

    def queue_control(self, kind: int, flags: int, stream_id: int, value: int) -> None:
        if self._closing:
            return
        self._queued_control_frames += 1
        if self._queued_control_frames > MAX_QUEUED_CONTROL_FRAMES:
            logger.debug("%s asks for answers that it does not read", self.peer_id)
            self._scope.cancel()
            return
        self.queue(_HEADER.pack(0, kind, flags, stream_id, value))

    async def wait_for_room(self) -> bool:
        """Waits, in turn with other writers, while the queue is full. True if it waited."""
        if self._queued_bytes < SEND_QUEUE_BYTES:
            return False
        await self._room.park()
        return True

    def forget(self, stream: YamuxStream) -> None:
        """Takes a finished stream off the table."""
        if self._streams.pop(stream.stream_id, None) is None:
            return
        self._window_budget += stream.extra_window_bytes
        if self._is_remotes(stream.stream_id):
            self._remote_streams -= 1

    def take_window_budget(self, size: int) -> int:
        granted = min(size, self._window_budget)
        self._window_budget -= granted
        return granted

    # The three tasks of a running connection. When one ends, the connection ends.

    async def _run(self, loop: Callable[[], Awaitable[None]]) -> None:
        try:
            await loop()
        except _CONNECTION_ENDED as error:
            logger.debug("the connection to %s ended: %r", self.peer_id, error)
        except YamuxViolation as error:
            logger.warning("the connection to %s is closed: %s", self.peer_id, error)
        except Exception:  # a supervisor: one connection's trouble stays its own
            logger.exception("the connection to %s failed", self.peer_id)
        self._scope.cancel()

    async def _send_loop(self) -> None:
        while True:
            while self._queue:
                messages = [self._next_message()]
                while self._queue and len(messages) < MESSAGES_PER_WRITE:
                    messages.append(self._next_message())
                await self._channel.write(messages)
            self._queue_filled = trio.Event()
            if self._closing:
                self._flushed.set()
            # Whoever was woken before may have gone away instead of writing.
            self._room.unpark_all()
            await self._queue_filled.wait()

    def _next_message(self) -> bytes:
        """As many whole frames as one Noise message holds; makes room for waiting writers."""
        size = 0
        frames: list[bytes] = []
        while self._queue and (not frames or size + len(self._queue[0]) <= MAX_PLAINTEXT_BYTES):
            frame = self._queue.popleft()
            size += len(frame)
            frames.append(frame)
            if len(frame) == _HEADER_BYTES:
                self._queued_control_frames -= 1
        self._queued_bytes -= size
        if self._queued_bytes < SEND_QUEUE_BYTES:
            self._room.unpark(count=len(frames))
        return frames[0] if len(frames) == 1 else b"".join(frames)

    async def _receive_loop(self) -> None:
        head = bytearray()
        while not self._closing:
            message = memoryview(await self._channel.read())
            self._last_heard_seconds = trio.current_time()
            position = 0
            while position < len(message):
                if self._missing_bytes:
                    data = message[position : position + self._missing_bytes]
                    self._receive_data(data, pins=len(message))
                    position += len(data)
                    continue
                part = message[position : position + _HEADER_BYTES - len(head)]
                position += len(part)
                head += part
                if len(head) == _HEADER_BYTES:
                    self._receive_header(bytes(head))
                    head.clear()

    def _receive_header(self, header: bytes) -> None:
        version, kind, flags, stream_id, value = _HEADER.unpack(header)
        if version != 0 or kind > _GO_AWAY:
            raise YamuxViolation(f"a frame of version {version} and type {kind}")
        if kind == _PING:
            self._receive_ping(flags, value)
        elif kind == _GO_AWAY:
            self._closing = True
            self._scope.cancel()
        else:
            stream = self._stream_of_frame(flags, stream_id)
            if kind == _WINDOW_UPDATE:
                if stream is not None and value:
                    stream.receive_credit(value)
                self._receive_flags(stream, flags)
                return
            if stream is None and not flags & (_RST | _SYN):
                self.queue_control(_WINDOW_UPDATE, _RST, stream_id, 0)
            self._receiving, self._receiving_flags, self._missing_bytes = stream, flags, value
            if not value:
                self._receive_flags(stream, flags)

    def _receive_data(self, data: memoryview, pins: int) -> None:
        """A piece of the frame under way, out of a message of `pins` bytes."""
        self._missing_bytes -= len(data)
        stream = self._receiving
        if stream is not None and stream.stream_id in self._streams:
            # A view keeps the whole message in memory: only worth it for most of a message,
            # else a remote could make a byte of window hold a message.
            stream.receive(data if 2 * len(data) > pins else memoryview(bytes(data)))
        if not self._missing_bytes:
            self._receiving = None
            self._receive_flags(stream, self._receiving_flags)

    def _receive_flags(self, stream: YamuxStream | None, flags: int) -> None:
        if stream is None:
            return
        if flags & _RST:
            stream.lose(MuxedStreamReset("the remote reset the stream"))
            self.forget(stream)
        elif flags & _FIN:
            stream.receive_end()

    def _receive_ping(self, flags: int, value: int) -> None:
        if flags & _SYN:
            self.queue_control(_PING, _ACK, 0, value)
        elif self._ping_sent_seconds is not None:
            measured = trio.current_time() - self._ping_sent_seconds
            self.rtt_seconds = max(MIN_RTT_SECONDS, measured)
            self._ping_sent_seconds = None

    def _stream_of_frame(self, flags: int, stream_id: int) -> YamuxStream | None:
        """The stream a frame is for; a new one for SYN. None: closed here, or refused."""
        if not flags & _SYN:
            return self._streams.get(stream_id)
        if stream_id == 0 or not self._is_remotes(stream_id) or stream_id in self._streams:
            raise YamuxViolation(f"stream {stream_id} cannot be opened")
        stream = YamuxStream(self, stream_id)
        try:
            if self._remote_streams >= MAX_REMOTE_STREAMS:
                raise trio.WouldBlock
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:
            self.queue_control(_WINDOW_UPDATE, _RST, stream_id, 0)
            return None
        self._streams[stream_id] = stream
        self._remote_streams += 1
        self.queue_control(_WINDOW_UPDATE, _ACK, stream_id, stream.grant_first_window())
        return stream

    def _is_remotes(self, stream_id: int) -> bool:
        """The initiator's streams are odd, the responder's even."""
        return (stream_id % 2 == 1) != self._is_initiator

    async def _keepalive_loop(self) -> None:
        self._ping()
        while True:
            await trio.sleep(KEEPALIVE_SECONDS)
            silent_seconds = trio.current_time() - self._last_heard_seconds
            if silent_seconds > SILENCE_SECONDS:
                logger.debug("%s has been silent for %.0f s", self.peer_id, silent_seconds)
                return
            # Connections in use need no pings: a coordinator with thousands saves them.
            if silent_seconds >= KEEPALIVE_SECONDS:
                self._ping()

    def _ping(self) -> None:
        self._ping_sent_seconds = trio.current_time()
        self.queue_control(_PING, _SYN, 0, 0)

    async def _shut_down(self) -> None:
        if self.event_closed.is_set():
            return
        self._closing = True
        self.event_closed.set()
        self._flushed.set()
        for stream in list(self._streams.values()):
            stream.lose(MuxedStreamReset("the connection is gone"))
        self._streams.clear()
        self._room.unpark_all()
        self._accept_send.close()
        with trio.CancelScope(shield=True), trio.move_on_after(FLUSH_SECONDS):
            try:
                await self._channel.close()
            except _CONNECTION_ENDED as error:
                logger.debug("closing the connection to %s: %r", self.peer_id, error)
        if self.on_close is not None:
            await self.on_close()
