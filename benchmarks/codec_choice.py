"""Which pair of codecs a run should have, from what was measured. Pure.

A microbatch at a border takes, each way, encoding, the line and decoding. Of the pairs whose loss
an organiser accepts, the one that takes least is chosen: on slow lines the one of fewest bytes, on
fast ones the one that is soonest encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.codecs import Cost, cost_of


@dataclass(frozen=True, slots=True)
class Pair:
    activation: str
    gradient: str
    gap_relative: float
    """Of the final held-out loss, against none; measured over seeds."""


def pairs_of(quality: Mapping[str, Any]) -> dict[str, Pair]:
    return {
        name: Pair(one["activation"], one["gradient"], one["gap_relative"])
        for name, one in quality["pairs"].items()
    }


def costs_of(codecs: Mapping[str, Any]) -> dict[str, Cost]:
    return {name: cost_of(one) for name, one in codecs["codecs"].items()}


def seconds(pair: Pair, costs: Mapping[str, Cost], bytes_per_second: float) -> float:
    """Of one microbatch, there and back, on a line of this rate each way."""
    return sum(
        costs[codec].seconds + costs[codec].nbytes / bytes_per_second
        for codec in (pair.activation, pair.gradient)
    )


def choose(
    pairs: Mapping[str, Pair],
    costs: Mapping[str, Cost],
    bytes_per_second: float,
    largest_relative_gap: float,
) -> str | None:
    """The name of the fastest pair within the budget; None when there is none."""
    accepted = [name for name, one in pairs.items() if one.gap_relative <= largest_relative_gap]
    if not accepted:
        return None
    return min(accepted, key=lambda name: seconds(pairs[name], costs, bytes_per_second))
