"""The codecs' names and the encoded size of a tensor. No torch.

Every size follows from the number of values and the training dtype alone, so that a receiver knows
it before it accepts a byte. All are multiples of four, which keeps the rest of a payload aligned.
"""

from __future__ import annotations

from typing import Literal, get_args

from swarm_shared.run.model_config import ComputeDtype

ActivationCodec = Literal["none", "float16", "bfloat16", "int8", "int4"]
GradientCodec = Literal["none", "float16", "bfloat16", "int8", "int4", "topk"]
CodecName = GradientCodec
AverageCodec = Literal["exact", "none", "float16", "int8"]
"""Codec of the vectors that a stage's peers average; their format is in
`swarm_client.averaging.all_reduce.codec`."""

ACTIVATION_CODECS: tuple[ActivationCodec, ...] = get_args(ActivationCodec)
GRADIENT_CODECS: tuple[GradientCodec, ...] = get_args(GradientCodec)
AVERAGE_CODECS: tuple[AverageCodec, ...] = get_args(AverageCodec)

DTYPE_BYTES: dict[ComputeDtype, int] = {"float32": 4, "bfloat16": 2}

SCALE_BYTES = 2
"""Size of a bfloat16 scale: it has float32's range, which gradients of any size need more than
digits."""

EXPONENT_BYTES = 4
"""Size of the exponent before a float16 tensor: the power of two that the tensor was divided by."""

INT8_BLOCK = 256
"""Values a block: an outlier coarsens the steps of its own block only; scales take 0.8 % of the
bytes."""

INT4_BLOCK = 64
"""Values a block: with 15 levels a block's largest value decides the error of all, so blocks are
small."""

TOPK_BLOCK = 256
"""Values a block, so that one byte holds the index of a value in its block."""

TOPK_KEPT = 16
"""Values kept of each block, the largest ones."""

TOPK_VALUE_BYTES = 3
"""Size of a bfloat16 and its index."""

_ALIGNMENT_BYTES = 4


def encoded_bytes(codec: CodecName, elements: int, dtype: ComputeDtype) -> int:
    """Return the bytes on the wire of a tensor of so many elements, whose dtype in the model is
    `dtype`."""
    return _aligned(payload_bytes(codec, elements, dtype))


def payload_bytes(codec: CodecName, elements: int, dtype: ComputeDtype) -> int:
    """Return the size without the zeros that fill it up to a multiple of four."""
    match codec:
        case "none":
            return elements * DTYPE_BYTES[dtype]
        case "float16":
            return EXPONENT_BYTES + 2 * elements
        case "bfloat16":
            return 2 * elements
        case "int8":
            return SCALE_BYTES * blocks(elements, INT8_BLOCK) + elements
        case "int4":
            # The last block is sent whole.
            return blocks(elements, INT4_BLOCK) * (SCALE_BYTES + INT4_BLOCK // 2)
        case "topk":
            return blocks(elements, TOPK_BLOCK) * TOPK_KEPT * TOPK_VALUE_BYTES


def blocks(elements: int, block: int) -> int:
    """Return the number of blocks for so many elements; the last one may be partly filled."""
    return -(-elements // block)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
