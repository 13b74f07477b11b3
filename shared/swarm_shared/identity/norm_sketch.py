"""Sketches: the norm of a vector of whole numbers is estimated from its sketch, to some 10 %.

    sketch(c)[b] = sum over the j in bucket b of sign[j] * c[j]   mod 2^64

Signs are random, and so is the bucket of each element; both follow from a seed. The sketch of a sum
of vectors is the sum of their sketches, and the mean of a sketch's squared norm is the vector's
(the sketch of Alon, Matias and Szegedy 1996, section 2.2, in buckets as by Thorup and Zhang 2004).
With 64 buckets the squared norm is off by a sixth, typically (sqrt(2 / 64)); it is twice too large
in less than one of 10^5 sketches. A member that knows the seed in advance can hide any vector, so
that a seed is drawn after the vectors are exchanged, and used once.

A sketch does not tell vectors apart as a linear digest does: two equal elements with opposite signs
vanish where they share a bucket. It is a statement that a member signs; whether it is true is found
by the digest of the sketch under weights that are drawn later (`SketchKey`).

Pure. P: elements of a vector. B: buckets of a sketch.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from swarm_shared.identity.linear_digest import MODULUS, Counts, DigestKey

BUCKETS: Final = 64

Sketch = NDArray[np.uint64]
"""The sums of the buckets."""

_WORD_BYTES: Final = 8
_ROWS: Final = 128
_WINDOW_ELEMENTS: Final = _ROWS * BUCKETS
"""Elements per pass. A window is a table of 128 rows with an element for each bucket; each row is
rotated by a number of its own, and the window's sums by another one. So any two elements share a
bucket with probability 1/64 at most."""


class Sketcher:
    """Computes sketches under one seed."""

    def __init__(self, seed: str, part: str) -> None:
        """`seed`: hex digits; `part`: the name of the vector, because one seed serves several."""
        text = bytes.fromhex(seed) + part.encode()
        self._signs = blake3(text + b" signs")
        self._rotations = blake3(text + b" rotations")
        columns = np.arange(BUCKETS)
        rows = np.frombuffer(blake3(text + b" rows").digest(length=_ROWS), np.uint8)
        turned = (columns + rows[:, None]) % BUCKETS
        self._places = (turned + BUCKETS * np.arange(_ROWS)[:, None]).reshape(-1)
        self._turns = (columns + columns[:, None]) % BUCKETS

    def sketch(self, counts_P: Counts, start: int = 0) -> Sketch:
        """The sketch of the elements [start, start + P) of the vector. Sketches of consecutive
        parts add up to that of the whole."""
        return self.sketches((counts_P,), start)[0]

    def sketches(self, vectors: Sequence[Counts], start: int = 0) -> tuple[Sketch, ...]:
        """The sketches of vectors of one length."""
        totals = [np.zeros(BUCKETS, np.uint64) for _ in vectors]
        stop = start + (len(vectors[0]) if vectors else 0)
        for window in range(start // _WINDOW_ELEMENTS, -(-stop // _WINDOW_ELEMENTS)):
            first = window * _WINDOW_ELEMENTS
            begin, end = max(start, first), min(stop, first + _WINDOW_ELEMENTS)
            signs, turn = self._signs_of(window), self._turns[self._rotation_of(window)]
            for total, counts_P in zip(totals, vectors, strict=True):
                counts = counts_P[begin - start : end - start].astype(np.int64, copy=False)
                if len(counts) < _WINDOW_ELEMENTS:
                    counts = np.pad(counts, (begin - first, first + _WINDOW_ELEMENTS - end))
                table = (counts * signs).take(self._places).reshape(_ROWS, BUCKETS)
                # Whole numbers wrap, which is the remainder.
                total += table.sum(axis=0).take(turn).view(np.uint64)
        return tuple(totals)

    def _signs_of(self, window: int) -> NDArray[np.int64]:
        octets = self._signs.digest(_WINDOW_ELEMENTS // 8, seek=window * _WINDOW_ELEMENTS // 8)
        bits = np.unpackbits(np.frombuffer(octets, np.uint8)).astype(np.int64)
        return 1 - 2 * bits

    def _rotation_of(self, window: int) -> int:
        return self._rotations.digest(1, seek=window)[0] % BUCKETS


class SketchKey:
    """Digests of sketches under random weights, drawn after the sketches were stated.

    They are digests of the vectors, too: they add up over slices and members as those of
    `swarm_shared.identity.linear_digest` do. Two sketches that differ have the same digest with
    probability 2^-11 at most, as vectors there.
    """

    def __init__(self, seed: str, part: str, weights: str) -> None:
        """`seed` and `part`: those of the sketches; `weights`: the seed of the weights, in hex."""
        self._sketcher = Sketcher(seed, part)
        self._weights = weights

    def digests(self, vectors: Sequence[Counts], start: int = 0) -> tuple[int, ...]:
        """The digests of the elements [start, start + P) of vectors of one length."""
        sketches = self._sketcher.sketches(vectors, start)
        return tuple(sketch_digest(sketch_B, self._weights) for sketch_B in sketches)


def sketch_digest(sketch_B: Sketch, weights: str) -> int:
    """The digest of every vector that has this sketch, under weights from a seed in hex."""
    octets = blake3(bytes.fromhex(weights)).digest(_WORD_BYTES * BUCKETS)
    return int(np.dot(sketch_B, np.frombuffer(octets, "<u8"))) % MODULUS


def vector_key(seed: str, part: str, weights: str | None) -> DigestKey | SketchKey:
    """The key of the digests that are asked for: of vectors, or of their sketches."""
    return DigestKey(seed, part) if weights is None else SketchKey(seed, part, weights)


def sketch_sum(sketches: Iterable[Sketch]) -> Sketch:
    """The sketch of a sum of vectors, from theirs."""
    total = np.zeros(BUCKETS, np.uint64)
    for sketch_B in sketches:
        total += sketch_B
    return total


def sketched_norm(sketch_B: Sketch) -> float:
    """The L2 norm of a vector, estimated from its sketch."""
    return math.sqrt(float(np.square(sketch_B.view(np.int64).astype(np.float64)).sum()))


def to_text(sketch_B: Sketch) -> str:
    """The sketch as a `swarm_shared.base.types.NormSketch`."""
    return base64.b64encode(sketch_B.astype("<u8").tobytes()).decode("ascii")


def from_text(text: str) -> Sketch:
    return np.frombuffer(base64.b64decode(text), "<u8").astype(np.uint64)
