"""Frames: the layout of messages and tensors in a byte stream. Bytes in, frames out; no I/O.

    header_length  u32, big endian
    payload_length u64, big endian
    header         header_length bytes: JSON of a pydantic message
    payload        payload_length bytes: raw tensor bytes, described by the header

Rules: both lengths are checked against the receiver's limits before anything is stored; memory
grows with the bytes that arrived, never with the bytes that were announced; after an error the
decoder stays broken, because the position in the stream is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm_shared.base.errors import FrameError

Buffer = bytes | bytearray | memoryview

_PREFIX = struct.Struct(">IQ")
PREFIX_BYTES = _PREFIX.size
# Below this size, joining the parts costs less than one more write.
_JOIN_BELOW_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """The sizes that a receiver accepts on one protocol."""

    max_header_bytes: int = 64 * 1024
    max_payload_bytes: int = 0

    def check(self, header_bytes: int, payload_bytes: int) -> None:
        if header_bytes > self.max_header_bytes:
            raise FrameError(
                f"a frame header of {header_bytes} bytes is longer than the "
                f"{self.max_header_bytes} allowed"
            )
        if payload_bytes > self.max_payload_bytes:
            raise FrameError(
                f"a frame payload of {payload_bytes} bytes is longer than the "
                f"{self.max_payload_bytes} allowed"
            )


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame. The payload belongs to the receiver and may be changed in place
    (torch.frombuffer)."""

    header: bytes
    payload: bytearray

    @property
    def size_bytes(self) -> int:
        return PREFIX_BYTES + len(self.header) + len(self.payload)


def encode_frame(header: bytes, payload: Buffer | Sequence[Buffer] = b"") -> list[Buffer]:
    """Return the pieces to write, in order. Large payload parts are passed on, not copied."""
    parts = payload_parts(payload)
    size_bytes = sum(part.nbytes for part in parts)
    head = _PREFIX.pack(len(header), size_bytes) + header
    if size_bytes <= _JOIN_BELOW_BYTES:
        return [b"".join([head, *parts])]
    return [head, *parts]


def payload_parts(payload: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """Return views of bytes on the non-empty parts of a payload."""
    parts: Iterable[Buffer]
    parts = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
    views = (memoryview(part) for part in parts)
    return [view.cast("B") for view in views if view.nbytes]


class FrameDecoder:
    """Splits a byte stream into frames. `feed` takes pieces of any size; frames come out in
    order."""

    __slots__ = ("_broken", "_head", "_head_wanted", "_limits", "_payload", "_payload_wanted")

    def __init__(self, limits: FrameLimits) -> None:
        self._limits = limits
        self._broken: str | None = None
        self._start_frame()

    def _start_frame(self) -> None:
        self._head = bytearray()
        self._head_wanted = PREFIX_BYTES
        self._payload = bytearray()
        self._payload_wanted: int | None = None

    def expect(self, limits: FrameLimits) -> None:
        """Set the limits from the next frame on; they grow once the remote has authenticated."""
        self._limits = limits

    @property
    def missing_bytes(self) -> int:
        """A lower bound of the bytes that the current frame still needs."""
        return (
            self._head_wanted - len(self._head) + (self._payload_wanted or 0) - len(self._payload)
        )

    @property
    def held_bytes(self) -> int:
        """The bytes of the current frame that are here."""
        return len(self._head) + len(self._payload)

    def give_up(self, reason: str) -> None:
        """Drop what is here of the current frame; FrameError when more of the stream comes."""
        self._start_frame()
        self._broken = reason

    def feed(self, data: Buffer) -> list[Frame]:
        """Return the frames that `data` completes; FrameError when it cannot be a frame."""
        if self._broken is not None:
            raise FrameError(self._broken)
        frames: list[Frame] = []
        view = memoryview(data)
        position = 0
        while position < len(view):
            position = self._take(view, position, frames)
        return frames

    def finish(self) -> None:
        """End the stream; FrameError if it ends inside a frame."""
        if self._head:
            raise FrameError(
                f"the stream ended inside a frame, {self.missing_bytes} bytes before its end"
            )

    def _take(self, view: memoryview, position: int, frames: list[Frame]) -> int:
        missing = self._head_wanted - len(self._head)
        if missing:
            self._head += view[position : position + missing]
            position = min(position + missing, len(view))
            if len(self._head) < self._head_wanted:
                return position
            if self._payload_wanted is None:
                self._read_prefix()
                if len(self._head) < self._head_wanted:
                    return position
        assert self._payload_wanted is not None
        missing = self._payload_wanted - len(self._payload)
        taken = view[position : position + missing]
        self._payload += taken
        if len(self._payload) == self._payload_wanted:
            frames.append(Frame(bytes(self._head[PREFIX_BYTES:]), self._payload))
            self._start_frame()
        return position + len(taken)

    def _read_prefix(self) -> None:
        header_bytes, payload_bytes = _PREFIX.unpack(self._head)
        try:
            self._limits.check(header_bytes, payload_bytes)
        except FrameError as error:
            self._broken = str(error)
            raise
        self._head_wanted = PREFIX_BYTES + header_bytes
        self._payload_wanted = payload_bytes
