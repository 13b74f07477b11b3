"""The codecs' names, and how many bytes each makes of a tensor. No torch.

Every length follows from the number of values and the training dtype alone, so that a receiver
knows it before it takes a byte. All are multiples of four: what follows in a payload stays aligned.
"""

from __future__ import annotations

from typing import Literal, get_args

from swarm_shared.run.model_config import ComputeDtype

ActivationCodec = Literal["none", "float16", "bfloat16", "int8", "int4"]
GradientCodec = Literal["none", "float16", "bfloat16", "int8", "int4", "topk"]
CodecName = GradientCodec
AverageCodec = Literal["exact", "none", "float16", "int8"]
"""Of the vectors that a stage's peers average; their format is
swarm_client.averaging.all_reduce.codec's."""

ACTIVATION_CODECS: tuple[ActivationCodec, ...] = get_args(ActivationCodec)
GRADIENT_CODECS: tuple[GradientCodec, ...] = get_args(GradientCodec)
AVERAGE_CODECS: tuple[AverageCodec, ...] = get_args(AverageCodec)

DTYPE_BYTES: dict[ComputeDtype, int] = {"float32": 4, "bfloat16": 2}

SCALE_BYTES = 2
"""A bfloat16: float32's range, and gradients of any size need that more than digits."""

EXPONENT_BYTES = 4
"""Before a float16 tensor, the power of two that it was divided by."""

INT8_BLOCK = 256
"""An outlier coarsens the steps of its own block only; scales take 0.8 % of the bytes."""

INT4_BLOCK = 64
"""At 15 levels a block's largest value decides the error of all: blocks have to be small."""

TOPK_BLOCK = 256
"""So that one byte says where in its block a value was."""

TOPK_KEPT = 16
"""Of each block, the largest."""

TOPK_VALUE_BYTES = 3
"""A bfloat16 and its place."""

_ALIGNMENT_BYTES = 4


def encoded_bytes(codec: CodecName, elements: int, dtype: ComputeDtype) -> int:
    """Bytes on the wire of a tensor of so many elements, whose dtype in the model is `dtype`."""
    return _aligned(payload_bytes(codec, elements, dtype))


def payload_bytes(codec: CodecName, elements: int, dtype: ComputeDtype) -> int:
    """The same without the zeros that fill it up to a multiple of four."""
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
            # The last block is whole on the wire.
            return blocks(elements, INT4_BLOCK) * (SCALE_BYTES + INT4_BLOCK // 2)
        case "topk":
            return blocks(elements, TOPK_BLOCK) * TOPK_KEPT * TOPK_VALUE_BYTES


def blocks(elements: int, block: int) -> int:
    """Blocks that so many elements fill, the last one perhaps in part."""
    return -(-elements // block)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
