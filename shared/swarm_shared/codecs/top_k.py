"""top-k: the 16 largest of every block of 256 values; the others become zero. For gradients.

    payload    bfloat16 values, 16 a block, then their indices in the block, a byte each; indices
               ascend within a block

Values are compared as the bfloat16 that is sent, and of equals the first is kept, so that the
selection is the same on every machine. The last block is filled up with zeros. The values left out
are not remembered (decision 0021 gives the reason): the codec is a pure function of the tensor.

Shape suffixes: N values, B blocks, S values of one block, K values kept of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from swarm_shared.codecs.errors import CodecError
from swarm_shared.run.codec_sizes import TOPK_BLOCK, TOPK_KEPT, blocks

_CHUNK_BLOCKS = 4096


def encode_sparse(values_N: Tensor, out: Tensor) -> None:
    """Write finite values into `out`, whose size is exact; CodecError for other values."""
    count = values_N.numel()
    values_BK, places_BK = _parts(out, count)
    whole = count // TOPK_BLOCK
    whole_BS = values_N[: whole * TOPK_BLOCK].view(-1, TOPK_BLOCK)
    for start in range(0, whole, _CHUNK_BLOCKS):
        part = slice(start, min(start + _CHUNK_BLOCKS, whole))
        _encode_blocks(whole_BS[part], values_BK[part], places_BK[part])
    if whole < len(values_BK):
        last_BS = torch.zeros(1, TOPK_BLOCK, device=values_N.device)
        last_BS[0, : count - whole * TOPK_BLOCK] = values_N[whole * TOPK_BLOCK :]
        _encode_blocks(last_BS, values_BK[-1:], places_BK[-1:])


def decode_sparse(data: Tensor, count: int) -> Tensor:
    """Return the float32 values_N, finite; CodecError for bytes that no sender writes."""
    values_BK, places_BK = _parts(data, count)
    wide_BK = values_BK.to(torch.float32)
    places_BK = places_BK.to(torch.int64)
    if not bool(wide_BK.isfinite().all()):
        raise CodecError("a sparse tensor holds infinities or NaNs")
    if not bool((places_BK.diff(dim=1) > 0).all()):
        raise CodecError("the places of a sparse block do not ascend")
    dense_BS = torch.zeros(len(wide_BK), TOPK_BLOCK, device=data.device)
    dense_BS.scatter_(1, places_BK, wide_BK)
    values_N = dense_BS.view(-1)
    if values_N[count:].any():
        raise CodecError("a sparse tensor names places behind its end")
    return values_N[:count]


def _encode_blocks(values_BS: Tensor, kept_BK: Tensor, places_BK: Tensor) -> None:
    bounds = torch.aminmax(values_BS)
    if not all(abs(float(bound)) < float("inf") for bound in bounds):
        raise CodecError("a tensor holds infinities or NaNs; it cannot be sent")
    limit = torch.finfo(torch.bfloat16).max
    narrow_BS = values_BS.clamp(-limit, limit).to(torch.bfloat16)
    # A unique key per value: the magnitude's bits, then the index counted from the end.
    backwards_S = torch.arange(TOPK_BLOCK - 1, -1, -1, dtype=torch.int32, device=values_BS.device)
    key_BS = (narrow_BS.view(torch.int16) & 0x7FFF).to(torch.int32)
    key_BS.mul_(TOPK_BLOCK).add_(backwards_S)
    top_BK = key_BS.topk(TOPK_KEPT, dim=1, sorted=False).values
    place_BK = (TOPK_BLOCK - 1 - (top_BK & (TOPK_BLOCK - 1))).to(torch.int64).sort(dim=1).values
    kept_BK.copy_(narrow_BS.gather(1, place_BK))
    places_BK.copy_(place_BK)


def _parts(data: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return values_BK (bfloat16) and places_BK (uint8), views of the payload."""
    kept = blocks(count, TOPK_BLOCK) * TOPK_KEPT
    values_BK = data[: 2 * kept].view(torch.bfloat16).view(-1, TOPK_KEPT)
    return values_BK, data[2 * kept :].view(-1, TOPK_KEPT)
