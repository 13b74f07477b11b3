"""Batched Noise messages over a connection that py-libp2p has secured.

py-libp2p's session writes one message per system call and copies what it reads four times; this
does the same with its keys, several messages at a time. The handshake and the cipher stay
py-libp2p's. On a connection with a socket of its own, messages are encrypted and decrypted between
the socket's buffers and the muxer's without a further copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidTag
from libp2p.abc import ISecureConn
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import IncompleteReadError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.security.noise.io import NoisePacketReadWriter, NoiseTransportReadWriter
from libp2p.security.secure_session import SecureSession
from noise.exceptions import NoiseInvalidMessage

from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.tcp import BufferedTcpStream

MAX_PLAINTEXT_BYTES = 65_535 - 16
"""Plaintext of one message: it holds 65,535 bytes, of which the cipher's tag takes 16."""
_LENGTH_BYTES = 2


class NoiseChannel:
    """Takes over the reading and writing of a secured connection permanently."""

    def __init__(self, secured_conn: ISecureConn) -> None:
        assert isinstance(secured_conn, SecureSession), "the host offers no other security"
        packets = secured_conn.conn
        assert isinstance(packets, NoiseTransportReadWriter)
        assert isinstance(packets.read_writer, NoisePacketReadWriter)
        self._session = secured_conn
        self._cipher = packets.noise_state
        # Its own `decrypt` takes bytes only, so a buffer would have to be copied.
        self._decrypting = self._cipher.noise_protocol.cipher_state_decrypt
        self._raw = packets.read_writer.read_write_closer
        transport = _transport(self)
        self._socket = transport if isinstance(transport, BufferedTcpStream) else None

    async def read(self) -> bytes:
        """Return the next message's plaintext, never empty. IncompleteReadError at the end."""
        # Bytes that arrived in one message with the end of the muxer's negotiation.
        left_over: bytes = self._session._drain(None)
        if left_over:
            return left_over
        while True:
            length = int.from_bytes(await self._read_exactly(_LENGTH_BYTES), "big")
            message = await self._read_exactly(length)
            try:
                plaintext: bytes = self._decrypting.decrypt_with_ad(None, message)
            except InvalidTag as error:
                raise NoiseInvalidMessage("a message is not what the remote encrypted") from error
            if plaintext:
                return plaintext

    async def write(self, messages: Sequence[bytes]) -> None:
        """Send each item as one message of at most MAX_PLAINTEXT_BYTES."""
        pieces: list[bytes] = []
        for message in messages:
            encrypted = self._cipher.encrypt(message)
            pieces += (len(encrypted).to_bytes(_LENGTH_BYTES, "big"), encrypted)
        if self._socket is not None:
            await self._socket.write_pieces(pieces)
        else:
            await self._raw.write(b"".join(pieces))

    async def close(self) -> None:
        await self._session.close()

    async def _read_exactly(self, size: int) -> bytes | memoryview:
        """Return `size` bytes, valid until the next read. Both kinds of connection return fewer
        only at their end."""
        data: bytes | memoryview
        if self._socket is not None:
            data = await self._socket.read_view(size)
        else:
            data = await self._raw.read(size)
        if len(data) < size:
            raise IncompleteReadError("the connection ended")
        return data


def relay_of(channel: NoiseChannel) -> PeerId | None:
    """Return the relay that carries the connection; None when it has a socket of its own."""
    relay: PeerId | None = getattr(_transport(channel), "relay", None)
    return relay


def local_end_of(channel: NoiseChannel) -> tuple[str, int] | None:
    """Return the address and port of the connection's own socket on this machine."""
    transport = _transport(channel)
    if not isinstance(transport, TrioTCPStream):
        return None
    try:
        name = transport.stream.socket.getsockname()
    except OSError:
        return None
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def _transport(channel: NoiseChannel) -> ReadWriteCloser:
    raw = channel._raw
    return raw.stream if isinstance(raw, RawConnection) else raw
