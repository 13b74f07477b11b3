"""What benchmarks conclude about codecs from what they measured."""

from __future__ import annotations

import pytest

from benchmarks.codecs import Cost, pays_below


def test_a_codec_pays_below_the_rate_at_which_its_bytes_make_up_for_its_time() -> None:
    costs = {"plain": Cost(1000, 1.0), "half": Cost(500, 1.5), "free": Cost(100, 0.5)}
    rates = pays_below(costs)
    assert rates == {"half": pytest.approx(1000), "free": None}
    for rate, faster in ((900, "half"), (1100, "plain")):
        seconds = {name: one.seconds + one.nbytes / rate for name, one in costs.items()}
        assert min(("plain", "half"), key=seconds.__getitem__) == faster
