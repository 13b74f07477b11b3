"""Sums of contributions: the same by peer and by owner, whole or only the first rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.types import PeerId
from swarm_shared.credit import contributions
from swarm_shared.credit.contributions import ContributionSums
from swarm_shared.credit.credit import RecentCredit, credit_of

A, B, C = (PeerId(name) for name in "ABC")
WORK_SHARES = (0.25, 0.75)
PEERS = st.sampled_from([PeerId(name) for name in "ABCDEF"])
SHARES = st.lists(st.tuples(PEERS, st.integers(0, 1), st.integers(1, 50)), max_size=30)


@given(SHARES, st.dictionaries(PEERS, PEERS), st.integers(0, 7))
def test_ranked_owners_are_the_owners_in_order_of_credit(
    shares: list[tuple[PeerId, int, int]], bound: dict[PeerId, PeerId], most: int
) -> None:
    sums = ContributionSums(WORK_SHARES)
    for peer, stage, tokens in shares:
        sums.add(peer, stage, 1, tokens)
    for peer, owner in bound.items():
        sums.describe(peer, peer.lower(), None, owner)
    ranked = sums.ranked()
    assert sorted(sums.by_owner(), key=lambda one: (-one.credit, one.owner)) == ranked
    assert sums.ranked(most) == ranked[:most]
    assert sum(one.tokens for one in ranked) == sum(tokens for _, _, tokens in shares)
    assert sum(one.microbatches for one in ranked) == len(shares)
    assert sum(one.credit for one in ranked) == pytest.approx(
        credit_of(((stage, tokens) for _, stage, tokens in shares), WORK_SHARES)
    )


def test_steps_are_counted_once_a_step_and_recent_credit_needs_a_time() -> None:
    sums = ContributionSums(WORK_SHARES)
    for step in (1, 2):
        sums.add(A, 0, 1, 10, step=step, applied_at=100.0)
        sums.add(A, 1, 2, 20, step=step, applied_at=100.0)
    sums.add(B, 0, 1, 10, step=2)
    sums.describe(A, "anna", "", C)
    first, second = sums.ranked()
    assert (first.owner, first.devices, first.name, first.team) == (C, (A,), "anna", None)
    assert (first.steps, first.microbatches, first.tokens, first.stages) == (2, 6, 60, (0, 1))
    assert first.credit_per_day(100.0) == RecentCredit(first.credit, 100.0).per_day(100.0)
    assert (second.steps, second.credit_per_day(100.0)) == (1, 0.0)


def test_a_rollback_clears_the_sums_and_keeps_the_owners() -> None:
    sums = ContributionSums(WORK_SHARES)
    sums.describe(A, "anna", None, B)
    sums.add(A, 0, 1, 10)
    sums.clear()
    assert sums.ranked() == []
    sums.add(A, 1, 1, 5)
    assert [(one.owner, one.name, one.tokens) for one in sums.ranked()] == [(B, "anna", 5)]


def test_of_peers_that_never_counted_only_the_newest_are_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(contributions, "MAX_IDLE_DESCRIPTIONS", 5)
    sums = ContributionSums()
    sums.add(A, 0, 1, 10)
    sums.describe(B, "owner", "team", None)
    sums.describe(A, "device", None, B)
    for number in range(1000):
        one, other = PeerId(f"x{number}"), PeerId(f"y{number}")
        sums.describe(one, "made up", "team", other)
        sums.describe(other, "made up", "team", one)
    assert len(sums._names) == len(sums._teams) <= 13
    assert len(sums.owners) <= 13
    assert [(one.owner, one.name) for one in sums.by_owner()] == [(B, "owner")]
