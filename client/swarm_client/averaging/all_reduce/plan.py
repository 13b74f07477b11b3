"""The plan of a round: which member reduces which part of the vector. Pure.

Every member computes the plan from what the coordinator sent. `plan_digest` is compared at the
start of every stream, so that two members with different plans stop before any data flows.

Shares are the parts of the vector that members reduce, proportional to their bandwidth. A member
with share 0 (outbound only, for example) sends its vector, takes the sums and reduces nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Annotated

from pydantic import Field

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import MAX_EXACT_INTEGER, Magnitude, PeerId
from swarm_shared.run.codec_sizes import AVERAGE_CODECS, AverageCodec

PIECE_ELEMENTS = 256 * 1024
"""Elements per piece, 1 MiB of float32: long enough to amortise Python's cost per piece, short
enough to pipeline."""

MAX_MEMBERS = 1024
MAX_ROUND_ID_CHARACTERS = 200
RoundId = Annotated[str, Field(min_length=1, max_length=MAX_ROUND_ID_CHARACTERS)]
Members = Annotated[tuple[PeerId, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
Shares = Annotated[tuple[Magnitude, ...], Field(max_length=MAX_MEMBERS)]
Elements = Annotated[int, Field(ge=1, le=MAX_EXACT_INTEGER)]
ALIGNMENT_ELEMENTS = 16
"""Slices begin at multiples of 64 bytes, so that no two reducers write to one cache line."""

_WINDOW_PIECES_TOTAL = 32
_PLAN_VERSION = 1


@dataclass(frozen=True, slots=True)
class RoundSpec:
    """The plan of one attempt at one all-reduce. `round_id` is unique per attempt.

    Raises ProtocolError for an impossible round.
    """

    round_id: RoundId
    members: Members
    me: PeerId
    elements: Elements
    shares: Shares | None = None
    piece_elements: Elements = PIECE_ELEMENTS
    codec: AverageCodec = "none"

    def __post_init__(self) -> None:
        if not 1 <= len(self.round_id) <= MAX_ROUND_ID_CHARACTERS:
            raise _invalid_round("its name is empty or too long")
        if not 1 <= len(self.members) <= MAX_MEMBERS:
            raise _invalid_round(
                f"it has {len(self.members)} members; 1 to {MAX_MEMBERS} are allowed"
            )
        if len(set(self.members)) != len(self.members):
            raise _invalid_round("it names a member twice")
        if self.me not in self.members:
            raise _invalid_round(f"this peer ({self.me}) is not one of its members")
        if self.elements < 1 or self.piece_elements < 1:
            raise _invalid_round(f"{self.elements} elements in pieces of {self.piece_elements}")
        if self.codec not in AVERAGE_CODECS:
            raise _invalid_round(f"its codec {self.codec!r} is unknown")
        self._check_shares()

    def _check_shares(self) -> None:
        if self.shares is None:
            return
        if len(self.shares) != len(self.members):
            raise _invalid_round(f"{len(self.shares)} shares for {len(self.members)} members")
        if not all(math.isfinite(share) and share >= 0 for share in self.shares):
            raise _invalid_round("a share is negative or not a number")
        if not any(self.shares):
            raise _invalid_round("all shares are 0, so that no member would reduce")

    @property
    def my_index(self) -> int:
        return self.members.index(self.me)

    @property
    def tag(self) -> bytes:
        """32 bytes that identify the round on the wire."""
        return round_tag(self.round_id)

    @property
    def window_pieces(self) -> int:
        """Most pieces that a member may send to a reducer ahead of the sums that came back.

        Bounds a reducer's memory to about 32 pieces for any group size, and still covers 8 MiB per
        round trip in the usual group of up to 5.
        """
        return max(2, min(8, _WINDOW_PIECES_TOTAL // max(1, len(self.members) - 1)))


@dataclass(frozen=True, slots=True)
class Slice:
    """The elements [start, stop) that one member reduces, cut into pieces."""

    start: int
    stop: int
    piece_elements: int

    @property
    def pieces(self) -> int:
        """The number of pieces in the slice."""
        return -(-(self.stop - self.start) // self.piece_elements)

    def piece(self, index: int) -> tuple[int, int]:
        """First and one-past-last element of a piece, in the whole vector."""
        start = self.start + index * self.piece_elements
        return start, min(start + self.piece_elements, self.stop)


def partition(spec: RoundSpec) -> tuple[Slice, ...]:
    """Return one slice per member, in group order; together they are [0, elements), without
    overlap."""
    shares = spec.shares if spec.shares is not None else (1.0,) * len(spec.members)
    stops = slice_stops(spec.elements, shares)
    return tuple(
        Slice(start, stop, spec.piece_elements)
        for start, stop in zip((0, *stops[:-1]), stops, strict=True)
    )


def slice_stops(elements: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Return the ends of the slices of members with these shares, in elements, in group order."""
    # Fractions: the same boundaries on every machine, independent of its floating-point unit.
    exact = [Fraction(share) for share in shares]
    total = sum(exact, Fraction(0))
    stops: list[int] = []
    reached = Fraction(0)
    for share in exact:
        reached += share
        stop = elements
        if reached != total:
            stop = math.floor(elements * reached / total)
            stop -= stop % ALIGNMENT_ELEMENTS
        stops.append(stop)
    return tuple(stops)


def round_tag(round_id: str) -> bytes:
    """The tag of the round of this name (`RoundSpec.tag`)."""
    return hashlib.sha256(b"swarmtrain round\x00" + round_id.encode()).digest()


def plan_digest(spec: RoundSpec) -> bytes:
    """32 bytes over everything that members must agree on."""
    fields = [
        _PLAN_VERSION,
        spec.round_id,
        list(spec.members),
        [part.stop for part in partition(spec)],
        spec.piece_elements,
        spec.codec,
    ]
    return hashlib.sha256(json.dumps(fields, separators=(",", ":")).encode()).digest()


def _invalid_round(why: str) -> ProtocolError:
    return ProtocolError(f"a round that the coordinator named cannot be run: {why}")
