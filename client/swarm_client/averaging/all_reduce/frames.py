"""The wire format of a round. Pure: bytes in, values out.

A stream belongs to one ordered pair of members. The member, which opened it, sends first:

    member  → reducer   HELLO                       72 bytes, fixed
    reducer → member    ACCEPT
    member  → reducer   PIECE 0, PIECE 1, …         ≤ window ahead of the sums that came back
    reducer → member    SUM 0, SUM 1, …
    member  → reducer   BYE                         all sums have arrived; the reducer closes first
    both, any time      HEARTBEAT                   alive, nothing to send
    both, at the end    ABORT                       the round has failed: reason and culprit

Every frame after HELLO begins with a header of 24 bytes: kind, the sender's index in the group,
piece index, payload length and the first 8 bytes of the round's tag. All are checked against the
next frame of the plan before a byte of the payload is read, so that a remote cannot make this side
allocate memory that the plan does not contain.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

from swarm_client.averaging.all_reduce.errors import RoundFailure
from swarm_shared.base.errors import FrameError
from swarm_shared.base.text import printable

_MAGIC = b"SWAR"
_VERSION = 1
_HELLO = struct.Struct("!4sBxH32s32s")
_HEADER = struct.Struct("!BxHiII8s")
_ABORT = struct.Struct("!BH")
HELLO_BYTES = _HELLO.size
HEADER_BYTES = _HEADER.size
TAG_BYTES = 8
MAX_REASON_BYTES = 400
MAX_ABORT_BYTES = _ABORT.size + MAX_REASON_BYTES
_NO_CULPRIT = 0xFFFF
_FAILURES = tuple(RoundFailure)


class FrameKind(IntEnum):
    """The kinds of frames behind the greeting of a stream."""

    ACCEPT = 1
    PIECE = 2
    SUM = 3
    BYE = 4
    HEARTBEAT = 5
    ABORT = 6


@dataclass(frozen=True, slots=True)
class StreamHello:
    """The first frame of a stream. `tag` and `digest` are those of `plan`, 32 bytes each."""

    sender: int
    tag: bytes
    digest: bytes

    def encode(self) -> bytes:
        """Return the frame as bytes."""
        return _HELLO.pack(_MAGIC, _VERSION, self.sender, self.tag, self.digest)

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> StreamHello:
        """Read a frame of HELLO_BYTES. FrameError if it is none of this version."""
        if len(data) != HELLO_BYTES:
            raise FrameError(f"a greeting of {len(data)} bytes; {HELLO_BYTES} are needed")
        magic, version, sender, tag, digest = _HELLO.unpack(data)
        if magic != _MAGIC or version != _VERSION:
            raise FrameError("a stream does not begin with the greeting of this version")
        return cls(sender, tag, digest)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame. `tag` is the beginning of the round's, `piece` the number of a
    piece."""

    kind: FrameKind
    sender: int
    tag: bytes
    piece: int = 0
    exponent: int = 0
    payload_bytes: int = 0

    def encode(self) -> bytes:
        return _HEADER.pack(
            self.kind, self.sender, self.exponent, self.piece, self.payload_bytes, self.tag
        )

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Header:
        """Read a header of HEADER_BYTES. FrameError for an unknown kind."""
        kind, sender, exponent, piece, payload_bytes, tag = _HEADER.unpack(data)
        try:
            return cls(FrameKind(kind), sender, tag, piece, exponent, payload_bytes)
        except ValueError as error:
            raise FrameError(f"a frame of the unknown kind {kind}") from error


@dataclass(frozen=True, slots=True)
class Abort:
    """The reason of a failure. `culprit` is an index in the group, or None."""

    failure: RoundFailure
    culprit: int | None
    reason: str

    def encode(self) -> bytes:
        culprit = _NO_CULPRIT if self.culprit is None else self.culprit
        reason = self.reason.encode()[:MAX_REASON_BYTES]
        return _ABORT.pack(_FAILURES.index(self.failure), culprit) + reason

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview, members: int) -> Abort:
        """Decode; the reason is made printable, because it goes into logs and onto terminals."""
        if not _ABORT.size <= len(data) <= MAX_ABORT_BYTES:
            raise FrameError(f"an abort frame of {len(data)} bytes")
        failure, culprit = _ABORT.unpack_from(data)
        if failure >= len(_FAILURES) or (culprit >= members and culprit != _NO_CULPRIT):
            raise FrameError("an abort frame names what does not exist")
        text = bytes(data[_ABORT.size :]).decode(errors="replace")
        reason = printable(text, "?")
        return cls(_FAILURES[failure], None if culprit == _NO_CULPRIT else culprit, reason)
