"""Encoding a tensor into bytes and decoding it, by a codec's name.

Bytes from a remote are rejected (CodecError) before memory is taken for them when their length is
not the codec's, and afterwards when no sender writes them. A decoded tensor is finite. Shape
suffix: N values.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from swarm_shared.codecs import block_quantised, half_precision, top_k
from swarm_shared.codecs.errors import CodecError
from swarm_shared.run.codec_sizes import CodecName, encoded_bytes, payload_bytes
from swarm_shared.run.model_config import ComputeDtype

Buffer = memoryview | bytearray | bytes

DTYPES: dict[ComputeDtype, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES: dict[torch.dtype, ComputeDtype] = {dtype: name for name, dtype in DTYPES.items()}


def encode(codec: CodecName, tensor: Tensor, out: memoryview) -> int:
    """Write the tensor to the start of `out` and return the bytes written.

    The tensor's dtype is the one that the model computes in. CodecError when the tensor is not
    finite (`none` does not check).
    """
    values_N = tensor.detach().reshape(-1)
    dtype = _NAMES[tensor.dtype]
    nbytes = encoded_bytes(codec, values_N.numel(), dtype)
    assert out.nbytes >= nbytes, f"{nbytes} bytes do not fit a slot of {out.nbytes}"
    if not nbytes:
        return 0
    whole = _bytes_tensor(out[:nbytes])
    filled = payload_bytes(codec, values_N.numel(), dtype)
    whole[filled:].zero_()
    target = whole[:filled]
    match codec:
        case "none":
            half_precision.encode_unchanged(values_N, target)
        case "bfloat16":
            half_precision.encode_bfloat16(values_N, target)
        case "float16":
            half_precision.encode_float16(values_N, target)
        case "int8":
            block_quantised.encode_scaled(values_N, target, block_quantised.INT8)
        case "int4":
            block_quantised.encode_scaled(values_N, target, block_quantised.INT4)
        case "topk":
            top_k.encode_sparse(values_N, target)
    return nbytes


def decode(codec: CodecName, data: Buffer, shape: Sequence[int], dtype: ComputeDtype) -> Tensor:
    """Return a new tensor of this shape and dtype, all finite; CodecError for rejected bytes."""
    count = math.prod(shape)
    needed, seen = encoded_bytes(codec, count, dtype), memoryview(data).nbytes
    if seen != needed:
        raise CodecError(
            f"a tensor of shape {tuple(shape)} came with {seen} bytes; {needed} are needed in "
            f"{codec}: sender and receiver hold different manifests"
        )
    if not count:
        return torch.empty(tuple(shape), dtype=DTYPES[dtype])
    whole = _bytes_tensor(data)
    filled = payload_bytes(codec, count, dtype)
    if whole[filled:].any():
        raise CodecError("the bytes that fill a tensor up to a multiple of four are not zero")
    return _decoded(codec, whole[:filled], count, DTYPES[dtype]).view(tuple(shape))


def round_trip(codec: CodecName, tensor: Tensor) -> Tensor:
    """Return what the receiver of this tensor computes with."""
    name = _NAMES[tensor.dtype]
    payload = memoryview(bytearray(encoded_bytes(codec, tensor.numel(), name)))
    encode(codec, tensor.cpu(), payload)
    return decode(codec, payload, tensor.shape, name).to(tensor.device)


def _decoded(codec: CodecName, data: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    match codec:
        case "none":
            return half_precision.decode_unchanged(data, dtype)
        case "bfloat16":
            return half_precision.decode_bfloat16(data, dtype)
        case "float16":
            return half_precision.decode_float16(data, dtype)
        case "int8":
            return block_quantised.decode_scaled(data, count, block_quantised.INT8).to(dtype)
        case "int4":
            return block_quantised.decode_scaled(data, count, block_quantised.INT4).to(dtype)
        case "topk":
            return top_k.decode_sparse(data, count).to(dtype)


def _bytes_tensor(data: Buffer) -> Tensor:
    with warnings.catch_warnings():
        # Decoders only read the buffer.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(data, dtype=torch.uint8)
