"""Which pair of codecs a run should have, from what was measured. Pure.

A microbatch at a border takes, each way, encoding, the line and decoding. Of the pairs whose loss
an organiser accepts, the one that takes least is chosen: on slow lines the one of fewest bytes, on
fast ones the one that is soonest encoded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.run.codec_sizes import ActivationCodec, GradientCodec

MEGABIT_BYTES = 1e6 / 8


class CodecPair(FrozenModel):
    activation: ActivationCodec
    gradient: GradientCodec
    gap_relative: float
    """Of the final held-out loss, against none; measured over seeds."""

    @property
    def name(self) -> str:
        return pair_name(self.activation, self.gradient)


@dataclass(frozen=True, slots=True)
class Cost:
    """Of one tensor in one codec."""

    nbytes: int
    seconds: float
    """Encoding and decoding."""


def pair_name(activation: str, gradient: str) -> str:
    return f"{activation} / {gradient}"


def seconds(pair: CodecPair, costs: Mapping[str, Cost], bytes_per_second: float) -> float:
    """Of one microbatch at one border, there and back, on a line of this rate each way."""
    return sum(
        costs[codec].seconds + costs[codec].nbytes / bytes_per_second
        for codec in (pair.activation, pair.gradient)
    )


def accepted(pairs: Mapping[str, CodecPair], largest_relative_gap: float) -> dict[str, CodecPair]:
    return {name: one for name, one in pairs.items() if one.gap_relative <= largest_relative_gap}


def choose(
    pairs: Mapping[str, CodecPair],
    costs: Mapping[str, Cost],
    bytes_per_second: float,
    largest_relative_gap: float,
) -> str | None:
    """The name of the fastest pair within the budget; None when there is none.

    `costs` has at least the codecs of the pairs that are accepted.
    """
    within = accepted(pairs, largest_relative_gap)
    if not within:
        return None
    return min(within, key=lambda name: seconds(within[name], costs, bytes_per_second))
