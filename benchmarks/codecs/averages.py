"""Time, size and error of the all-reduce codecs, compared with hivemind's: part of `bench-codecs`.

Each codec in turn encodes and decodes a vector of gradients, cut into the pieces that an averaging
round sends. The vector is normal noise in which every 4,096 elements have their own magnitude, over
three powers of ten, like the rows and layers of a model's gradient.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

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

Sent = TypeVar("Sent")
Taken = TypeVar("Taken")


def round_trip(
    encode: Callable[[], Sent],
    decode: Callable[[Sent], Taken],
    outcome: Callable[[Sent, Taken], tuple[int, Tensor]],
) -> RoundTrip:
    """Time a codec; `outcome` returns its bytes and the decoded tensor, outside the times."""

    def turn() -> tuple[int, float, float, Tensor]:
        began = time.perf_counter()
        sent = encode()
        encoded = time.perf_counter()
        taken = decode(sent)
        decoded = time.perf_counter()
        nbytes, tensor = outcome(sent, taken)
        return nbytes, encoded - began, decoded - encoded, tensor

    return turn


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
    unit = QUANTUM if name == "exact" else 1.0
    return round_trip(
        lambda: [encode_piece(piece, name) for piece in pieces],
        lambda sent: [
            decode_piece(one.exponent, one.payload, name, PIECE_ELEMENTS) for one in sent
        ],
        lambda sent, taken: (
            sum(one.payload.nbytes for one in sent),
            unit * torch.from_numpy(np.concatenate(taken)),
        ),
    )


def hivemind_averages(parts: Any, vector: Tensor) -> dict[str, RoundTrip]:
    """Return hivemind's compressions of whole parts by name."""
    found: dict[str, RoundTrip] = {}
    for name in ("FLOAT16", "MEANSTD_16BIT", "UNIFORM_8BIT", "QUANTILE_8BIT", "BLOCKWISE_8BIT"):
        turn = hivemind_round_trip(parts, name, vector.chunk(PIECES))
        try:
            turn()
        except ImportError:
            # BLOCKWISE_8BIT needs bitsandbytes, which is not a dependency of hivemind.
            continue
        found[f"hivemind {name}"] = turn
    return found


def hivemind_round_trip(parts: Any, name: str, pieces: Sequence[Tensor]) -> RoundTrip:
    """Return one of hivemind's compressions of some pieces.

    `parts` is the module `benchmarks.wan.contenders.hivemind_parts`.
    """
    kind = getattr(parts.CompressionType, name)
    return round_trip(
        lambda: [parts.compressed(piece, kind) for piece in pieces],
        lambda sent: [parts.decompressed(payload) for payload in sent],
        lambda sent, taken: (sum(map(len, sent)), torch.cat(taken)),
    )
