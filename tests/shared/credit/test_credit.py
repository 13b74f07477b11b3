"""Credit: the same whoever adds it up, all of it together the tokens trained, and fading by half
in seven days."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.credit.credit import (
    HALF_LIFE_SECONDS,
    MAX_TEAM_CHARACTERS,
    RecentCredit,
    credit_of,
    normalised_team,
    work_shares,
)

DAY = 86_400.0
flops = st.floats(0, 1e18)
tokens = st.integers(0, 2**40)
moments = st.floats(0, 100 * DAY)
parts = st.lists(st.tuples(st.floats(0, 1e9), moments), max_size=30)


@given(st.lists(flops, min_size=1, max_size=64))
def test_the_shares_of_all_stages_are_the_whole_work(work: list[float]) -> None:
    shares = work_shares(work)
    assert math.isclose(math.fsum(shares), 1.0)
    assert all(0 <= share <= 1 for share in shares)


def test_stages_whose_work_nobody_measured_share_equally() -> None:
    assert work_shares([0.0, 0.0, 0.0, 0.0]) == (0.25, 0.25, 0.25, 0.25)


@given(st.lists(flops, min_size=1, max_size=8), tokens)
def test_a_token_through_every_stage_is_one_credit(work: list[float], count: int) -> None:
    shares = work_shares(work)
    credit = credit_of([(stage, count) for stage in range(len(work))], shares)
    assert math.isclose(credit, count)


@given(st.lists(st.tuples(st.integers(0, 2), tokens), max_size=40), st.randoms())
def test_credit_is_the_same_number_in_whatever_order_it_is_added(
    work: list[tuple[int, int]], random: object
) -> None:
    shares = work_shares([1.0, 3.0, 7.0])
    shuffled = list(work)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert credit_of(shuffled, shares) == credit_of(work, shares)


def total(entries: list[tuple[float, float]]) -> RecentCredit:
    recent = RecentCredit()
    for credit, at in entries:
        recent = recent.with_credit(credit, at)
    return recent


@given(parts)
def test_the_order_of_entries_does_not_change_the_recent_average(
    entries: list[tuple[float, float]],
) -> None:
    now = 100 * DAY
    forward, backward = total(entries).per_day(now), total(entries[::-1]).per_day(now)
    assert math.isclose(forward, backward, rel_tol=1e-9, abs_tol=1e-9)


@given(parts, st.floats(0, 365 * DAY))
def test_the_recent_average_halves_in_seven_days_and_never_grows_by_itself(
    entries: list[tuple[float, float]], pause: float
) -> None:
    recent, now = total(entries), 100 * DAY
    assert math.isclose(
        recent.per_day(now + HALF_LIFE_SECONDS), recent.per_day(now) / 2, abs_tol=1e-12
    )
    assert recent.per_day(now + pause) <= recent.per_day(now)


@pytest.mark.parametrize("per_day", [1.0, 250.0])
def test_steady_work_tends_to_its_own_rate(per_day: float) -> None:
    recent = RecentCredit()
    hours = 24 * 7 * 30
    for hour in range(hours):
        recent = recent.with_credit(per_day / 24, hour * 3600.0)
    assert math.isclose(recent.per_day(hours * 3600.0), per_day, rel_tol=0.01)


@given(st.text())
def test_a_teams_name_is_short_printable_and_stays_as_it_is_when_cleaned_again(text: str) -> None:
    name = normalised_team(text)
    assert len(name) <= MAX_TEAM_CHARACTERS
    assert name.isprintable()
    assert name == name.strip()
    assert normalised_team(name) == name


def test_the_same_team_typed_otherwise_is_the_same_team() -> None:
    for typed in ("  Les  E\u0301toiles\u202e ", "Les \u00c9toiles"):
        assert normalised_team(typed) == "Les \u00c9toiles"
    assert normalised_team(None) == normalised_team(" \t") == ""
