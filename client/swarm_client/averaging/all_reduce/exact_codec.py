"""Whole numbers in as few bytes as each block of them needs. Pure and lossless.

A piece of float64 whose elements are whole and below 2**53 in magnitude
(`swarm_shared.model.fixed_point_sums`):

    widths   a byte per block of 256 elements: 0 to 7, the bytes that each of its elements takes;
             the last block is padded with zeros
    levels   the elements of all blocks of width 1, then of width 2 and so on, in the blocks' order:
             little-endian two's complement

Gradients of a layer have one magnitude, and rows of a token table without a token are zero: most
blocks take three bytes per element or none.

P: elements of one piece. B: blocks. S: elements of one block.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64 = NDArray[np.float64]
Whole = NDArray[np.int64]

BLOCK = 256
"""Elements per block. One large element widens its own block only; widths take 0.4 % of a byte per
element."""

WIDEST = 7
"""Bytes of 2**53 with its sign."""

_WORD = 8
_LARGEST = np.array([0.0, *(2.0 ** (8 * width - 1) - 1 for width in range(1, WIDEST))])
"""The largest magnitude that fits into each width."""


def blocks(elements: int) -> int:
    """Return the number of blocks of a piece."""
    return -(-elements // BLOCK)


def least_bytes(elements: int) -> int:
    """Return the length of the shortest encoding, in which every block is of width 0."""
    return blocks(elements)


def most_bytes(elements: int) -> int:
    """Return the length of the longest encoding, in which every block is of width WIDEST."""
    return blocks(elements) * (1 + WIDEST * BLOCK)


def is_valid(payload: memoryview, elements: int) -> bool:
    """Whether these bytes encode a piece of `elements` elements."""
    count = blocks(elements)
    widths_B = np.frombuffer(payload, np.uint8)[:count]
    return (
        len(widths_B) == count
        and int(widths_B.max(initial=0)) <= WIDEST
        and payload.nbytes == count + BLOCK * int(widths_B.sum(dtype=np.int64))
    )


def encode(values_P: Float64 | Whole) -> memoryview:
    """Encode elements that the caller has checked: whole, and below 2**53."""
    count = blocks(len(values_P))
    levels_BS = np.zeros((count, BLOCK), np.int64)
    levels_BS.reshape(-1)[: len(values_P)] = values_P
    largest_B = np.maximum(levels_BS.max(axis=1), -levels_BS.min(axis=1))
    widths_B = np.searchsorted(_LARGEST, largest_B).astype(np.uint8)
    payload = np.empty(count + BLOCK * int(widths_B.sum(dtype=np.int64)), np.uint8)
    payload[:count] = widths_B
    octets_BSW = levels_BS.astype("<i8", copy=False).view(np.uint8).reshape(count, BLOCK, _WORD)
    start = count
    for width in range(1, WIDEST + 1):
        chosen = octets_BSW[widths_B == width, :, :width]
        payload[start : start + chosen.size] = chosen.reshape(-1)
        start += chosen.size
    return payload.data


def decode(payload: memoryview, elements: int) -> Whole:
    """Decode a payload that `is_valid` has accepted: elements below 2**55 in magnitude."""
    count = blocks(elements)
    octets = np.frombuffer(payload, np.uint8)
    widths_B = octets[:count]
    levels_BS = np.zeros((count, BLOCK), np.int64)
    start = count
    for width in range(1, WIDEST + 1):
        of_this = widths_B == width
        size = int(of_this.sum()) * BLOCK * width
        if size:
            words = np.zeros((size // width, _WORD), np.uint8)
            words[:, _WORD - width :] = octets[start : start + size].reshape(-1, width)
            # An arithmetic shift extends the sign.
            levels = words.view("<i8").reshape(-1) >> (8 * (_WORD - width))
            levels_BS[of_this] = levels.reshape(-1, BLOCK)
            start += size
    return levels_BS.reshape(-1)[:elements]
