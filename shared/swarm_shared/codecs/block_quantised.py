"""int8 and int4: values as integer multiples of a scale shared by their block.

    payload    the blocks' scales (bfloat16), then their values
    scale      largest magnitude of the block over the largest level, to the nearest bfloat16
    int8       256 values a block, levels -127 to 127, a byte each; the last block may be short
    int4       64 values a block, levels -7 to 7, plus 8 a nibble each; byte i of a block holds
               value i (low) and value i + 32 (high); the last block is filled up with zeros

The quantisation is symmetric: zero stays zero. Rounding is to the nearest, ties to even, so an
error is at most half a scale. A bfloat16's relative error is below 1/256, so that the largest value
of a block always falls on its largest level (127 / (1 + 1/256) > 126.5): in float32 a decoded
tensor encodes to the same bytes again.

The two ends of the range are exceptions. A block below 2**-126 times its largest level becomes
zeros, because smaller scales have no full mantissa. Scales end just below 2**121 (2**125 for int4),
so that no byte, of whatever origin, decodes to an infinity: the largest floats, beyond 3.3e38
(2.9e38), come back as the largest multiple there is.

Shape suffixes: N values, B blocks, S values of one block. All arithmetic is float32, elementwise or
a maximum, so that neither threads nor vector width affect the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_shared.codecs.errors import CodecError
from swarm_shared.run.codec_sizes import INT4_BLOCK, INT8_BLOCK, SCALE_BYTES, blocks

SMALLEST_SCALE = 2.0**-126
"""Smallest scale that is written; below it float32 loses mantissa bits."""

_CHUNK_ELEMENTS = 1 << 20
"""Elements encoded at a time: 4 MiB of float32 beside the tensor, which fits a processor's
cache."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The quantisation levels of one codec."""

    block: int
    top: int
    """The largest level."""
    packed: bool

    @property
    def largest_scale(self) -> float:
        """The last bfloat16 below 2**128 over the smallest level that a byte can hold."""
        return (1 - 2.0**-8) * 2.0**128 / (self.top + 1)

    @property
    def block_bytes(self) -> int:
        return self.block // 2 if self.packed else self.block


INT8 = Grid(INT8_BLOCK, 127, packed=False)
INT4 = Grid(INT4_BLOCK, 7, packed=True)


def encode_scaled(values_N: Tensor, out: Tensor, grid: Grid) -> None:
    """Write finite values into `out`, whose size is exact; CodecError for other values."""
    count = values_N.numel()
    scales_B, data = _parts(out, count, grid)
    step = _CHUNK_ELEMENTS // grid.block * grid.block
    whole = count // grid.block * grid.block
    for start in range(0, whole, step):
        stop = min(start + step, whole)
        _encode_blocks(
            values_N[start:stop].view(-1, grid.block),
            scales_B[start // grid.block : stop // grid.block],
            _bytes_of(data, start, stop, grid),
            grid,
        )
    if whole < count:
        last_BS = torch.zeros(1, grid.block, device=values_N.device)
        last_BS[0, : count - whole] = values_N[whole:]
        room = torch.empty(grid.block_bytes, dtype=torch.int8, device=out.device)
        _encode_blocks(last_BS, scales_B[-1:], room, grid)
        left = _bytes_of(data, whole, count, grid)
        left.copy_(room[: left.numel()])


def decode_scaled(data: Tensor, count: int, grid: Grid) -> Tensor:
    """Return the float32 values_N, always finite; CodecError for bytes that no sender writes."""
    scales_B, packed = _parts(data, count, grid)
    scales_B1 = _checked_scales(scales_B, grid)[:, None]
    if grid.packed:
        values_N = torch.empty(scales_B.numel() * grid.block, device=data.device)
        halves = values_N.view(-1, 2, grid.block // 2)
        nibbles = packed.view(torch.uint8).view(len(halves), -1)
        halves[:, 0] = nibbles & 15
        halves[:, 1] = nibbles >> 4
        values_N.sub_(grid.top + 1)
    else:
        values_N = packed.to(torch.float32)
    whole = count // grid.block
    values_N[: whole * grid.block].view(whole, grid.block).mul_(scales_B1[:whole])
    if whole < len(scales_B1):
        values_N[whole * grid.block :].mul_(scales_B1[-1])
    if values_N[count:].any():
        raise CodecError("the levels that fill a tensor's last block up are not zero")
    return values_N[:count]


def _encode_blocks(values_BS: Tensor, scales_B: Tensor, data: Tensor, grid: Grid) -> None:
    values_BS = values_BS.to(torch.float32)
    largest_B = torch.maximum(values_BS.amax(1), values_BS.amin(1).neg_())
    rough_B = largest_B.div_(grid.top)
    highest = float(rough_B.max())
    if not highest < float("inf"):
        raise CodecError(
            "a tensor holds infinities or NaNs, which no block of levels can represent"
        )
    scales_B.copy_(rough_B.clamp_(max=grid.largest_scale))
    # The scale as the receiver will read it.
    exact_B = scales_B.to(torch.float32)
    empty_B = exact_B < SMALLEST_SCALE
    scales_B.masked_fill_(empty_B, 0.0)
    levels_BS = values_BS / exact_B.masked_fill_(empty_B, float("inf"))[:, None]
    levels_BS.round_()
    if highest >= grid.largest_scale:
        levels_BS.clamp_(-grid.top, grid.top)
    if not grid.packed:
        data.view(values_BS.shape).copy_(levels_BS)
        return
    levels_BS.add_(grid.top + 1)
    half = grid.block // 2
    levels = levels_BS.to(torch.uint8)
    nibbles = levels[:, half:].bitwise_left_shift(4).bitwise_or_(levels[:, :half])
    data.view(torch.uint8).view(nibbles.shape).copy_(nibbles)


def _checked_scales(scales_B: Tensor, grid: Grid) -> Tensor:
    wide_B = scales_B.to(torch.float32)
    if wide_B.numel():
        low, high = torch.aminmax(wide_B)
        # Comparisons with NaN are false.
        if not (float(low) >= 0 and float(high) <= grid.largest_scale):
            raise CodecError(
                f"a block's scale lies outside 0 to {grid.largest_scale:.3g}; no sender writes it"
            )
    return wide_B


def _parts(data: Tensor, count: int, grid: Grid) -> tuple[Tensor, Tensor]:
    """Return scales_B (bfloat16) and the bytes behind them (int8), views of the payload."""
    scale_bytes = SCALE_BYTES * blocks(count, grid.block)
    return data[:scale_bytes].view(torch.bfloat16), data[scale_bytes:].view(torch.int8)


def _bytes_of(data: Tensor, start: int, stop: int, grid: Grid) -> Tensor:
    """Return the bytes of the values from `start`, which begins a block, to `stop`."""
    if grid.packed:
        return data[start // 2 : blocks(stop, grid.block) * grid.block_bytes]
    return data[start:stop]
