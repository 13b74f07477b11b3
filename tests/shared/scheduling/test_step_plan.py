"""The plan of a step is list scheduling, and gives each peer work in proportion to its rate."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.types import PeerId
from swarm_shared.scheduling.step_plan import (
    HANDICAP,
    MAX_PLANNED,
    plan_step,
    prior_seconds,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")

SECONDS = st.lists(st.sampled_from([0.125, 0.25, 0.5, 1.0, 2.0]), min_size=1, max_size=4).map(
    lambda seconds: tuple((PeerId(f"p{i}"), each) for i, each in enumerate(seconds))
)
"""Powers of two, so that sums of them are exact."""


def test_a_peer_without_a_rate_has_the_mean_of_the_known_rates() -> None:
    assert prior_seconds({A: 1.0, B: 3.0, C: 0.0}) == {A: 1.0, B: 1 / 3, C: 0.5}
    assert prior_seconds({A: 0.0, B: 0.0}) == {}


@given(SECONDS, st.integers(0, 40))
def test_each_microbatch_is_for_the_peer_that_is_done_with_it_first(
    seconds: tuple[tuple[PeerId, float], ...], microbatches: int
) -> None:
    done = dict.fromkeys((peer for peer, _ in seconds), Fraction(HANDICAP))
    each = {peer: Fraction(value) for peer, value in seconds}
    expected = []
    for _ in range(microbatches):
        first = min(done, key=lambda peer: ((done[peer] + 1) * each[peer], peer))
        expected.append((done[first] * each[first], first))
        done[first] += 1
    # In the order in which they are done, each peer's handicap apart.
    expected.sort()
    assert plan_step(seconds, microbatches) == tuple(peer for _, peer in expected)


@pytest.mark.parametrize(("microbatches", "planned"), [(0, 0), (MAX_PLANNED + 1, MAX_PLANNED)])
def test_a_plan_has_an_entry_for_each_microbatch_up_to_a_bound(
    microbatches: int, planned: int
) -> None:
    plan = plan_step(((A, 1.0), (B, 0.5)), microbatches)
    assert len(plan) == planned
    counted = Counter(plan)
    assert counted[A] == pytest.approx(counted[B] / 2, abs=1)
