"""A verdict about an average carries signed statements of its step, one of them the loser's."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits import lost_audit as kit
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import PeerId, RunId, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.trust.evidence import SumVerdict, check_sum_verdict

RUN = RunId("ab" * 32)


def verdict(
    *statements: str, peer: PeerId = kit.AUDITED.peer_id, void_after: int = 4
) -> SumVerdict:
    return SumVerdict(
        step=kit.STEP, stage=kit.STAGE, peer=peer, owner=kit.OWNER.peer_id,
        void_after=Step(void_after), statements=statements,
    )  # fmt: skip


SIGNED = (kit.sums(kit.AUDITED, RUN), kit.sums(kit.FIRST, RUN), kit.statement(RUN, kit.SECOND))


@pytest.mark.parametrize("loser", [kit.AUDITED, kit.FIRST, kit.SECOND])
def test_a_member_or_an_auditor_that_has_signed_a_statement_can_have_lied(loser: Identity) -> None:
    check_sum_verdict(RUN, verdict(*SIGNED, peer=loser.peer_id))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (verdict(*SIGNED, peer=kit.THIRD.peer_id), "has signed none of the statements"),
        (verdict(*SIGNED, kit.sums(kit.THIRD, RUN, step=Step(kit.STEP + 1))), "of another step"),
        (verdict(*SIGNED, kit.sums(kit.THIRD, RunId("cd" * 32))), "of another step"),
        (verdict(*SIGNED, void_after=kit.STEP + 1), "which is late"),
        (verdict(*SIGNED, kit.receipt(RUN)), "not one by"),
    ],
    ids=["no-statement-of-it", "another-step", "another-run", "late", "a-receipt"],
)
def test_a_verdict_that_its_statements_are_not_about_is_refused(
    wrong: SumVerdict, why: str
) -> None:
    with pytest.raises(ProtocolError, match=why):
        check_sum_verdict(RUN, wrong)


@settings(max_examples=200)
@given(st.integers(0, 2), st.data())
def test_whatever_byte_of_a_statement_is_changed_is_noticed(
    which: int, data: st.DataObject
) -> None:
    content = bytearray(base64.b64decode(SIGNED[which]))
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    changed = [*SIGNED]
    changed[which] = encode_envelope(bytes(content))
    with pytest.raises(ProtocolError):
        check_sum_verdict(RUN, verdict(*changed))
