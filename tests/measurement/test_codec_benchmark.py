"""What is concluded about codecs from what was measured."""

from __future__ import annotations

import json

import pytest

from benchmarks.codecs.__main__ import pays_below
from benchmarks.loss.quality import package_table
from benchmarks.outcome import RESULTS
from swarm_shared.codecs.choice import Cost
from swarm_shared.codecs.quality import measured_noise, quality_table


def test_a_codec_pays_below_the_rate_at_which_its_bytes_make_up_for_its_time() -> None:
    costs = {"plain": Cost(1000, 1.0), "half": Cost(500, 1.5), "free": Cost(100, 0.5)}
    rates = pays_below(costs)
    assert rates == {"half": pytest.approx(1000), "free": None}
    for rate, faster in ((900, "half"), (1100, "plain")):
        taken = {name: one.seconds + one.nbytes / rate for name, one in costs.items()}
        assert min(("plain", "half"), key=taken.__getitem__) == faster


def test_the_table_that_is_shipped_is_the_one_that_was_measured_last() -> None:
    measured = json.loads((RESULTS / "quality.json").read_text())
    assert quality_table() == package_table(measured)
    assert measured_noise() == pytest.approx(
        measured["noise"] / measured["pairs"]["none / none"]["losses"][0], rel=0.05
    )
