"""Majorities of owners."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.core.events import StandingRecord
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings
from swarm_coordinator.core.trust.majority import Decision, Statement, decide
from swarm_coordinator.core.trust.standing import restored_standings
from swarm_shared.base.types import PeerId, Step

ESTABLISHED = frozenset(PeerId(f"old{i}") for i in range(9))
TRUSTED = PeerId("trusted")


def book() -> AuditBook:
    settings = AuditSettings(0.02, probation_cells=3, trusted_owners=frozenset({TRUSTED}))
    records = [StandingRecord(owner, 3, 0, Step(7), 2) for owner in sorted(ESTABLISHED)]
    return AuditBook(settings, lambda: 0.5, standings=restored_standings(records))


def stated(owner: str, value: str, device: int = 0, since: float = 1.0) -> Statement[str]:
    return Statement(PeerId(f"{owner}-{device}"), PeerId(owner), since, value)


def all_of(statements: list[Statement[str]]) -> set[PeerId]:
    return {statement.owner for statement in statements}


def value_of(statements: list[Statement[str]]) -> str:
    found = decide(statements, all_of(statements))
    assert found is not None
    return found.value


@given(
    honest=st.integers(1, 6),
    liars=st.data(),
    seed=st.integers(0, 2**32),
)
def test_any_number_of_identities_of_a_minority_of_owners_changes_no_decision(
    honest: int, liars: st.DataObject, seed: int
) -> None:
    devices = liars.draw(
        st.lists(st.lists(st.sampled_from("xyz"), min_size=1, max_size=30), max_size=honest - 1)
    )
    statements = [stated(f"honest{i}", "true", since=100.0 + i) for i in range(honest)]
    statements += [
        stated(f"liar{i}", value, device, since=device)
        for i, values in enumerate(devices)
        for device, value in enumerate(values)
    ]
    random.Random(seed).shuffle(statements)
    found = decide(statements, all_of(statements))
    assert found is not None
    assert (found.value, found.has_majority) == ("true", True)


@given(
    votes=st.lists(st.sampled_from("abc"), min_size=2, max_size=5),
    strangers=st.lists(st.sampled_from("abc"), max_size=40),
    seed=st.integers(0, 2**32),
)
def test_strangers_change_nothing_where_two_owners_are_established(
    votes: list[str], strangers: list[str], seed: int
) -> None:
    statements = [stated(f"old{i}", vote, since=100.0 + i) for i, vote in enumerate(votes)]
    alone = book().decide(statements)
    crowd = statements + [stated(f"new{i}", value) for i, value in enumerate(strangers)]
    random.Random(seed).shuffle(crowd)
    assert book().decide(crowd) == alone


@given(
    st.lists(st.tuples(st.sampled_from("pqrs"), st.sampled_from("abc")), min_size=1, max_size=12),
    st.integers(0, 2**32),
)
def test_a_decision_depends_on_no_order_and_is_a_stated_value(
    pairs: list[tuple[str, str]], seed: int
) -> None:
    statements = [stated(o, value, i, since=i) for i, (o, value) in enumerate(pairs)]
    mixed = list(statements)
    random.Random(seed).shuffle(mixed)
    found = decide(statements, all_of(statements))
    assert found == decide(mixed, all_of(mixed))
    assert found is not None
    assert found.value in {statement.value for statement in statements}
    assert found.owners <= found.voters == all_of(statements)


def test_the_vote_of_an_owner_is_what_most_of_its_devices_state() -> None:
    devices = [stated("a", "x", 0), stated("a", "y", 1), stated("a", "y", 2)]
    assert decide(devices, {PeerId("a")}) == Decision(
        "y", frozenset({PeerId("a")}), frozenset({PeerId("a")})
    )


def test_an_owner_whose_devices_disagree_has_no_vote_and_makes_no_majority() -> None:
    torn = [stated("a", "x", 0, since=2), stated("a", "y", 1, since=1)]
    found = decide([*torn, stated("b", "x", since=3)], {PeerId("a"), PeerId("b")})
    assert found is not None
    assert not found.has_majority
    assert found.value == "y"


def test_without_a_majority_the_device_attached_longest_decides() -> None:
    assert value_of([stated("a", "x", since=5), stated("b", "y", since=4)]) == "y"
    gone = stated("b", "y", since=float("inf"))
    assert value_of([stated("a", "x", since=5), gone]) == "x"
    assert value_of([stated("a", "x"), stated("b", "y"), stated("c", "z")]) == "x"


def test_nothing_is_decided_without_a_voter() -> None:
    assert decide([stated("a", "x")], ()) is None
    assert book().decide([]) is None


def test_a_trusted_owner_decides_alone() -> None:
    statements = [stated("old0", "x"), stated("old1", "x"), stated("trusted", "y", since=9)]
    found = book().decide(statements)
    assert found is not None
    assert (found.value, found.voters) == ("y", {TRUSTED})


@pytest.mark.parametrize(
    ("owners", "voters"),
    [
        (("new", "old0"), {"new", "old0"}),
        (("new", "newer", "old0", "old1"), {"old0", "old1"}),
        (("old0", "old1", "trusted"), {"trusted"}),
        ((), set()),
    ],
)
def test_who_votes(owners: tuple[str, ...], voters: set[str]) -> None:
    assert book().voters([PeerId(owner) for owner in owners]) == voters
