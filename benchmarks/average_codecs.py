"""Time, size and error of the all-reduce codecs, compared with hivemind's: part of `bench-codecs`.

Each codec in turn encodes and decodes a vector of gradients, cut into the pieces that an averaging
round sends. The vector is normal noise in which every 4,096 elements have their own magnitude, over
three powers of ten, like the rows and layers of a model's gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from swarm_client.averaging.all_reduce.codec import decode_piece, encode_piece
from swarm_client.averaging.all_reduce.plan import PIECE_ELEMENTS
from swarm_shared.run.codec_sizes import AVERAGE_CODECS, AverageCodec

PIECES = 8
STRETCH_ELEMENTS = 4096
MAGNITUDES = (-6.0, -3.0)
"""Exponents of the smallest and largest magnitude, base ten."""
QUANTUM = 2.0**-36
"""Quantum of a run with the default epsilon, over its tokens: `exact_sums`."""

RoundTrip = Callable[[], tuple[int, float, float, Tensor]]
"""Returns bytes, seconds of encoding and of decoding, and the decoded tensor."""


def gradients() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    count = PIECES * PIECE_ELEMENTS
    powers = torch.empty(count // STRETCH_ELEMENTS, 1).uniform_(*MAGNITUDES, generator=generator)
    vector = torch.randn(len(powers), STRETCH_ELEMENTS, generator=generator) * 10.0**powers
    return vector.view(count)


def our_averages(vector: Tensor) -> dict[str, RoundTrip]:
    return {name: _ours(name, vector) for name in AVERAGE_CODECS}


def _ours(name: AverageCodec, vector: Tensor) -> RoundTrip:
    values = vector.numpy()
    if name == "exact":
        values = np.rint(values.astype(np.float64) / QUANTUM)
    pieces = np.split(values, PIECES)

    def turn() -> tuple[int, float, float, Tensor]:
        began = time.perf_counter()
        sent = [encode_piece(piece, name) for piece in pieces]
        encoded = time.perf_counter()
        taken = [decode_piece(one.exponent, one.payload, name, PIECE_ELEMENTS) for one in sent]
        decoded = time.perf_counter()
        nbytes = sum(one.payload.nbytes for one in sent)
        found = torch.from_numpy(np.concatenate(taken))
        if name == "exact":
            found = found * QUANTUM
        return nbytes, encoded - began, decoded - encoded, found

    return turn


def hivemind_averages(vector: Tensor) -> dict[str, RoundTrip]:
    """Return hivemind's compressions of whole parts by name; empty where it is not installed."""
    try:
        from benchmarks.wan import hivemind_parts
    except ImportError:
        return {}
    found: dict[str, RoundTrip] = {}
    for name in ("FLOAT16", "MEANSTD_16BIT", "UNIFORM_8BIT", "QUANTILE_8BIT", "BLOCKWISE_8BIT"):
        turn = _hivemind(hivemind_parts, name, vector)
        try:
            turn()
        except ImportError:
            # BLOCKWISE_8BIT needs bitsandbytes, which is not a dependency of hivemind.
            continue
        found[f"hivemind {name}"] = turn
    return found


def _hivemind(parts: Any, name: str, vector: Tensor) -> RoundTrip:
    kind = getattr(parts.CompressionType, name)
    pieces = vector.view(PIECES, PIECE_ELEMENTS).unbind()

    def turn() -> tuple[int, float, float, Tensor]:
        began = time.perf_counter()
        sent = [parts.compressed(piece, kind) for piece in pieces]
        encoded = time.perf_counter()
        taken = [parts.decompressed(payload) for payload in sent]
        decoded = time.perf_counter()
        nbytes = sum(len(payload) for payload in sent)
        return nbytes, encoded - began, decoded - encoded, torch.cat(taken)

    return turn
