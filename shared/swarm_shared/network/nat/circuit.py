"""Circuit v2 on the wire: its messages, its protocol names, and a stream used as a connection.

The protocol is libp2p's (github.com/libp2p/specs/blob/master/relay/circuit-v2.md), so that go's
p2pd can use the same relays; the messages' definitions are py-libp2p's. The relay is in
`swarm_shared.network.nat.relay_server`, its client in `relay_client`.
"""

from __future__ import annotations

from typing import Final, TypeVar

from google.protobuf.message import DecodeError, Message
from libp2p.io.abc import ReadWriteCloser
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.relay.circuit_v2.pb.circuit_pb2 import Status
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError
from libp2p.utils.varint import encode_varint_prefixed

from swarm_shared.base.errors import FrameError
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.yamux import YamuxStream

HOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/hop"
STOP_PROTOCOL: Final = "/libp2p/circuit/relay/0.2.0/stop"

MAX_MESSAGE_BYTES: Final = 4096
"""Longest message, as the specification recommends."""
MESSAGE_SECONDS: Final = 10.0
"""Longest wait for one message."""
_MAX_VARINT_BYTES: Final = 3
_MAX_READ_BYTES: Final = 65_535

MessageT = TypeVar("MessageT", bound=Message)


async def read_message(
    stream: YamuxStream, kind: type[MessageT], max_bytes: int = MAX_MESSAGE_BYTES
) -> MessageT:
    """Return the next message: its length as a varint, then its bytes.

    FrameError when it is too long or does not parse; the stream's own errors when it ends.
    """
    size = 0
    for index in range(_MAX_VARINT_BYTES):
        (byte,) = await stream.read(1)
        size |= (byte & 0x7F) << (7 * index)
        if byte < 0x80:
            break
    else:
        raise FrameError("the remote announces a message whose length has no end")
    if size > max_bytes:
        raise FrameError(
            f"the remote announces a message of {size} bytes where at most {max_bytes} are due"
        )
    content = bytearray()
    while len(content) < size:
        content += await stream.read(size - len(content))
    message = kind()
    try:
        message.ParseFromString(bytes(content))
    except DecodeError as error:
        raise FrameError(f"the remote sent a {kind.__name__} that does not parse") from error
    return message


async def write_message(stream: YamuxStream, message: Message) -> None:
    await stream.write(encode_varint_prefixed(message.SerializeToString()))


def status_name(status: int) -> str:
    """Return a relay's status as text; an unknown number stays a number."""
    names: dict[int, str] = {number: name for name, number in Status.items()}
    return names.get(status, str(status)).lower().replace("_", " ")


class CircuitTransport(ReadWriteCloser):  # type: ignore[misc]
    """A relayed stream in place of a TCP socket, below Noise and yamux of its own."""

    def __init__(self, stream: YamuxStream, relay: PeerId) -> None:
        self._stream = stream
        self.relay = relay

    async def read(self, n: int | None = None) -> bytes:
        """Return exactly `n` bytes, or fewer at the end of the stream."""
        if n is None:
            return await self._some(_MAX_READ_BYTES)
        if n > _MAX_READ_BYTES:
            raise ConnectionClosedError(f"the remote announces a message of {n} bytes")
        data = await self._some(n)
        if len(data) == n:
            return data
        collected = bytearray(data)
        while len(collected) < n and (data := await self._some(n - len(collected))):
            collected += data
        return bytes(collected)

    async def _some(self, max_bytes: int) -> bytes:
        try:
            return await self._stream.read(max_bytes)
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError as error:
            raise ConnectionClosedError(f"the relayed connection is lost: {error}") from error

    async def write(self, data: bytes) -> None:
        try:
            await self._stream.write(data)
        except MuxedStreamError as error:
            raise ConnectionClosedError(f"the relayed connection is lost: {error}") from error

    async def close(self) -> None:
        await self._stream.hang_up()

    def get_remote_address(self) -> tuple[str, int] | None:
        """Return None: the relay's address is not the peer's."""
        return None
