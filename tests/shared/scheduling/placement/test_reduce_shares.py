"""Who sums how much: thin lines are waited for least, and nobody gains by another division."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.scheduling.placement import reduce_weights, round_seconds
from swarm_shared.scheduling.placement.reduce_shares import (
    MAX_SHARE_FACTOR,
    MAX_WEIGHT,
    UNMEASURED_RATE_FACTOR,
)

MBIT = 125_000.0
known_lines = st.floats(0.1 * MBIT, 1000 * MBIT)
lines = st.lists(known_lines | st.just(math.inf), min_size=1, max_size=30)


def shares(weights: tuple[int, ...], count: int) -> list[float]:
    return [w / sum(weights) for w in weights] if weights else [1 / count] * count


def seen(rates: list[float]) -> list[float]:
    """What lines count as of which nothing is known."""
    known = [rate for rate in rates if math.isfinite(rate)]
    return [rate if math.isfinite(rate) else UNMEASURED_RATE_FACTOR * max(known) for rate in rates]


@given(lines)
def test_weights_are_for_every_member_and_never_slower_than_equal_shares(
    rates: list[float],
) -> None:
    weights = reduce_weights(rates)
    if not weights:
        return
    assert len(weights) == len(rates) >= 3
    assert max(weights) == MAX_WEIGHT
    assert min(weights) >= 0
    divided, equal = shares(weights, len(rates)), [1 / len(rates)] * len(rates)
    assert max(divided) <= 1.01 * MAX_SHARE_FACTOR / len(rates)
    assert round_seconds(1, seen(rates), divided) < round_seconds(1, seen(rates), equal)


@given(lines, st.randoms(use_true_random=False))
def test_no_other_division_within_the_bound_is_faster(
    rates: list[float], chance: random.Random
) -> None:
    """Any two members: what one gives the other makes nothing faster."""
    weights = reduce_weights(rates)
    if not weights:
        return
    divided, known, count = shares(weights, len(rates)), seen(rates), len(rates)
    best = round_seconds(1, known, divided)
    for _ in range(20):
        giver, taker = chance.sample(range(count), 2)
        most = MAX_SHARE_FACTOR / count - divided[taker]
        moved = min(divided[giver], max(0.0, most)) * chance.random()
        other = list(divided)
        other[giver] -= moved
        other[taker] += moved
        # Weights are whole numbers, and equal shares are left where they do nearly as well.
        assert round_seconds(1, known, other) >= best * (1 - 0.002 * count)


@given(st.lists(st.floats(0, 1e15, exclude_min=True) | st.just(math.inf), max_size=12))
def test_whatever_peers_say_of_their_lines_there_are_weights_or_none(rates: list[float]) -> None:
    """A heartbeat may hold any positive number."""
    weights = reduce_weights(rates)
    assert len(weights) in (0, len(rates))
    assert all(0 <= weight <= MAX_WEIGHT for weight in weights)
    assert any(weights) or not weights


def test_an_extreme_rate_among_tiny_ones_does_not_cancel_them() -> None:
    """The remainder of a sum from which its dominant rate is subtracted would be 0."""
    assert any(reduce_weights([1e15, 1e-7, 1e-7, 1e-7, 1e-7]))


@pytest.mark.parametrize(
    ("mbit", "why"),
    [
        ((10.0, 100.0), "two members send one vector each, however they divide it"),
        ((20.0, 20.0, 20.0, 21.0), "like lines"),
        ((math.inf, math.inf, math.inf), "nothing is known of any line"),
        ((10.0,), "one member alone"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_shares_stay_equal_where_others_gain_nothing(mbit: tuple[float, ...], why: str) -> None:
    assert reduce_weights([MBIT * rate for rate in mbit]) == (), why


def test_a_thin_line_among_good_ones_sums_nothing_and_the_others_the_same() -> None:
    assert reduce_weights([100 * MBIT, 100 * MBIT, 5 * MBIT, 100 * MBIT]) == (1000, 1000, 0, 1000)


def test_an_unknown_line_counts_as_one_that_is_better_than_the_known_ones() -> None:
    """A fibre line that a stage's tensors do not fill is never learnt."""
    thin, rest = 10 * MBIT, [math.inf, math.inf]
    assert reduce_weights([thin, thin, *rest]) == (0, 0, 1000, 1000)


def test_many_thin_lines_have_to_sum_something_too() -> None:
    """One good line may not be given everything: it would have to send it to all of them."""
    weights = reduce_weights([100 * MBIT] + [10 * MBIT] * 7)
    divided = shares(weights, 8)
    assert divided[0] == pytest.approx(MAX_SHARE_FACTOR / 8, abs=0.005)
    assert divided[1:] == pytest.approx([0.5 / 7] * 7, abs=0.005)
