"""Interleaved weighted round-robin gives work in proportion to rates and never starves a stage."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.routing import (
    BAN_MAXIMUM_SECONDS,
    BAN_SECONDS,
    EqualShares,
    InterleavedWeightedRoundRobin,
)
from swarm_shared.types import PeerId

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")

seconds = st.floats(min_value=0.01, max_value=10.0)


def table(**rates: float) -> InterleavedWeightedRoundRobin:
    routing = InterleavedWeightedRoundRobin()
    routing.update([PeerId(name) for name in rates])
    for name, value in rates.items():
        routing.observe(PeerId(name), value)
    return routing


@given(st.lists(seconds, min_size=1, max_size=6))
def test_work_is_shared_in_proportion_to_measured_rates(times: list[float]) -> None:
    routing = table(**{f"p{i}": t for i, t in enumerate(times)})
    rounds = 500
    counts = Counter(routing.choose(0.0, routing.peers) for _ in range(rounds))
    total_rate = sum(1 / t for t in times)
    for i, t in enumerate(times):
        expected = rounds * (1 / t) / total_rate
        # Virtual finish times of any two peers never drift apart by more than one microbatch.
        slack = 2 + max(times) / t
        assert abs(counts[PeerId(f"p{i}")] - expected) <= slack


@given(
    st.lists(
        st.tuples(
            st.floats(min_value=0, max_value=5),
            st.sets(st.sampled_from([A, B, C])),
            st.none() | st.sampled_from([A, B, C]),
        ),
        max_size=30,
    )
)
def test_a_choice_comes_from_those_offered_and_a_single_peer_always_serves(
    moments: list[tuple[float, set[PeerId], PeerId | None]],
) -> None:
    routing = table(a=1.0, b=2.0, c=3.0)
    only = InterleavedWeightedRoundRobin()
    only.update([A])
    now = 0.0
    for pause, offered, failing in moments:
        now += pause
        if failing is not None:
            routing.failed(failing, now)
        chosen = routing.choose(now, offered)
        assert chosen is None or chosen in offered
        assert routing.choose(now, {A, B, C}) is not None  # the stage never becomes empty
        only.failed(A, now)
        assert only.choose(now, {A}) == A


def test_a_newcomer_enters_at_the_current_minimum_and_does_not_get_everything() -> None:
    routing = table(a=1.0, b=1.0)
    for _ in range(100):
        routing.choose(0.0, {A, B})
    routing.update([A, B, C])
    counts = Counter(routing.choose(0.0, {A, B, C}) for _ in range(30))
    assert counts == {A: 10, B: 10, C: 10}


def test_a_failing_peer_is_passed_over_for_longer_each_time_and_forgiven_after_success() -> None:
    routing = table(a=1.0, b=1.0)
    routing.failed(A, 0.0)
    assert {routing.choose(0.5 * BAN_SECONDS, {A, B}) for _ in range(4)} == {B}
    assert A in {routing.choose(1.1 * BAN_SECONDS, {A, B}) for _ in range(9)}
    for _ in range(2_000):  # for days
        routing.failed(A, 10.0)
    assert routing.next_ban_end(10.0) == pytest.approx(10.0 + BAN_MAXIMUM_SECONDS)
    routing.observe(A, 1.0)
    assert routing.next_ban_end(10.0) is None


def test_when_only_banned_peers_have_room_the_sender_waits_for_a_good_one() -> None:
    routing = table(a=1.0, b=1.0)
    routing.failed(A, 0.0)
    assert routing.choose(0.1, {A}) is None  # b is only out of credits
    routing.failed(B, 0.0)
    assert routing.choose(0.1, {A}) == A  # nobody is left: the stage must not become empty


def test_peers_that_leave_are_forgotten_and_unmeasured_ones_count_with_the_mean() -> None:
    routing = table(a=2.0, b=4.0)
    routing.update([A, B, C])
    assert routing.seconds_of(C) == pytest.approx(3.0)
    routing.update([B])
    assert routing.choose(0.0, {A}) is None
    assert set(routing.peers) == {B}


def test_by_equal_shares_a_slow_peer_gets_as_much_and_is_waited_for() -> None:
    routing = EqualShares()
    routing.update([A, B])
    routing.observe(A, 0.1)
    routing.observe(B, 10.0)
    turns = [routing.choose(0.0, {A, B}) for _ in range(6)]
    assert turns == [A, B] * 3
    assert routing.choose(0.0, {A}) == A
    assert routing.choose(0.0, {A}) is None
    assert routing.choose(0.0, {A, B}) == B
    routing.failed(A, 0.0)
    assert [routing.choose(0.0, {A, B}) for _ in range(2)] == [B, B]
