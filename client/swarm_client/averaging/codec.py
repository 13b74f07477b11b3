"""How one piece of a float32 vector becomes bytes, and back. Pure.

    none      little-endian float32
    float16   little-endian float16 times 2**exponent, the exponent chosen per piece so that the
              largest element lies in [2**14, 2**15]: gradients of any scale keep float16's 11
              bits without overflow, and scaling by a power of two rounds nothing

P: elements of one piece.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm_client.averaging.plan import Codec
from swarm_shared.errors import SwarmError

Float32 = NDArray[np.float32]

_TARGET_EXPONENT = 15
# 2**100 and its inverse are ordinary float32; elements below 2**-115 become 0 in float16.
_MIN_EXPONENT = -100
_MAX_EXPONENT = 112


class NotFiniteError(SwarmError):
    """An element is infinite or not a number. `member` is its index in the group, or None."""

    def __init__(self, member: int | None = None) -> None:
        super().__init__("an element is infinite or not a number")
        self.member = member


@dataclass(frozen=True, slots=True)
class EncodedPiece:
    exponent: int
    payload: memoryview


def payload_bytes(elements: int, codec: Codec) -> int:
    return elements * (2 if codec == "float16" else 4)


def exponent_is_valid(exponent: int, codec: Codec) -> bool:
    if codec == "float16":
        return _MIN_EXPONENT <= exponent <= _MAX_EXPONENT
    return exponent == 0


def encode_piece(values_P: Float32, codec: Codec) -> EncodedPiece:
    """NotFiniteError when an element is not finite (or does not fit). `none` does not copy."""
    if codec == "none":
        check_finite(values_P)
        return EncodedPiece(0, values_P.astype("<f4", copy=False).data.cast("B"))
    largest = float(np.abs(values_P).max())
    if not math.isfinite(largest):
        raise NotFiniteError
    exponent = max(_MIN_EXPONENT, math.frexp(largest)[1] - _TARGET_EXPONENT)
    if exponent > _MAX_EXPONENT:
        raise NotFiniteError
    scaled_P = values_P * np.float32(2.0**-exponent)
    return EncodedPiece(exponent, scaled_P.astype("<f2").data.cast("B"))


def decode_piece(exponent: int, payload: memoryview, codec: Codec) -> Float32:
    """The piece as float32; for `none` a view on the payload."""
    if codec == "none":
        return np.frombuffer(payload, "<f4").astype(np.float32, copy=False)
    values_P = np.frombuffer(payload, "<f2").astype(np.float32)
    values_P *= np.float32(2.0**exponent)
    return values_P


def check_finite(values_P: Float32, member: int | None = None) -> None:
    if not np.isfinite(values_P).all():
        raise NotFiniteError(member)


def reduce_piece(
    own_P: Float32, inputs: Sequence[EncodedPiece | None], codec: Codec, out_P: Float32
) -> EncodedPiece:
    """Sum one piece over the group, in group order: member 0 + member 1 + …, in float32.

    inputs holds what each member sent, in group order, None in this member's own place. Returns
    what goes back to the members; `out_P` gets exactly what they will decode.
    """
    total_P: Float32 | None = None
    for member, encoded in enumerate(inputs):
        if encoded is None:
            values_P = own_P
        else:
            values_P = decode_piece(encoded.exponent, encoded.payload, codec)
        check_finite(values_P, member)
        if total_P is None:
            total_P = values_P.copy()
        else:
            with np.errstate(over="ignore"):  # found by the check in encode_piece
                total_P += values_P
    assert total_P is not None
    summed = encode_piece(total_P, codec)
    out_P[:] = decode_piece(summed.exponent, summed.payload, codec)
    return summed
