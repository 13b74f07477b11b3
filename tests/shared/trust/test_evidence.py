"""A verdict follows from its evidence, or it is refused; whatever byte of the evidence changes."""

from __future__ import annotations

import base64
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits import lost_audit as kit
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import RunId, Step
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.trust.evidence import Evidence, SignedStatement, check_verdict, judge
from swarm_shared.trust.votes import Finding, Outcome

RUN = RunId("ab" * 32)
VERDICT = kit.verdict(RUN)
AGREES: dict[str, Any] = {"transcript": kit.FALSE, "distance": None}


def refused(**changes: Any) -> str:
    with pytest.raises(ProtocolError) as caught:
        check_verdict(RUN, kit.verdict(RUN, **changes))
    return str(caught.value)


def test_a_majority_of_signed_statements_is_a_verdict() -> None:
    found = check_verdict(RUN, VERDICT)
    assert found.outcome is Outcome.LOST
    assert [vote.finding for vote in found.votes] == [Finding.DIFFERS] * 2
    assert found.owner == kit.OWNER.peer_id


def test_an_auditor_that_contradicts_the_majority_is_the_loser() -> None:
    statements = [
        kit.statement(RUN, kit.FIRST),
        kit.statement(RUN, kit.SECOND, **AGREES),
    ]
    of = kit.evidence(RUN, statements)
    first = kit.FIRST.peer_id
    check_verdict(RUN, kit.verdict(RUN, of, peer=first, owner=first))
    assert "has lost it" in refused(of=of)
    second = kit.SECOND.peer_id
    assert "has lost it" in refused(of=of, peer=second, owner=second)


@pytest.mark.parametrize(("tolerance", "follows"), [(0.0, True), (1e-4, False)])
def test_within_a_class_any_difference_is_one(tolerance: float, follows: bool) -> None:
    """Evidence of auditors that had computed like the audited peer has no tolerance."""
    near = [kit.statement(RUN, auditor, distance=1e-6) for auditor in (kit.FIRST, kit.SECOND)]
    found = judge(RUN, kit.evidence(RUN, near, tolerance=tolerance))
    assert found.outcome is (Outcome.LOST if follows else Outcome.PASSED)


def test_too_few_statements_are_no_verdict() -> None:
    assert "the audit is open" in refused(of=kit.evidence(RUN, [kit.statement(RUN, kit.FIRST)]))
    assert "the audit is open" in refused(of=kit.evidence(RUN, entitled=5))


def test_a_trusted_owner_decides_alone() -> None:
    alone = [kit.statement(RUN, kit.FIRST)]
    of = kit.evidence(RUN, alone, trusted_owners=(kit.FIRST.peer_id,), entitled=5)
    assert check_verdict(RUN, kit.verdict(RUN, of)).outcome is Outcome.LOST


def test_two_devices_of_one_owner_have_one_vote() -> None:
    statements = tuple(
        SignedStatement(statement=kit.statement(RUN, one), binding=kit.binding(kit.THIRD, one))
        for one in (kit.FIRST, kit.SECOND)
    )
    of = kit.evidence(RUN).model_copy(update={"statements": statements})
    assert "more than one vote" in refused(of=of)
    own = SignedStatement(
        statement=kit.statement(RUN, kit.FIRST), binding=kit.binding(kit.OWNER, kit.FIRST)
    )
    of = kit.evidence(RUN).model_copy(update={"statements": (own, *kit.evidence(RUN).statements)})
    assert "more than one vote" in refused(of=of)


def test_a_device_of_two_owners_has_one_vote() -> None:
    statements = tuple(
        SignedStatement(
            statement=kit.statement(RUN, kit.FIRST), binding=kit.binding(one, kit.FIRST)
        )
        for one in (kit.SECOND, kit.THIRD)
    )
    evidence = kit.evidence(RUN).model_copy(update={"statements": statements})
    assert "has more than one vote, for several owners" in refused(of=evidence)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"step": Step(8)}, "another microbatch"),
        ({"microbatch": 2}, "another microbatch"),
        ({"stage": 0}, "another microbatch"),
        ({"peer": kit.THIRD.peer_id}, "has lost it"),
        ({"owner": kit.AUDITED.peer_id}, "has lost it"),
        ({"void_after": Step(10)}, "which is late"),
        ({"of": kit.evidence(RUN, receipt="")}, "the audited receipt|a signed message"),
        ({"of": kit.evidence(RUN, receipt=kit.receipt(RunId("cd" * 32)))}, "another run"),
        ({"of": kit.evidence(RUN, receipt=kit.receipt(RUN, transcript=kit.TRUE))}, "passed"),
        ({"of": kit.evidence(RUN, receipt=kit.receipt(RUN, step=Step(8)))}, "another receipt"),
        ({"of": kit.evidence(RUN, binding="")}, "has lost it"),
        ({"of": kit.evidence(RUN, binding=kit.binding(kit.OWNER, kit.FIRST))}, "owner binding of"),
        ({"of": kit.evidence(RUN, tolerance=1.0)}, "passed"),
        ({"of": kit.evidence(RUN, entitled=2)}, "3 owners have voted"),
    ],
)  # fmt: skip
def test_a_verdict_that_does_not_follow_is_refused_with_the_reason(
    changes: dict[str, Any], why: str
) -> None:
    said = refused(**changes)
    assert any(part in said for part in why.split("|")), said


@pytest.mark.parametrize(
    "changes",
    [
        {"run": RunId("cd" * 32)}, {"step": Step(8)}, {"microbatch": 2}, {"stage": 0},
        {"peer": kit.THIRD.peer_id},
    ],
)  # fmt: skip
def test_a_statement_of_another_cell_or_run_is_no_evidence(changes: dict[str, Any]) -> None:
    run = changes.pop("run", RUN)
    other = kit.statement(run, kit.SECOND, **changes)
    assert "another receipt" in refused(
        of=kit.evidence(RUN, [kit.statement(RUN, kit.FIRST), other])
    )


def signed_parts(evidence: Evidence) -> list[tuple[str, bytes]]:
    """All envelopes of the evidence, by their places."""
    parts = {"receipt": evidence.receipt, "binding": evidence.binding}
    parts |= {str(number): one.statement for number, one in enumerate(evidence.statements)}
    return [(place, base64.b64decode(text)) for place, text in parts.items()]


def with_part(evidence: Evidence, place: str, envelope: bytes) -> Evidence:
    text = encode_envelope(envelope)
    if not place.isdigit():
        return evidence.model_copy(update={place: text})
    statements = list(evidence.statements)
    statements[int(place)] = statements[int(place)].model_copy(update={"statement": text})
    return evidence.model_copy(update={"statements": tuple(statements)})


@settings(max_examples=400)
@given(data=st.data())
def test_whatever_byte_of_the_evidence_is_changed_the_verdict_no_longer_follows(
    data: st.DataObject,
) -> None:
    place, envelope = data.draw(st.sampled_from(signed_parts(VERDICT.evidence)))
    position = data.draw(st.integers(0, len(envelope) - 1))
    content = bytearray(envelope)
    content[position] ^= data.draw(st.integers(1, 255))
    changed = with_part(VERDICT.evidence, place, bytes(content))
    with pytest.raises(ProtocolError):
        check_verdict(RUN, VERDICT.model_copy(update={"evidence": changed}))


@given(data=st.data())
def test_each_character_of_the_base64_counts(data: st.DataObject) -> None:
    text = VERDICT.evidence.receipt
    position = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.characters(max_codepoint=127).filter(lambda one: one != text[position]))
    changed = text[:position] + other + text[position + 1 :]
    with pytest.raises(ProtocolError):
        judge(RUN, VERDICT.evidence.model_copy(update={"receipt": changed}))
