"""Token buckets, with a clock of our own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.clock import Clock
from swarm_shared.base.rate_limit import RateLimit


def test_a_burst_goes_through_and_then_one_at_a_time() -> None:
    clock = Clock()
    limit = RateLimit(burst=3, per_second=0.5, clock=clock)
    assert [limit.take("a") for _ in range(3)] == [0, 0, 0]
    assert limit.take("a") == pytest.approx(2.0)
    assert limit.take("b") == 0
    clock.now += 2.0
    assert limit.take("a") == 0
    assert limit.take("a") > 0


def test_a_refused_request_costs_nothing() -> None:
    clock = Clock()
    limit = RateLimit(burst=2, per_second=1, clock=clock)
    assert limit.take("a", 5) == pytest.approx(3.0)
    assert limit.take("a", 2) == 0


def test_memory_is_bounded_and_the_busiest_are_remembered() -> None:
    limit = RateLimit(burst=1, per_second=0.001, max_keys=10, clock=Clock())
    assert limit.take("busy") == 0
    for index in range(1000):
        limit.take(index)
        assert limit.take("busy") > 0
    assert len(limit._buckets) <= 10


@given(st.lists(st.tuples(st.floats(0, 5), st.sampled_from([1.0, 2.0, 4.0])), max_size=60))
def test_nobody_gets_more_than_the_burst_and_the_rate(steps: list[tuple[float, float]]) -> None:
    clock = Clock()
    limit = RateLimit(burst=4, per_second=0.5, clock=clock)
    begun, taken = clock.now, 0.0
    for pause, cost in steps:
        clock.now += pause
        if limit.take("a", cost) == 0:
            taken += cost
        assert taken <= 4 + 0.5 * (clock.now - begun) + 1e-6
