"""Messages as JSON: parsing with one error for everything malformed, and length-prefixed frames.

    length u32 (little endian) | length bytes of JSON

The frames carry messages between processes of one machine: the daemon, its workers, and the heads
of bridged streams. A damaged frame there is a bug or a process that died while writing, never an
attack; the bound keeps either from taking the machine's memory. Messages between machines are
framed by `swarm_shared.protocol.framing`. Free of I/O and of every event loop.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

from pydantic import TypeAdapter, ValidationError

from swarm_shared.base.errors import FrameError
from swarm_shared.base.frozen_model import FrozenModel

MAX_MESSAGE_BYTES = 16 * 2**20
"""Longest message; a manifest or a list of 65,536 microbatches has less than 1 MiB."""

_LENGTH = struct.Struct("<I")
LENGTH_BYTES = _LENGTH.size

MessageT = TypeVar("MessageT")


def encode(message: FrozenModel) -> bytes:
    """Encode a message as JSON."""
    return message.model_dump_json().encode()


def parse(adapter: TypeAdapter[MessageT], content: bytes | bytearray | memoryview) -> MessageT:
    """Parse one message; FrameError for anything that is not exactly one known message."""
    try:
        # The adapter's `validate_json` without its options, which are examined at every call.
        parsed: MessageT = adapter.validator.validate_json(bytes(content))
        return parsed
    except ValidationError as error:
        raise FrameError(
            f"the remote sent a message that does not parse: {first_error(error)}"
        ) from error


def first_error(error: ValidationError) -> str:
    """Describe the first thing that is wrong with a document in one line: its place, and what is
    wrong there. Without the input, which may be untrusted and huge."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = ".".join(str(part) for part in first["loc"])[:100]
    return (f"{place}: {first['msg']}" if place else str(first["msg"]))[:300]


def encode_prefixed(message: FrozenModel, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Encode a message behind its length; FrameError when it is too long to be sent."""
    body = encode(message)
    if len(body) > max_bytes:
        raise FrameError(
            f"a message of {len(body)} bytes to another process of this machine is longer than "
            f"the {max_bytes} allowed; please report this as a bug"
        )
    return _LENGTH.pack(len(body)) + body


def decode_length(prefix: bytes | bytearray, max_bytes: int = MAX_MESSAGE_BYTES) -> int:
    """Return the length that a frame's first LENGTH_BYTES announce; FrameError above the bound."""
    (length,) = _LENGTH.unpack_from(prefix)
    if length > max_bytes:
        raise FrameError(
            f"a message of {length} bytes was announced by another process of this machine; "
            f"at most {max_bytes} are allowed"
        )
    return int(length)


class PrefixedDecoder(Generic[MessageT]):
    """Decodes a stream of length-prefixed messages: bytes in, messages out."""

    def __init__(self, incoming: TypeAdapter[MessageT]) -> None:
        self._incoming = incoming
        self._buffer = bytearray()

    def feed(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes that have arrived."""
        self._buffer += data

    def next_message(self) -> MessageT | None:
        """Return the next whole message; None when more bytes are needed."""
        if len(self._buffer) < LENGTH_BYTES:
            return None
        end = LENGTH_BYTES + decode_length(self._buffer)
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[LENGTH_BYTES:end])
        del self._buffer[:end]
        return parse(self._incoming, body)

    def finish(self) -> None:
        """End the stream; FrameError if it ends in the middle of a message."""
        if self._buffer:
            raise FrameError(
                "another process of this machine ended in the middle of a message; its log says why"
            )
