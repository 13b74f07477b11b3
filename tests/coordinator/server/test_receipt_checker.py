"""The envelopes of receipts that the coordinator keeps as evidence."""

from __future__ import annotations

from kits import lost_audit as kit
from swarm_coordinator.core.events import VerdictRecord
from swarm_coordinator.server.control_protocol import ReceiptChecker
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import RunId, Step
from swarm_shared.trust.votes import Claim

RUN = RunId("ab" * 32)


def verdict(transcript: Transcript) -> VerdictRecord:
    return VerdictRecord(
        kit.STEP, kit.MICROBATCH, kit.STAGE, kit.AUDITED.peer_id, kit.AUDITED.peer_id,
        kit.AUDITED.peer_id, "it lies", Step(0), kit.evidence(RUN, receipt=""),
        claim=Claim(transcript, 100.0),
    )  # fmt: skip


async def test_a_liar_that_signs_the_truth_later_does_not_replace_the_evidence() -> None:
    false, true = kit.receipt(RUN), kit.receipt(RUN, transcript=kit.TRUE)
    checker = ReceiptChecker(RUN)
    await checker.check([false])
    await checker.check([true])
    assert checker.envelope(verdict(kit.FALSE)) == false
    assert checker.envelope(verdict(kit.TRUE)) == true
    assert ReceiptChecker(RUN).envelope(verdict(kit.FALSE)) == ""
