"""Messages between the daemon and its child processes: frames and request numbers. No I/O.

Owns the frame format, a little-endian u32 length followed by that many bytes of JSON, and the
number that pairs a request with its answer. Does not own sockets (`swarm_client.ipc.child_process`)
nor waiting callers (`swarm_client.ipc.child_rpc`). Imports no event loop, because trio in the
asyncio averaging worker would cost each volunteer 0.2 s of CPU.

The other end is a process of this program, so a damaged frame is a bug or a death in the middle of
a write, not an attack; the length bound keeps either from exhausting the machine's memory.
"""

from __future__ import annotations

import struct
from typing import Annotated, Generic, Self, TypeVar

from pydantic import Field, TypeAdapter

from swarm_shared.base.errors import FrameError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.protocol import encode, parse

MAX_MESSAGE_BYTES = 16 * 2**20
"""Bound on one message. A manifest or a list of 65,536 microbatches is below 1 MiB."""

LENGTH = struct.Struct("<I")

RequestNumber = Annotated[int, Field(ge=0, lt=2**53)]

MessageT = TypeVar("MessageT")


class Numbered(FrozenModel):
    """Base of requests and answers. 0 is the number of a message that no caller waits for."""

    request: RequestNumber = 0

    def numbered(self, request: int) -> Self:
        """This message under the given request number."""
        return self.model_copy(update={"request": request})


class Failure(Numbered):
    """Base of the answers that report a failed request."""

    def error(self) -> Exception:
        """The exception that the caller of the request gets."""
        raise NotImplementedError


def encode_frame(message: FrozenModel) -> bytes:
    """Encode one message as a frame. FrameError if it is too long."""
    body = encode(message)
    if len(body) > MAX_MESSAGE_BYTES:
        raise FrameError(
            f"a message of {len(body)} bytes to another process of this machine is longer than "
            f"the {MAX_MESSAGE_BYTES} allowed; please report this as a bug"
        )
    return LENGTH.pack(len(body)) + body


def frame_length(header: bytes | bytearray) -> int:
    """The body length that the header announces. FrameError above MAX_MESSAGE_BYTES."""
    (length,) = LENGTH.unpack_from(header)
    if length > MAX_MESSAGE_BYTES:
        raise FrameError(
            f"a message of {length} bytes was announced by another process of this machine; "
            f"at most {MAX_MESSAGE_BYTES} are allowed"
        )
    return int(length)


class MessageFramer(Generic[MessageT]):
    """Decodes a byte stream into messages."""

    def __init__(self, incoming: TypeAdapter[MessageT]) -> None:
        self._incoming = incoming
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append received bytes."""
        self._buffer += data

    def next_message(self) -> MessageT | None:
        """Remove and return the next whole message; None when more bytes are needed."""
        if len(self._buffer) < LENGTH.size:
            return None
        end = LENGTH.size + frame_length(self._buffer)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH.size : end])
        del self._buffer[:end]
        return parse(self._incoming, body)

    def finish(self) -> None:
        """Check the end of the stream. FrameError if it cuts a message short."""
        if self._buffer:
            raise FrameError(
                "another process of this machine ended in the middle of a message; its log says why"
            )
