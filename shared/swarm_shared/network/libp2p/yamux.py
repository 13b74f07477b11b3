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
from collections.abc import Awaitable, Callable
from typing import Any

import trio
from libp2p.abc import IMuxedConn, IMuxedStream, ISecureConn
from libp2p.io.exceptions import IOException
from libp2p.network.connection.exceptions import RawConnError
from libp2p.peer.id import ID
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable, MuxedStreamReset
from noise.exceptions import NoiseInvalidMessage

from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.noise_channel import NoiseChannel, local_end_of, relay_of
from swarm_shared.network.libp2p.send_queue import SendQueue
from swarm_shared.network.libp2p.yamux_frames import (
    FIN,
    HEADER,
    HEADER_BYTES,
    RST,
    SYN,
    Flag,
    FrameType,
    YamuxViolation,
)
from swarm_shared.network.libp2p.yamux_stream import YamuxStream

logger = logging.getLogger(__name__)

_NORMAL_TERMINATION = 0

EXTRA_WINDOW_BUDGET_BYTES = 64 * 1024 * 1024
"""Window beyond the initial one that a connection grants over all its streams."""
MIN_RTT_SECONDS = 0.02
"""Lower bound of the round trip by which windows grow: an idle loopback measures 1 ms, which does
not include the time a busy event loop takes to answer."""
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
        """With `local_host`, this machine's address and port at this end; None behind a relay."""
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

    async def open_stream(self) -> IMuxedStream:
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
            # A view keeps the whole message in memory: used only for most of a message, else a
            # remote could hold a whole message with a byte of window.
            stream.receive(data if 2 * len(data) > pins else memoryview(bytes(data)))
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
