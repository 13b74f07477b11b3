"""The pair of codecs for a line: the fastest of what loses little enough."""

from __future__ import annotations

import pytest

from swarm_shared.codecs.choice import CodecPair, Cost, choose, seconds
from swarm_shared.run.codec_sizes import ActivationCodec, GradientCodec


def pair(activation: ActivationCodec, gradient: GradientCodec, gap: float) -> CodecPair:
    return CodecPair(activation=activation, gradient=gradient, gap_relative=gap)


PAIRS = {
    one.name: one
    for one in (
        pair("none", "none", 0.0),
        pair("int8", "int8", 0.004),
        pair("int8", "topk", 0.04),
    )
}
COSTS = {"none": Cost(4000, 0.0), "int8": Cost(1000, 1.0), "topk": Cost(100, 3.0)}


@pytest.mark.parametrize(
    ("rate", "budget", "chosen"),
    [
        (100.0, 1.0, "int8 / topk"),
        # The same line, and less that may be lost.
        (100.0, 0.01, "int8 / int8"),
        (100.0, 0.001, "none / none"),
        # A line that is faster than encoding.
        (1e6, 1.0, "none / none"),
        (1000.0, 1.0, "int8 / int8"),
        (100.0, -0.1, None),
    ],
)
def test_the_fastest_of_what_is_good_enough_is_chosen(
    rate: float, budget: float, chosen: str | None
) -> None:
    assert choose(PAIRS, COSTS, rate, budget) == chosen


def test_what_no_accepted_pair_uses_need_not_have_been_measured() -> None:
    costs = {name: COSTS[name] for name in ("none", "int8")}
    assert choose(PAIRS, costs, 100.0, 0.01) == "int8 / int8"


def test_a_microbatch_crosses_a_border_once_in_each_codec() -> None:
    assert seconds(PAIRS["int8 / topk"], COSTS, 100.0) == pytest.approx(1 + 10 + 3 + 1)
