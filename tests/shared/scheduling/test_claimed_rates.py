"""How far a peer's claim about its rate is believed."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.scheduling.claimed_rates import (
    MAX_RATE_OVER_COUNTED,
    MAX_RATE_OVER_MEDIAN,
    ClaimedRate,
    believed_rates,
)

claims = st.builds(ClaimedRate, st.floats(0, 1e15), st.integers(0, 1000))


@given(st.lists(claims, max_size=20))
def test_no_claim_is_believed_beyond_itself_and_one_about_the_median_is_believed_whole(
    stage: list[ClaimedRate],
) -> None:
    believed = believed_rates(stage)
    assert len(believed) == len(stage)
    known = [c.microbatches_per_second for c in stage if c.microbatches_per_second > 0]
    for claim, rate in zip(stage, believed, strict=True):
        assert 0 <= rate <= claim.microbatches_per_second
        if claim.microbatches_per_second <= MAX_RATE_OVER_MEDIAN * statistics.median(known or [0]):
            assert rate == claim.microbatches_per_second


def test_where_no_rate_is_known_none_is_believed() -> None:
    assert believed_rates([ClaimedRate(0.0, 3), ClaimedRate(0.0, 0)]) == [0.0, 0.0]


def test_a_peer_that_counts_as_little_as_others_is_believed_four_times_the_median() -> None:
    honest = [ClaimedRate(1.0, 10)] * 10
    assert believed_rates([*honest, ClaimedRate(1e9, 10)])[-1] == MAX_RATE_OVER_MEDIAN
    assert believed_rates([*honest, ClaimedRate(1e9, 0)])[-1] == MAX_RATE_OVER_MEDIAN


def test_a_peer_that_is_much_faster_has_its_share_after_a_few_steps() -> None:
    rates, counted, steps = [1.0, 1.0, 1.0, 50.0], [0, 0, 0, 0], 0
    while True:
        believed = believed_rates(list(map(ClaimedRate, rates, counted)))
        if believed == rates:
            break
        steps += 1
        counted = [round(1000 * rate / sum(believed)) for rate in believed]
    assert steps == 4


def test_a_peer_that_only_claims_to_be_fast_is_never_believed() -> None:
    counted = [0, 0, 0, 0]
    for _ in range(20):
        believed = believed_rates(list(map(ClaimedRate, [1.0, 1.0, 1.0, 1e9], counted)))
        assert believed[-1] == pytest.approx(MAX_RATE_OVER_MEDIAN)
        # It computes as fast as the others, so the rest of its share is computed by them.
        counted = [100, 100, 100, 100]
    assert MAX_RATE_OVER_COUNTED < MAX_RATE_OVER_MEDIAN
