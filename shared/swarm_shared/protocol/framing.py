"""Frames: how messages and tensors lie in a byte stream. Bytes in, frames out; no I/O.

    header_length  u32, big endian
    payload_length u64, big endian
    header         header_length bytes: JSON of a pydantic message
    payload        payload_length bytes: raw tensor bytes, described by the header

Rules: both lengths are checked against the receiver's limits before anything is kept; memory
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
# Below this, joining the parts costs less than one more write.
_JOIN_BELOW_BYTES = 32 * 1024


@dataclass(frozen=True, slots=True)
class FrameLimits:
    """What a receiver accepts on one protocol."""

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
    """The payload is the receiver's own and may be changed in place (torch.frombuffer)."""

    header: bytes
    payload: bytearray

    @property
    def size_bytes(self) -> int:
        return PREFIX_BYTES + len(self.header) + len(self.payload)


def encode_frame(header: bytes, payload: Buffer | Sequence[Buffer] = b"") -> list[Buffer]:
    """The pieces to write, in order. Large payload parts are passed on, not copied."""
    parts = payload_parts(payload)
    size_bytes = sum(part.nbytes for part in parts)
    head = _PREFIX.pack(len(header), size_bytes) + header
    if size_bytes <= _JOIN_BELOW_BYTES:
        return [b"".join([head, *parts])]
    return [head, *parts]


def payload_parts(payload: Buffer | Sequence[Buffer]) -> list[memoryview]:
    """Views of bytes on the non-empty parts of a payload."""
    parts: Iterable[Buffer]
    parts = [payload] if isinstance(payload, bytes | bytearray | memoryview) else payload
    views = (memoryview(part) for part in parts)
    return [view.cast("B") for view in views if view.nbytes]


class FrameDecoder:
    """Takes a byte stream apart. `feed` any pieces; whole frames come out in order."""

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
        """What is accepted from the next frame on: more from somebody who has proved something."""
        self._limits = limits

    @property
    def at_boundary(self) -> bool:
        """True between two frames: the only place where a stream may end."""
        return not self._head

    @property
    def missing_bytes(self) -> int:
        """A lower bound on what the frame under way still needs."""
        return (
            self._head_wanted - len(self._head) + (self._payload_wanted or 0) - len(self._payload)
        )

    def feed(self, data: Buffer) -> list[Frame]:
        """The frames that `data` completes. FrameError when it cannot be a frame."""
        if self._broken is not None:
            raise FrameError(self._broken)
        frames: list[Frame] = []
        view = memoryview(data)
        position = 0
        while position < len(view):
            position = self._take(view, position, frames)
        return frames

    def finish(self) -> None:
        """To be called at the end of the stream: FrameError inside a frame."""
        if not self.at_boundary:
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
