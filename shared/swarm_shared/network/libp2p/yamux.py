"""Yamux for py-libp2p's host: many streams over one encrypted connection.

The protocol is yamux 1.0.0 (github.com/hashicorp/yamux/blob/master/spec.md), as in py-libp2p and
go-libp2p; the host, Noise and the transport stay py-libp2p's. Only its muxer is replaced, because
py-libp2p 0.8.1's

- dead-locks: its reader waits for the write lock to answer pings, opened streams and resets,
  so two ends that both fill their socket wait for each other (24 streams with 8 MB each way stop
  within the first megabyte);
- keeps whatever a remote sends: a receive window that is overrun is logged, not enforced;
- breaks the whole connection when a task is cancelled in the middle of a write;
- polls for send window every 10 ms and splits each frame over two Noise messages.

Rules here: the reader never waits for the writer; one task writes, fed by a bounded queue, so a
cancelled caller never cuts a frame; the memory a remote can take is bounded by the granted windows;
a connection that is silent for long is closed.
"""

from __future__ import annotations

import logging
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

from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.noise_channel import NoiseChannel, local_end_of, relay_of
from swarm_shared.network.libp2p.send_queue import SendQueue
from swarm_shared.network.libp2p.yamux_frames import (
    FIN,
    HEADER,
    HEADER_BYTES,
    MAX_FRAME_PAYLOAD_BYTES,
    RST,
    SYN,
    Flag,
    FrameType,
    YamuxViolation,
    data_header,
)

logger = logging.getLogger(__name__)

_NORMAL_TERMINATION = 0

INITIAL_WINDOW_BYTES = 256 * 1024
"""Window that the protocol grants on every new stream."""
MAX_WINDOW_BYTES = 16 * 1024 * 1024
"""Largest window granted, as in go-yamux: 100 ms of 160 MB/s."""
FIRST_WINDOW_BYTES = 1024 * 1024
"""Window granted when a stream opens, so that a first frame of ordinary size need not wait for the
window to grow, which takes a round trip for each doubling."""
EXTRA_WINDOW_BUDGET_BYTES = 64 * 1024 * 1024
"""Window beyond the initial one that a connection grants over all its streams."""
MIN_RTT_SECONDS = 0.02
"""Lower bound of the round trip by which windows grow: an idle loopback measures 1 ms, which does
not include the time a busy event loop takes to answer."""
SMALLEST_VIEW_BYTES = 4096
"""Shortest piece that is kept as a view of its message, which costs some hundred bytes beside the
message. Shorter pieces are joined, so that bytes that arrive one by one take no more memory than
their window."""
JOINED_BYTES = 64 * 1024
"""Length up to which pieces are joined: what has been read is freed in parts of this size."""
MAX_REMOTE_STREAMS = 1024
ACCEPT_BACKLOG = 256
MESSAGES_PER_TURN = 16
"""Messages handled before other tasks run: a remote may send thousands of tiny ones."""
COST_OF_MESSAGE, COST_OF_FRAME, COST_OF_STREAM = 1024, 256, 8192
"""Processor time of a message, a frame and a new stream, expressed in bytes, where reading is
rationed."""
KEEPALIVE_SECONDS = 5.0
SILENCE_SECONDS = 20.0
"""Time without a byte, with pings unanswered, after which the remote machine counts as lost (power,
cable, NAT entry). Shorter would drop peers whose process is starved by its own computing."""
FLUSH_SECONDS = 1.0
"""Longest wait of closing for what is queued."""

# Exceptions of a connection that ends; not worth a report.
_CONNECTION_ENDED = (
    IOException,
    RawConnError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    NoiseInvalidMessage,
)


class YamuxStream(IMuxedStream):  # type: ignore[misc]
    """One stream. Reads and writes may run at once; each of them in one task at a time."""

    def __init__(self, connection: YamuxConnection, stream_id: int) -> None:
        self.muxed_conn = connection
        self.connection = connection
        self.stream_id = stream_id
        self._chunks: deque[memoryview | bytearray] = deque()
        """Data that has not been read: views of messages, and buffers of joined pieces."""
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
        """Return what to grant beyond the initial window when the stream opens."""
        growth = self.connection.take_window_budget(FIRST_WINDOW_BYTES - INITIAL_WINDOW_BYTES)
        self._window_size += growth
        self._receive_window += growth
        return growth

    def extend_window(self) -> None:
        """Grant the first window to a stream that the remote opened, once the remote is known."""
        growth = self.grant_first_window()
        if growth and self._error is None:
            self.connection.queue_control(
                FrameType.WINDOW_UPDATE, Flag.NONE, self.stream_id, growth
            )

    async def read(self, n: int | None = None) -> bytes:
        """Return at least one and at most `n` bytes. Cancelling it loses nothing.

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

    @property
    def readable(self) -> bool:
        """Whether `read_chunk` returns or raises without waiting."""
        return bool(self._chunks) or self._fin_received or self._error is not None

    async def read_chunk(self) -> memoryview:
        """Read without a copy. Does not yield to other tasks when data is ready."""
        while not self._chunks:
            if self._fin_received:
                raise MuxedStreamEOF("the remote ended the stream")
            if self._error is not None:
                raise self._error
            await self._readable.wait()
        chunk = self._chunks.popleft()
        self._grant(len(chunk))
        return memoryview(chunk)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Return when everything is queued for sending. Cancelling it may leave a part sent."""
        await trio.lowlevel.checkpoint()
        view = memoryview(data).cast("B")
        position = 0
        while position < len(view):
            await self._wait_until_writable()
            size = min(len(view) - position, self._send_window, MAX_FRAME_PAYLOAD_BYTES)
            self._send_window -= size
            head = data_header(self.stream_id, size)
            self.connection.queue.put(head + view[position : position + size])
            position += size
            self.written_bytes += size

    async def close(self) -> None:
        """End the writing side; what the remote still sends can be read.

        Like `reset`, it waits for nothing and is done even where its task is cancelled.
        """
        await trio.lowlevel.cancel_shielded_checkpoint()
        if self._fin_sent or self._error is not None:
            return
        self._fin_sent = True
        self.connection.queue_control(FrameType.WINDOW_UPDATE, Flag.FIN, self.stream_id, 0)
        self._writable.set()
        if self._fin_received:
            self.connection.forget(self)

    def stop_reading(self) -> None:
        """Drop what has arrived; a reset informs the remote if it sends more."""
        if self._error is None:
            self._error = MuxedStreamClosed("the stream is closed here")
        self._chunks.clear()
        self._readable.set()
        self.connection.forget(self)

    async def hang_up(self) -> None:
        """End the stream after everything that was written; what has arrived is dropped."""
        await self.close()
        self.stop_reading()

    async def reset(self) -> None:
        """End both directions at once; queued and unread data is dropped."""
        await trio.lowlevel.cancel_shielded_checkpoint()
        if self._error is None:
            self.connection.queue_control(FrameType.WINDOW_UPDATE, Flag.RST, self.stream_id, 0)
        self._chunks.clear()
        self.lose(MuxedStreamReset("the stream was reset here"))
        self.connection.forget(self)

    def lose(self, error: MuxedStreamError) -> None:
        """End the stream with an error that readers and writers receive."""
        if self._error is None:
            self._error = error
        self._readable.set()
        self._writable.set()

    def receive(self, data: memoryview, pins: int) -> None:
        """Take data from the remote, out of a message of `pins` bytes. YamuxViolation when it
        exceeds what was granted.

        The memory held is bounded by the window, however the remote cuts its data: a view keeps the
        whole message, and each object costs more than a byte.
        """
        if len(data) > self._receive_window or self._fin_received:
            raise YamuxViolation(f"stream {self.stream_id} got more than was granted")
        self._receive_window -= len(data)
        if len(data) >= SMALLEST_VIEW_BYTES and 2 * len(data) > pins:
            self._chunks.append(data)
        else:
            self._join(data)
        self._wake_reader()

    def _join(self, data: memoryview) -> None:
        """Copy data to the end of the last buffer, or into a new one."""
        last = self._chunks[-1] if self._chunks else None
        if isinstance(last, bytearray) and len(last) + len(data) <= JOINED_BYTES:
            last += data
        else:
            self._chunks.append(bytearray(data))

    def receive_end(self) -> None:
        """Handle the remote's end of the stream; its data may still be read."""
        self._fin_received = True
        self._wake_reader()
        if self._fin_sent:
            self.connection.forget(self)

    def receive_credit(self, size: int) -> None:
        """Add bytes to what may be sent to the remote."""
        # The largest window is 16 MiB here and 2^32 in the protocol; more is nonsense, and
        # keeping the sum small keeps it an ordinary integer.
        self._send_window = min(self._send_window + size, 2**32)
        self._wake_writer()

    @property
    def extra_window_bytes(self) -> int:
        """Bytes that the receive window takes of the connection's budget."""
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
        """Wait until one frame may be queued. Between this and queueing it nothing may wait."""
        while self._error is None and not self._fin_sent and self._send_window <= 0:
            await self._writable.wait()
        self._check_writable()
        await self.connection.queue.take_turn()
        try:
            self._check_writable()
        except MuxedStreamError:
            self.connection.queue.give_turns()
            raise

    def _check_writable(self) -> None:
        if self._error is not None:
            raise self._error
        if self._fin_sent:
            raise MuxedStreamClosed("the stream is closed for writing")

    def _grant(self, size: int) -> None:
        """Grant the remote credit for what was read, in steps of half a window.

        Reading half a window in less than four round trips means that the window, not the reader,
        limits the stream: it doubles (go-yamux does the same).
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
        self.connection.queue_control(FrameType.WINDOW_UPDATE, Flag.NONE, self.stream_id, credit)


class YamuxConnection(IMuxedConn):  # type: ignore[misc]
    """The muxer's end of one connection. `start` runs it until it is closed or lost."""

    def __init__(self, secured_conn: ISecureConn, peer_id: ID, is_initiator: bool) -> None:
        self.secured_conn = secured_conn
        self._channel = NoiseChannel(secured_conn)
        self.peer_id = peer_id
        self.remote = PeerId(peer_id.to_base58())
        """`peer_id` as the project's own type; the Noise handshake has proved it."""
        self.on_close: Callable[[], Awaitable[Any]] | None = None
        self.event_started = trio.Event()
        self.event_closed = trio.Event()
        self._is_initiator = is_initiator
        self._next_stream_id = 1 if self._is_initiator else 2
        self._streams: dict[int, YamuxStream] = {}
        self._remote_streams = 0
        self._accept_send, self._accept_receive = trio.open_memory_channel[YamuxStream](
            ACCEPT_BACKLOG
        )
        self.queue = SendQueue()
        self._flushed = trio.Event()
        self._closing = False
        self._scope = trio.CancelScope()
        self._window_budget = EXTRA_WINDOW_BUDGET_BYTES
        self._receiving: YamuxStream | None = None
        self._receiving_flags = 0
        self._missing_bytes = 0
        self._last_heard_seconds = trio.current_time()
        self._ping_sent_seconds: float | None = None
        self.rtt_seconds = MIN_RTT_SECONDS
        self.measured_rtt_seconds = 0.0
        """Round trip of the last ping; 0 before the first answer."""
        self.relay: PeerId | None = relay_of(self._channel)
        """The relay that carries this connection; None for a direct one."""
        end = local_end_of(self._channel)
        self.local_host = None if end is None else end[0]
        self.local_port = None if end is None else end[1]
        """This end's port at the address `local_host`; both are None behind a relay."""
        self.punched = False
        """Whether the connection came through a punched hole."""
        self.throttle: Callable[[int], float] | None = None
        """Called after each message with its cost; returns for how many seconds to stop reading."""
        self._cost = 0
        self.sent_bytes = 0
        self.received_bytes = 0
        self._heard = trio.Event()

    # The interface of a muxer that py-libp2p's swarm expects.

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
        """Run the connection. Never raises but for cancellation: one bad remote must not stop the
        host that runs all connections."""
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
        """Send what is queued and a GO_AWAY, and end the connection, within a second."""
        if not self.event_started.is_set():
            await self._shut_down()
            return
        if not self._closing:
            self.queue_control(FrameType.GO_AWAY, Flag.NONE, 0, error_code)
            self._closing = True
            with trio.move_on_after(FLUSH_SECONDS):
                await self._flushed.wait()
            self._scope.cancel()
        with trio.move_on_after(FLUSH_SECONDS):
            await self.event_closed.wait()

    async def open_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        if self._closing:
            raise MuxedConnUnavailable("the connection is closed")
        stream = YamuxStream(self, self._next_stream_id)
        self._next_stream_id += 2
        self._streams[stream.stream_id] = stream
        self.queue_control(
            FrameType.WINDOW_UPDATE, Flag.SYN, stream.stream_id, stream.grant_first_window()
        )
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

    # The interface for streams of the connection. None of these waits for the network.

    def queue_control(self, kind: FrameType, flags: Flag, stream_id: int, value: int) -> None:
        """Queue a control frame; a remote that has too many unread ones is disconnected."""
        if not self._closing and not self.queue.put_control(kind, flags, stream_id, value):
            logger.debug("%s asks for answers that it does not read", self.peer_id)
            self._scope.cancel()

    def forget(self, stream: YamuxStream) -> None:
        """Remove a finished stream."""
        if self._streams.pop(stream.stream_id, None) is None:
            return
        self._window_budget += stream.extra_window_bytes
        if self._is_remotes(stream.stream_id):
            self._remote_streams -= 1

    def take_window_budget(self, size: int) -> int:
        """Take up to `size` bytes of the budget for larger windows; return how many."""
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
        except Exception:  # a supervisor: a failure stays in its connection
            logger.exception("the connection to %s failed", self.peer_id)
        self._scope.cancel()

    async def _send_loop(self) -> None:
        while True:
            while messages := self.queue.next_messages():
                await self._channel.write(messages)
                self.sent_bytes += sum(map(len, messages))
            if self._closing:
                self._flushed.set()
            await self.queue.wait_for_frames()

    async def _receive_loop(self) -> None:
        head = bytearray()
        messages = 0
        while not self._closing:
            message = memoryview(await self._channel.read())
            self._last_heard_seconds = trio.current_time()
            self.received_bytes += len(message)
            position = 0
            while position < len(message):
                if self._missing_bytes:
                    data = message[position : position + self._missing_bytes]
                    self._receive_data(data, pins=len(message))
                    position += len(data)
                    continue
                part = message[position : position + HEADER_BYTES - len(head)]
                position += len(part)
                head += part
                if len(head) == HEADER_BYTES:
                    self._receive_header(bytes(head))
                    head.clear()
            messages += 1
            if self.throttle is not None:
                await self._wait_for_turn(self.throttle, len(message))
            elif messages % MESSAGES_PER_TURN == 0:
                await trio.lowlevel.checkpoint()

    async def _wait_for_turn(self, throttle: Callable[[int], float], size: int) -> None:
        cost, self._cost = self._cost + size + COST_OF_MESSAGE, 0
        while seconds := throttle(cost):
            await trio.sleep(min(seconds, 1.0))
        await trio.lowlevel.checkpoint()

    def _receive_header(self, header: bytes) -> None:
        version, kind, flags, stream_id, value = HEADER.unpack(header)
        self._cost += COST_OF_STREAM if flags & SYN and kind != FrameType.PING else COST_OF_FRAME
        if version != 0 or kind > FrameType.GO_AWAY:
            raise YamuxViolation(f"a frame of version {version} and type {kind}")
        if kind == FrameType.PING:
            self._receive_ping(flags, value)
        elif kind == FrameType.GO_AWAY:
            self._closing = True
            self._scope.cancel()
        else:
            stream = self._stream_of_frame(flags, stream_id)
            if kind == FrameType.WINDOW_UPDATE:
                if stream is not None and value:
                    stream.receive_credit(value)
                self._receive_flags(stream, flags)
                return
            if stream is None and not flags & (RST | SYN):
                self.queue_control(FrameType.WINDOW_UPDATE, Flag.RST, stream_id, 0)
            self._receiving, self._receiving_flags, self._missing_bytes = stream, flags, value
            if not value:
                self._receive_flags(stream, flags)

    def _receive_data(self, data: memoryview, pins: int) -> None:
        """Receive a piece of the current frame, out of a message of `pins` bytes."""
        self._missing_bytes -= len(data)
        stream = self._receiving
        if stream is not None and stream.stream_id in self._streams:
            stream.receive(data, pins)
        if not self._missing_bytes:
            self._receiving = None
            self._receive_flags(stream, self._receiving_flags)

    def _receive_flags(self, stream: YamuxStream | None, flags: int) -> None:
        if stream is None:
            return
        if flags & RST:
            stream.lose(MuxedStreamReset("the remote reset the stream"))
            self.forget(stream)
        elif flags & FIN:
            stream.receive_end()

    def _receive_ping(self, flags: int, value: int) -> None:
        if flags & SYN:
            self.queue_control(FrameType.PING, Flag.ACK, 0, value)
        elif self._ping_sent_seconds is not None:
            self.measured_rtt_seconds = trio.current_time() - self._ping_sent_seconds
            self.rtt_seconds = max(MIN_RTT_SECONDS, self.measured_rtt_seconds)
            self._ping_sent_seconds = None
            self._heard.set()

    def _stream_of_frame(self, flags: int, stream_id: int) -> YamuxStream | None:
        """Return the stream of a frame, a new one for SYN. None: closed here, or refused."""
        if not flags & SYN:
            return self._streams.get(stream_id)
        if stream_id == 0 or not self._is_remotes(stream_id) or stream_id in self._streams:
            raise YamuxViolation(f"stream {stream_id} cannot be opened")
        stream = YamuxStream(self, stream_id)
        try:
            if self._remote_streams >= MAX_REMOTE_STREAMS:
                raise trio.WouldBlock
            self._accept_send.send_nowait(stream)
        except trio.WouldBlock:
            self.queue_control(FrameType.WINDOW_UPDATE, Flag.RST, stream_id, 0)
            return None
        self._streams[stream_id] = stream
        self._remote_streams += 1
        # More than the initial window is granted once the stream is served (`extend_window`).
        self.queue_control(FrameType.WINDOW_UPDATE, Flag.ACK, stream_id, 0)
        return stream

    def _is_remotes(self, stream_id: int) -> bool:
        """Whether the remote opened the stream: the initiator's are odd, the responder's even."""
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

    async def check_alive(self, timeout_seconds: float) -> None:
        """Ping, and close the connection when no answer comes: the network may have changed."""
        self._heard = trio.Event()
        self._ping()
        with trio.move_on_after(timeout_seconds):
            await self._heard.wait()
        if not self._heard.is_set():
            logger.debug("%s does not answer any more", self.peer_id)
            self._scope.cancel()

    @property
    def stream_count(self) -> int:
        return len(self._streams)

    def _ping(self) -> None:
        self._ping_sent_seconds = trio.current_time()
        self.queue_control(FrameType.PING, Flag.SYN, 0, 0)

    async def _shut_down(self) -> None:
        if self.event_closed.is_set():
            return
        self._closing = True
        self.event_closed.set()
        self._flushed.set()
        for stream in list(self._streams.values()):
            stream.lose(MuxedStreamReset("the connection is gone"))
        self._streams.clear()
        self.queue.release_writers()
        self._accept_send.close()
        with trio.CancelScope(shield=True), trio.move_on_after(FLUSH_SECONDS):
            try:
                await self._channel.close()
            except _CONNECTION_ENDED as error:
                logger.debug("closing the connection to %s: %r", self.peer_id, error)
        if self.on_close is not None:
            await self.on_close()
