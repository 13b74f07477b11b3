"""Linear digests: the digest of a sum of vectors of whole numbers is the sum of their digests.

    digest(c) = sum over j of key[j] * c[j]   mod 2^64

The key is as long as the vector: the BLAKE3 output stream of a seed, eight bytes per element. Two
vectors that were fixed before the seed was drawn, and that differ, have the same digest with
probability 2^(v - 64), where 2^v is the largest power of two that divides every difference: at
most 2^-11 for the largest gradients that are summed, and 2^-64 where one difference is odd. This
is multilinear universal hashing (Carter and Wegman 1979; Halevi and Krawczyk 1997, section 4). A
member that knows the seed in advance can make any digest, so that a seed is drawn after the
vectors are exchanged, and used once.

Pure. P: elements of a vector.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

MODULUS: Final = 2**64

Counts = NDArray[np.float64] | NDArray[np.float32] | NDArray[np.int64]
"""Whole numbers below 2^53 in magnitude."""

_WORD_BYTES: Final = 8
_WINDOW_ELEMENTS: Final = 1 << 13
"""Elements per pass: key, vector and product of one stay in a core's cache, and the allocator has
memory of this size at hand."""


def check_seed(secret: str, number: int) -> str:
    """The seed of one check, in hex digits; it tells nothing of the secret's others."""
    return blake3(bytes.fromhex(secret) + b"check %d" % number).hexdigest(length=16)


class DigestKey:
    """The key of one reduction, from the seed and the reduction's name."""

    def __init__(self, seed: str, part: str) -> None:
        """`seed`: hex digits; `part`: the name of the vector, because one seed serves several."""
        self._stream = blake3(bytes.fromhex(seed) + part.encode())

    def _words(self, start: int, stop: int) -> NDArray[np.uint64]:
        octets = self._stream.digest(_WORD_BYTES * (stop - start), seek=_WORD_BYTES * start)
        return np.frombuffer(octets, "<u8")

    def digest(self, counts_P: Counts, start: int = 0) -> int:
        """The digest of the elements [start, start + P) of the vector. Digests of consecutive parts
        add up to that of the whole."""
        return self.digests((counts_P,), start)[0]

    def digests(self, vectors: Sequence[Counts], start: int = 0) -> tuple[int, ...]:
        """The digests of vectors of one length; making the key takes longer than using it."""
        totals = [0] * len(vectors)
        elements = len(vectors[0]) if vectors else 0
        for begin in range(0, elements, _WINDOW_ELEMENTS):
            end = min(begin + _WINDOW_ELEMENTS, elements)
            words = self._words(start + begin, start + end)
            for index, counts_P in enumerate(vectors):
                window = counts_P[begin:end].astype(np.int64, copy=False).view(np.uint64)
                # Unsigned arithmetic wraps, which is the remainder.
                totals[index] += int(np.dot(window, words))
        return tuple(total % MODULUS for total in totals)


def digest_sum(digests: Iterable[int]) -> int:
    """The digest of a sum of vectors, from theirs."""
    return sum(digests) % MODULUS


def to_text(digest: int) -> str:
    """The digest as a `swarm_shared.base.types.LinearDigest`."""
    return f"{digest:016x}"


def from_text(text: str) -> int:
    return int(text, 16)
