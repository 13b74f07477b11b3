"""TCP for py-libp2p's host: its transport with buffered, bounded reads.

py-libp2p reads a Noise message with two system calls and more for each segment that arrives, fails
on one that arrives in more than a hundred pieces, and passes lengths from an unauthenticated remote
straight to `recv`, which allocates that much memory.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterable, Sequence

import libp2p.transport.tcp.tcp as tcp_module
import trio
from libp2p.abc import IRawConnection
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from swarm_shared.base.errors import NetworkError
from swarm_shared.network.libp2p.bandwidth import Bandwidth

# The longest read: a Noise message.
_MAX_READ_BYTES = 65_535
# A coordinator holds thousands of connections that carry little: buffers begin small and grow
# on those that fill them, until four messages make system calls and task switches cheap.
_FIRST_BUFFER_BYTES = 4 * 1024
_LARGEST_BUFFER_BYTES = 256 * 1024
_CAN_GATHER = hasattr(socket.socket, "sendmsg")


UNACKNOWLEDGED_SECONDS = 10.0
"""Time without acknowledgement of sent bytes after which the connection is lost: cable pulled,
address changed, router's table lost. Linux also counts the time in which the remote's socket is
full because its process reads nothing."""


def _reuse_port(sock: trio.socket.SocketType) -> None:
    """Set the flags of listeners, and of dials that leave from a listener's port (hole punching).

    As py-libp2p's own function, and restricts IPv6 sockets to IPv6, so that both listeners can have
    the same port.
    """
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "SO_REUSEPORT"):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    if sock.family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)


tcp_module._set_reuse_flags = _reuse_port


class BufferedTcpStream(TrioTCPStream):  # type: ignore[misc]
    """Reads exactly as many bytes as requested, or fewer at the end of the stream.

    Both directions obey `bandwidth`, which all connections of a node share; by default its own.
    """

    def __init__(self, stream: trio.SocketStream, bandwidth: Bandwidth | None = None) -> None:
        super().__init__(stream)
        self._bandwidth = bandwidth or Bandwidth()
        internet = stream.socket.family in (socket.AF_INET, socket.AF_INET6)
        if internet and hasattr(socket, "TCP_USER_TIMEOUT"):
            milliseconds = int(UNACKNOWLEDGED_SECONDS * 1000)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
        self._remote: tuple[str, int] | None = None
        self._view = memoryview(bytearray(_FIRST_BUFFER_BYTES))
        self._start = 0
        self._end = 0

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return the remote's address; py-libp2p's own method returns None for every IPv6
        connection."""
        if self._remote is None:
            try:
                host, port = self.stream.socket.getpeername()[:2]
            except (OSError, ValueError):  # closed, or without such a name (a Unix socket)
                return None
            self._remote = (host, port)
        return self._remote

    async def write(self, data: bytes) -> None:
        await self.write_pieces((data,))

    async def write_pieces(self, pieces: Sequence[bytes]) -> None:
        """Write the pieces in order; the kernel gathers them, so that they need not be joined
        first."""
        up = self._bandwidth.up
        total = sum(map(len, pieces))
        size = max(1, up.piece(total))
        turns = [pieces]
        if size < total:
            joined = b"".join(pieces)
            turns = [(joined[start : start + size],) for start in range(0, total, size)]
        for turn in turns:
            count, written = sum(map(len, turn)), 0
            begun = up.line.begin()
            try:
                await up.consume(count)
                await self._send(turn)
                written = count
            finally:
                up.line.end(begun, written)

    async def _send(self, pieces: Sequence[bytes]) -> None:
        if len(pieces) == 1 or not _CAN_GATHER:
            await super().write(b"".join(pieces))
            return
        unsent = [memoryview(piece) for piece in pieces]
        async with self.write_lock:
            try:
                while unsent:
                    sent = await self.stream.socket.sendmsg(unsent)
                    while unsent and sent >= len(unsent[0]):
                        sent -= len(unsent.pop(0))
                    if sent:
                        unsent[0] = unsent[0][sent:]
            except trio.ClosedResourceError:
                return  # closed on this side, as with `write`
            except OSError as error:
                raise ConnectionClosedError(f"the connection is lost: {error}") from error

    async def read(self, n: int | None = None) -> bytes:
        if n is None:
            n = min(max(1, self._end - self._start), _MAX_READ_BYTES)
        return bytes(await self.read_view(n))

    async def read_view(self, n: int) -> memoryview:
        """Read without a copy: the returned view is overwritten by the next read."""
        if n > _MAX_READ_BYTES:
            raise ConnectionClosedError(f"the remote announces a message of {n} bytes")
        while self._end - self._start < n:
            if not await self._fill(n):
                n = self._end - self._start
        taken = self._view[self._start : self._start + n]
        self._start += n
        return taken

    async def _fill(self, wanted: int) -> int:
        """Receive behind the unread bytes. 0 at the end of the stream."""
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start + wanted > len(self._view):
            self._move_to_front(self._view)
        down = self._bandwidth.down
        # Bytes left in the socket hold the sender back.
        room = self._view[self._end : self._end + down.piece(len(self._view) - self._end)]
        try:
            received: int = await self.stream.socket.recv_into(room)
        except trio.ClosedResourceError:
            return 0
        except OSError as error:
            raise ConnectionClosedError(f"the connection is lost: {error}") from error
        self._end += received
        await down.consume(received)
        size = len(self._view)
        if self._end == size and size < _LARGEST_BUFFER_BYTES:
            self._move_to_front(memoryview(bytearray(4 * size)))
        return received

    def _move_to_front(self, target: memoryview) -> None:
        unread = self._view[self._start : self._end]
        target[: len(unread)] = unread  # in the same buffer, too: memory is moved, not only copied
        self._view, self._start, self._end = target, 0, len(unread)


class BufferedTcp(TCP):  # type: ignore[misc]
    """py-libp2p's TCP transport whose connections read through a buffer."""

    def __init__(self, bandwidth: Bandwidth) -> None:
        super().__init__()
        self._bandwidth = bandwidth

    async def _dial_resolved(
        self, maddr: Multiaddr, source: tuple[str, int] | None = None
    ) -> IRawConnection:
        raw = await super()._dial_resolved(maddr, source)
        assert isinstance(raw, RawConnection)
        assert isinstance(raw.stream, TrioTCPStream)
        raw.stream = BufferedTcpStream(raw.stream.stream, self._bandwidth)
        return raw


def check_ports_are_free(addresses: Iterable[Multiaddr]) -> None:
    """Raise NetworkError when another program listens on one of these ports.

    py-libp2p listens with SO_REUSEPORT (hole punching needs it), so that a second program would
    share the port silently and receive every other connection.
    """
    for address in addresses:
        protocols = {protocol.name for protocol in address.protocols()}
        family = socket.AF_INET6 if "ip6" in protocols else socket.AF_INET
        host = address.value_for_protocol("ip6" if "ip6" in protocols else "ip4")
        port = int(address.value_for_protocol("tcp"))
        if port == 0:
            continue
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            if hasattr(socket, "SO_REUSEPORT"):
                # Without it a port whose old connections linger would count as taken.
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                raise NetworkError(_describe_bind_error(str(host), port, error)) from error


def _describe_bind_error(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return (
            f"Port {port} on {host} is in use by another program; stop that program or choose "
            f"another port."
        )
    if error.errno == errno.EACCES:
        return f"Port {port} on {host} needs more rights; choose a port above 1023."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"This machine has no address {host}; listen on 0.0.0.0 or on one of its own."
    return f"Port {port} on {host} cannot be listened on: {error.strerror or error}"
