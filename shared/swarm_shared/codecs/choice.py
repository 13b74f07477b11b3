"""The choice of a run's pair of codecs from measured costs. Pure functions.

At a stage boundary a microbatch takes, each way, encoding, sending and decoding. Of the pairs whose
loss an organiser accepts, the one that takes least time is chosen: on slow links the one of fewest
bytes, on fast links the one that encodes fastest.
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
    """Relative increase of the final held-out loss over no codec; measured over seeds."""

    @property
    def name(self) -> str:
        return pair_name(self.activation, self.gradient)


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of one tensor in one codec."""

    nbytes: int
    seconds: float
    """Time of encoding and decoding."""


def pair_name(activation: str, gradient: str) -> str:
    return f"{activation} / {gradient}"


def seconds(pair: CodecPair, costs: Mapping[str, Cost], bytes_per_second: float) -> float:
    """Return the time of one microbatch at one boundary, there and back, at this rate each way."""
    return sum(
        costs[codec].seconds + costs[codec].nbytes / bytes_per_second
        for codec in (pair.activation, pair.gradient)
    )


def accepted(pairs: Mapping[str, CodecPair], largest_relative_gap: float) -> dict[str, CodecPair]:
    """Return the pairs whose relative gap is within the limit."""
    return {name: one for name, one in pairs.items() if one.gap_relative <= largest_relative_gap}


def choose(
    pairs: Mapping[str, CodecPair],
    costs: Mapping[str, Cost],
    bytes_per_second: float,
    largest_relative_gap: float,
) -> str | None:
    """Return the name of the fastest pair within the limit; None when there is none.

    `costs` has at least the codecs of the accepted pairs.
    """
    within = accepted(pairs, largest_relative_gap)
    if not within:
        return None
    return min(within, key=lambda name: seconds(within[name], costs, bytes_per_second))
