"""The encoding of one piece of a vector. Pure.

    exact     of a float64 vector of whole numbers: the bytes of `exact_codec`, variable in number
    none      little-endian float32; this and the others of a float32 vector
    float16   little-endian float16 times 2**exponent, the exponent chosen per piece so that the
              largest element lies in [2**14, 2**15]: gradients of any scale keep float16's 11
              bits without overflow, and scaling by a power of two rounds nothing
    int8      blocks of 256 elements, the last one perhaps short: a little-endian float32 scale
              per block, then a level (-127 to 127, a byte) per element
              scale    largest magnitude of the block / 127 in float32, at most (1 - 2**-24) 2**121
                       so that no byte decodes to an infinity; 0 when that is below 2**-126
              level    element / scale in float32, to the nearest, ties to even; 0 in a block
                       whose scale is 0
              element  float32(level) * scale, one rounding

The sum is encoded once, by its reducer, and every member decodes the same bytes by operations that
IEEE 754 defines to the bit, so that all members end equal on any machine. The loss of a lossy codec
depends on the group: each part but the reducer's own is rounded, then the sum.

The header carries an exponent for float16 only. Any bytes of the right length decode as an int8
payload: to finite elements, or, where a scale is not a number, to elements that `check_finite`
refuses. An `exact` payload is validated first (`payload_is_valid`).

P: elements of one piece. B: blocks. S: elements of one block.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm_client.averaging.all_reduce import exact_codec
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.codec_sizes import AverageCodec

Float32 = NDArray[np.float32]
Totals = NDArray[np.float32] | NDArray[np.float64]
"""The averaged values: float64 under `exact`, float32 under all other codecs."""

_EXACT_BELOW = 2.0**53

LARGEST_PART = 2.0**51
"""Largest count in what an honest member puts in: the counts of all microbatches of a step together
do not exceed it (`swarm_shared.model.fixed_point_sums.Quantum.max_counts`)."""

LARGEST_SUM = 2.0**52
"""Largest count in an honest sum: a microbatch is counted once in each stage, and a tied embedding
is summed over two stages."""

_TARGET_EXPONENT = 15
# 2**100 and its inverse are ordinary float32; elements below 2**-115 become 0 in float16.
_MIN_EXPONENT = -100
_MAX_EXPONENT = 112

INT8_BLOCK = 256
"""Elements per block. An outlier coarsens its own block only; scales take 1.6 % of the bytes."""
_SCALE_BYTES = 4
_TOP_LEVEL = np.float32(127)
_LARGEST_SCALE = np.float32((1 - 2.0**-24) * 2.0**121)
_SMALLEST_SCALE = np.float32(2.0**-126)


class NotFiniteError(SwarmError):
    """An element is infinite, not a number, or larger than honest counts can be. `member` is its
    index in the group, or None."""

    def __init__(self, member: int | None = None) -> None:
        super().__init__("an element is infinite, not a number or too large")
        self.member = member


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    """A piece in the bytes of its codec, with the exponent that goes into the header of its
    frame."""

    exponent: int
    payload: memoryview


def dtype_of(codec: AverageCodec) -> np.dtype[np.float32] | np.dtype[np.float64]:
    """Return the type of the totals that a codec encodes."""
    return np.dtype(np.float64) if codec == "exact" else np.dtype(np.float32)


def payload_sizes(elements: int, codec: AverageCodec) -> range:
    """Return the range of lengths, in bytes, that a payload may have."""
    if codec == "exact":
        return range(exact_codec.least_bytes(elements), exact_codec.most_bytes(elements) + 1)
    size = payload_bytes(elements, codec)
    return range(size, size + 1)


def payload_is_valid(payload: memoryview, elements: int, codec: AverageCodec) -> bool:
    """Whether a payload of permitted length encodes a piece of `elements` elements."""
    return codec != "exact" or exact_codec.is_valid(payload, elements)


def payload_bytes(elements: int, codec: AverageCodec) -> int:
    """The largest length of a payload; for all codecs but `exact` the only one."""
    match codec:
        case "exact":
            return exact_codec.most_bytes(elements)
        case "none":
            return 4 * elements
        case "float16":
            return 2 * elements
        case "int8":
            return _SCALE_BYTES * _blocks(elements) + elements


def exponent_is_valid(exponent: int, codec: AverageCodec) -> bool:
    """Whether a codec may name this exponent: 0 for all but float16."""
    if codec == "float16":
        return _MIN_EXPONENT <= exponent <= _MAX_EXPONENT
    return exponent == 0


def encode_piece(values_P: Totals, codec: AverageCodec) -> EncodedPiece:
    """Encode a piece. NotFiniteError if an element is not finite (or out of range). `none` does not
    copy."""
    if codec == "exact":
        # A single pass; a NaN fails the comparison too.
        if not (max(values_P.max(), -values_P.min()) < _EXACT_BELOW):
            raise NotFiniteError
        return EncodedPiece(0, exact_codec.encode(values_P.astype(np.float64, copy=False)))
    narrow_P = values_P.astype(np.float32, copy=False)
    match codec:
        case "none":
            check_finite(narrow_P)
            return EncodedPiece(0, narrow_P.astype("<f4", copy=False).data.cast("B"))
        case "float16":
            return _encode_float16(narrow_P)
        case "int8":
            return EncodedPiece(0, _encode_int8(narrow_P))


def _encode_float16(values_P: Float32) -> EncodedPiece:
    largest = float(np.abs(values_P).max())
    if not math.isfinite(largest):
        raise NotFiniteError
    exponent = max(_MIN_EXPONENT, math.frexp(largest)[1] - _TARGET_EXPONENT)
    if exponent > _MAX_EXPONENT:
        raise NotFiniteError
    scaled_P = values_P * np.float32(2.0**-exponent)
    return EncodedPiece(exponent, scaled_P.astype("<f2").data.cast("B"))


def decode_piece(exponent: int, payload: memoryview, codec: AverageCodec, elements: int) -> Totals:
    """Decode a piece; for `none` a view on the payload."""
    match codec:
        case "exact":
            return exact_codec.decode(payload, elements).astype(np.float64)
        case "none":
            return np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
        case "float16":
            values_P = np.frombuffer(payload, "<f2").astype(np.float32)
            values_P *= np.float32(2.0**exponent)
            return values_P
        case "int8":
            return _decode_int8(payload)


def _encode_int8(values_P: Float32) -> memoryview:
    blocks, whole = _blocks(len(values_P)), len(values_P) // INT8_BLOCK
    payload = np.empty(payload_bytes(len(values_P), "int8"), np.uint8)
    scales_B = payload[: _SCALE_BYTES * blocks].view("<f4")
    levels_P = payload[_SCALE_BYTES * blocks :].view(np.int8)
    end = whole * INT8_BLOCK
    if whole:
        _quantise(
            values_P[:end].reshape(whole, INT8_BLOCK),
            scales_B[:whole],
            levels_P[:end].reshape(whole, INT8_BLOCK),
        )
    if whole < blocks:
        _quantise(values_P[end:][None], scales_B[whole:], levels_P[end:][None])
    return payload.data


def _quantise(values_BS: Float32, scales_B: Float32, levels_BS: NDArray[np.int8]) -> None:
    largest_B = np.maximum(values_BS.max(axis=1), -values_BS.min(axis=1))
    # A NaN propagates through both.
    if not np.isfinite(largest_B).all():
        raise NotFiniteError
    exact_B = np.minimum(largest_B / _TOP_LEVEL, _LARGEST_SCALE)
    exact_B[exact_B < _SMALLEST_SCALE] = 0
    scales_B[:] = exact_B
    exact_B[exact_B == 0] = np.inf
    nearest_BS = values_BS / exact_B[:, None]
    np.rint(nearest_BS, out=nearest_BS)
    if largest_B.max() / _TOP_LEVEL >= _LARGEST_SCALE:
        np.clip(nearest_BS, -_TOP_LEVEL, _TOP_LEVEL, out=nearest_BS)
    np.copyto(levels_BS, nearest_BS, casting="unsafe")


def _decode_int8(payload: memoryview) -> Float32:
    # n elements make n + 4 * blocks(n) bytes, so that the length determines the blocks.
    blocks = -(-payload.nbytes // (INT8_BLOCK + _SCALE_BYTES))
    scales_B = np.frombuffer(payload, "<f4", blocks).astype(np.float32, copy=False)
    values_P = np.frombuffer(payload, np.int8, offset=_SCALE_BYTES * blocks).astype(np.float32)
    whole = len(values_P) // INT8_BLOCK
    end = whole * INT8_BLOCK
    # `check_finite` finds what a remote's bytes make of it.
    with np.errstate(over="ignore", invalid="ignore"):
        values_P[:end].reshape(whole, INT8_BLOCK)[:] *= scales_B[:whole, None]
        if end < len(values_P):
            values_P[end:] *= scales_B[-1]
    return values_P


def _blocks(elements: int) -> int:
    return -(-elements // INT8_BLOCK)


def check_finite(values_P: Totals, member: int | None = None) -> None:
    """Raise NotFiniteError, which names `member`, if an element is infinite or no number."""
    if not np.isfinite(values_P).all():
        raise NotFiniteError(member)


def check_sum(values_P: Totals, codec: AverageCodec, member: int | None = None) -> None:
    """Raise NotFiniteError, which names `member`, for elements that no sum of honest parts has."""
    if codec == "exact":
        _check_counts(values_P, LARGEST_SUM, member)
    else:
        check_finite(values_P, member)


def _check_counts(values_P: Totals | exact_codec.Whole, largest: float, member: int | None) -> None:
    # A single pass; a NaN fails the comparison too.
    if not (max(values_P.max(), -values_P.min()) <= largest):
        raise NotFiniteError(member)


def reduce_piece(
    own_P: Totals, inputs: Sequence[EncodedPiece | None], codec: AverageCodec, out_P: Totals
) -> EncodedPiece:
    """Sum one piece over the group in group order, member 0 + member 1 + …, in its own type.

    `inputs` holds what each member sent, in group order, with None for this member. Returns the
    encoded sum for the members; `out_P` gets exactly the values that they will decode.
    NotFiniteError names the member whose part cannot be summed.
    """
    if codec == "exact":
        return _reduce_counts(own_P, inputs, out_P)
    total_P: Totals | None = None
    for member, encoded in enumerate(inputs):
        if encoded is None:
            values_P = own_P
        else:
            values_P = decode_piece(encoded.exponent, encoded.payload, codec, len(own_P))
        check_finite(values_P, member)
        if total_P is None:
            total_P = values_P.copy()
        else:
            with np.errstate(over="ignore"):  # found by the check in encode_piece
                total_P += values_P
    assert total_P is not None
    summed = encode_piece(total_P, codec)
    out_P[:] = decode_piece(summed.exponent, summed.payload, codec, len(own_P))
    return summed


def _reduce_counts(
    own_P: Totals, inputs: Sequence[EncodedPiece | None], out_P: Totals
) -> EncodedPiece:
    """Sum in 64-bit integers: parts that are each within the limit cannot make a sum that is
    rounded, not even on the way."""
    total_P = np.zeros(len(own_P), np.int64)
    for member, encoded in enumerate(inputs):
        part_P = _counts(own_P, encoded)
        _check_counts(part_P, LARGEST_PART, member)
        total_P += part_P.astype(np.int64, copy=False)
    excess_P = np.abs(total_P) > LARGEST_SUM
    if excess_P.any():
        # Each microbatch is counted once: the member with the largest part is above its share.
        place = int(np.argmax(excess_P))
        parts = [abs(int(_counts(own_P, encoded)[place])) for encoded in inputs]
        raise NotFiniteError(parts.index(max(parts)))
    out_P[:] = total_P
    return EncodedPiece(0, exact_codec.encode(total_P))


def _counts(own_P: Totals, encoded: EncodedPiece | None) -> Totals | exact_codec.Whole:
    return own_P if encoded is None else exact_codec.decode(encoded.payload, len(own_P))
