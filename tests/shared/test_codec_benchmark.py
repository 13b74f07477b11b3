"""What benchmarks conclude about codecs from what they measured."""

from __future__ import annotations

import pytest

from benchmarks.codec_choice import Pair, choose
from benchmarks.codecs import Cost, pays_below


def test_a_codec_pays_below_the_rate_at_which_its_bytes_make_up_for_its_time() -> None:
    costs = {"plain": Cost(1000, 1.0), "half": Cost(500, 1.5), "free": Cost(100, 0.5)}
    rates = pays_below(costs)
    assert rates == {"half": pytest.approx(1000), "free": None}
    for rate, faster in ((900, "half"), (1100, "plain")):
        seconds = {name: one.seconds + one.nbytes / rate for name, one in costs.items()}
        assert min(("plain", "half"), key=seconds.__getitem__) == faster


PAIRS = {
    "plain": Pair("plain", "plain", 0.0),
    "small": Pair("small", "small", 0.004),
    "tiny": Pair("small", "tiny", 0.04),
}
COSTS = {"plain": Cost(4000, 0.0), "small": Cost(1000, 1.0), "tiny": Cost(100, 3.0)}


@pytest.mark.parametrize(
    ("rate", "budget", "chosen"),
    [
        (100.0, 1.0, "tiny"),
        # The same line, and less that may be lost.
        (100.0, 0.01, "small"),
        (100.0, 0.001, "plain"),
        # A line that is faster than encoding.
        (1e6, 1.0, "plain"),
        (1000.0, 1.0, "small"),
        (100.0, -0.1, None),
    ],
)
def test_the_fastest_of_what_is_good_enough_is_chosen(
    rate: float, budget: float, chosen: str | None
) -> None:
    assert choose(PAIRS, COSTS, rate, budget) == chosen
