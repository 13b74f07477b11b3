"""The decision of an audit from its auditors' statements."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.trust.votes import (
    MAX_VOTERS,
    Claim,
    Finding,
    Outcome,
    Vote,
    finding,
    outcome,
)

TOLERANCE = 1e-4
TRUE, OTHER = (
    simulated_transcript(Step(1), MicrobatchIndex(0), StageIndex(1), StageIndex(1), variant)
    for variant in (0, 1)
)


def statement(**changes: Any) -> AuditStatement:
    values: dict[str, Any] = {
        "run": RunId("ab" * 32), "generation": Generation(1), "audit": 1, "step": Step(1),
        "microbatch": 0, "stage": 1, "peer": PeerId("audited"), "auditor": PeerId("auditor"),
        "transcript": TRUE, "loss_sum": 100.0,
    }  # fmt: skip
    return AuditStatement.model_construct(**{**values, **changes})


def votes(*findings: Finding, owners: str = "bcdefghijk") -> list[Vote]:
    return [
        Vote(PeerId(owner), PeerId(owner), found, f"by {owner}")
        for owner, found in zip(owners, findings, strict=False)
    ]


A, D, W = Finding.AGREES, Finding.DIFFERS, Finding.WITHHELD


@pytest.mark.parametrize(
    ("changes", "compared", "found"),
    [
        ({}, False, A),
        ({"transcript": None}, False, W),
        ({"transcript": OTHER}, False, None),
        ({"transcript": OTHER, "distance": 1e-5}, True, A),
        ({"transcript": OTHER, "distance": 1e-3}, True, D),
        ({"transcript": OTHER}, True, W),
        ({"loss_sum": 100.0 + 1e-3}, False, A),
        ({"loss_sum": 101.0}, False, D),
        ({"loss_sum": None}, False, D),
    ],
)
def test_a_statement_agrees_differs_or_asks_for_the_tensors(
    changes: dict[str, Any], compared: bool, found: Finding | None
) -> None:
    claim = Claim(TRUE, 100.0)
    assert finding(claim, statement(**changes), TOLERANCE, compared=compared) is found


def test_without_a_tolerance_only_equal_digests_agree() -> None:
    """The distance of a sample is 0 where all that differs is beside it."""
    other = {"transcript": OTHER, "distance": 0.0}
    claim = Claim(TRUE, 100.0)
    assert finding(claim, statement(**other), TOLERANCE, compared=True) is Finding.AGREES
    assert finding(claim, statement(**other), 0.0, compared=True) is Finding.DIFFERS
    assert finding(claim, statement(), 0.0, compared=True) is Finding.AGREES


@pytest.mark.parametrize(
    ("given_votes", "entitled", "expected"),
    [
        ((), 5, Outcome.OPEN),
        ((A,), 5, Outcome.PASSED),
        ((D,), 2, Outcome.OPEN),
        ((D,), 3, Outcome.OPEN),
        ((D, D), 3, Outcome.LOST),
        ((D, A), 3, Outcome.PASSED),
        ((D, A), 5, Outcome.OPEN),
        ((W, W), 3, Outcome.WITHHELD),
        ((D, W), 3, Outcome.LOST),
        ((D, D, D), 5, Outcome.LOST),
        ((D, D, A, A), 5, Outcome.PASSED),
        ((D,) * 5, 100, Outcome.LOST),
        ((D,) * 4, 100, Outcome.OPEN),
    ],
)
def test_a_majority_of_those_entitled_decides(
    given_votes: tuple[Finding, ...], entitled: int, expected: Outcome
) -> None:
    assert outcome(votes(*given_votes), entitled, ()) is expected


def test_a_trusted_owner_decides_alone() -> None:
    against = votes(D, D, D, A)
    assert outcome(against, 5, {PeerId("e")}) is Outcome.PASSED
    assert outcome(votes(A, D, owners="bc"), 5, {PeerId("c")}) is Outcome.LOST
    assert outcome(votes(W, owners="c"), 5, {PeerId("c")}) is Outcome.WITHHELD


@given(data=st.data(), owners=st.integers(3, MAX_VOTERS))
def test_no_minority_of_liars_decides_an_audit(data: st.DataObject, owners: int) -> None:
    """Auditors are drawn in any order; liars contradict the truth, and end an audit as they like
    only when they are the majority of the stage."""
    liars = data.draw(st.sets(st.integers(0, owners - 1), max_size=(owners - 1) // 2))
    order = data.draw(st.permutations(range(1, owners)))
    audited_lies = 0 in liars
    cast: list[Vote] = []
    for owner in order:
        lies = owner in liars
        says = A if lies == audited_lies else D
        cast.append(Vote(PeerId(str(owner)), PeerId(str(owner)), says, ""))
        found = outcome(cast, owners, ())
        if found is not Outcome.OPEN:
            break
    if audited_lies:
        # A first auditor that lies too covers it; nothing but a second audit would find that.
        assert found is Outcome.LOST or order[0] in liars
    else:
        assert found is Outcome.PASSED
