"""What the other members put into the slice that this member sums, as it came.

Kept from the round to the end of its attempt, for a check of sums. The bound is that of the wire:
about 7 bytes for each element of the slice and each other member, mostly 3.
"""

from __future__ import annotations

from swarm_client.averaging.all_reduce.codec import EncodedPiece, Totals, decode_piece
from swarm_client.averaging.all_reduce.plan import RoundSpec, partition
from swarm_shared.base.types import LinearDigests
from swarm_shared.identity.linear_digest import DigestKey, digest_sum, to_text
from swarm_shared.identity.norm_sketch import SketchKey


class ReceivedPieces:
    """The pieces of one round."""

    @classmethod
    def for_round(cls, spec: RoundSpec) -> ReceivedPieces | None:
        """Return the place for a round's pieces; None where sums cannot be checked, because they
        are rounded or of one member."""
        return cls(spec) if spec.codec == "exact" and len(spec.members) > 1 else None

    def __init__(self, spec: RoundSpec) -> None:
        self._spec = spec
        self._slice = partition(spec)[spec.my_index]
        self._pieces: list[list[EncodedPiece]] = [[] for _ in spec.members]

    def keep(self, member: int, piece: EncodedPiece) -> None:
        """Keep the next piece of this member."""
        self._pieces[member].append(piece)

    def digests(self, key: DigestKey | SketchKey) -> LinearDigests:
        """The digest of what each other member put in, in the group's order."""
        others = [i for i in range(len(self._spec.members)) if i != self._spec.my_index]
        totals = [0] * len(others)
        for index in range(self._slice.pieces):
            start, stop = self._slice.piece(index)
            values = [self._decoded(self._pieces[i][index], stop - start) for i in others]
            totals = [
                digest_sum(pair) for pair in zip(totals, key.digests(values, start), strict=True)
            ]
        return tuple(map(to_text, totals))

    def _decoded(self, piece: EncodedPiece, elements: int) -> Totals:
        return decode_piece(piece.exponent, piece.payload, self._spec.codec, elements)
