"""One stream of a yamux connection: its two windows, and the data that is not read yet."""

from __future__ import annotations

from collections import deque
from types import TracebackType
from typing import TYPE_CHECKING, Self

import trio
from libp2p.abc import IMuxedStream
from libp2p.stream_muxer.exceptions import (
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from swarm_shared.network.libp2p.yamux_frames import (
    MAX_FRAME_PAYLOAD_BYTES,
    Flag,
    FrameType,
    YamuxViolation,
    data_header,
)

if TYPE_CHECKING:
    from swarm_shared.network.libp2p.yamux import YamuxConnection

INITIAL_WINDOW_BYTES = 256 * 1024
"""Window that the protocol grants on every new stream."""
MAX_WINDOW_BYTES = 16 * 1024 * 1024
"""Largest window granted, as in go-yamux: 100 ms of 160 MB/s."""
FIRST_WINDOW_BYTES = 1024 * 1024
"""Window granted when a stream opens, so that a first frame of ordinary size need not wait for the
window to grow, which takes a round trip for each doubling."""


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
        return chunk

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
        """End the writing side; what the remote still sends can be read."""
        await trio.lowlevel.checkpoint()
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

    async def reset(self) -> None:
        """End both directions at once; queued and unread data is dropped."""
        await trio.lowlevel.checkpoint()
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

    def receive(self, data: memoryview) -> None:
        """Take data from the remote. YamuxViolation when it exceeds what was granted."""
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
        """Wait until one frame may be queued. Between this and queueing it nothing may wait."""
        while self._error is None and not self._fin_sent and self._send_window <= 0:
            await self._writable.wait()
        self._check_writable()
        await self.connection.queue.take_turn()
        try:
            self._check_writable()
        except MuxedStreamError:
            self.connection.queue.pass_turn()
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
