"""Documents that are nearly equal to an earlier one, by MinHash.

What a text repeats, a model memorises (Lee et al. 2022, "Deduplicating Training Data Makes Language
Models Better", arXiv 2107.06499). The similarity of two documents is the Jaccard index of their
shingles: the share of the stretches of SHINGLE_BYTES bytes in either that are in both. It is
estimated from signatures (Broder 1997): the hashes of a document's shingles fall into BINS bins, of
each of which the least one is kept (one permutation, Li et al. 2012, arXiv 1208.1259), and two
documents agree in about as many bins as they are similar. Only documents that agree in a whole band
of BAND_BINS bins are compared at all.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from swarm_shared.data.sampler import mixed

SHINGLE_BYTES = 32
"""Five or six words."""
BINS = 64
BAND_BINS = 8
"""With eight bands, two documents of similarity 0.8 are compared with probability 0.78, of 0.9 with
0.99, and of 0.5 with 0.03: run.toml takes no similarity below 0.7."""
_EMPTY = np.uint32(0xFFFFFFFF)
"""Of a bin without a shingle."""

Signature = npt.NDArray[np.uint32]
"""Least hash of each bin; shape (BINS,)."""
_Hashes = npt.NDArray[np.uint64]


class NearDuplicates:
    """The documents that were kept so far. About 800 bytes for each of them."""

    def __init__(self, similarity: float) -> None:
        """`similarity`: from which on a document repeats another one, 0 to 1."""
        self._similarity = similarity
        self._bands: list[dict[bytes, int]] = [{} for _ in range(BINS // BAND_BINS)]
        self._kept: list[bytes] = []

    def repeats(self, signature: Signature) -> bool:
        """Return whether a document is nearly equal to one that was kept; otherwise keep it.

        A document without shingles repeats none.
        """
        if bool((signature == _EMPTY).all()):
            return False
        keys = [band.tobytes() for band in signature.reshape(-1, BAND_BINS)]
        found = (band.get(key) for band, key in zip(self._bands, keys, strict=True))
        for index in {index for index in found if index is not None}:
            kept = np.frombuffer(self._kept[index], dtype=np.uint32)
            if similarity(signature, kept) >= self._similarity:
                return True
        for band, key in zip(self._bands, keys, strict=True):
            # A band without any shingle says nothing about a document.
            if key != _EMPTY.tobytes() * BAND_BINS:
                band.setdefault(key, len(self._kept))
        self._kept.append(signature.tobytes())
        return False


def similarity(one: Signature, other: Signature) -> float:
    """Return the estimate of the Jaccard index of two documents, 0 to 1.

    Its standard error is at most 0.06 where all bins are filled.
    """
    filled = (one != _EMPTY) | (other != _EMPTY)
    return float(((one == other) & filled).sum() / max(1, int(filled.sum())))


def no_signature() -> Signature:
    """The signature of an empty document."""
    return np.full(BINS, _EMPTY)


def add_shingles(signature: Signature, text: bytes) -> None:
    """Add the shingles of a piece of a document to its signature."""
    if len(text) < SHINGLE_BYTES:
        return
    hashes = _shingle_hashes(np.frombuffer(text, dtype=np.uint8))
    bins = (hashes >> np.uint64(64 - BINS.bit_length() + 1)).astype(np.intp)
    np.minimum.at(signature, bins, hashes.astype(np.uint32))


def _shingle_hashes(text: npt.NDArray[np.uint8]) -> _Hashes:
    """Hash the SHINGLE_BYTES bytes from each position on; shape (len(text) - SHINGLE_BYTES + 1,).

    Stretches of twice the length are hashed from two of half the length, so that the work does not
    grow with the length of a shingle.
    """
    hashes = mixed(text.astype(np.uint64))
    width = 1
    while width < SHINGLE_BYTES:
        hashes = mixed(hashes[:-width] * np.uint64(0x9E3779B97F4A7C15) + hashes[width:])
        width *= 2
    return hashes
