"""Signed receipts of a held stage."""

from __future__ import annotations

import base64
from dataclasses import replace

from kits.client.held_stage import membership_in
from kits.transcripts import TRANSCRIPT
from swarm_client.pipeline.receipts import receipt_signer
from swarm_shared.base.types import Generation, MicrobatchIndex, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.volunteer_rules.stage_account import Counted


def test_a_receipt_names_the_run_the_stage_the_peer_and_the_coordinator_of_now() -> None:
    identity = Identity.from_seed(b"r" * 32)
    membership = membership_in("ab" * 32, sequences_per_microbatch=2)
    sign = receipt_signer(identity, membership, StageIndex(3))
    counted = Counted(Step(5), MicrobatchIndex(7), tokens=8, loss_sum=1.5, transcript=TRANSCRIPT)
    sign(counted)
    membership.now = replace(membership.now, generation=Generation(2))
    receipt = Receipt.open(base64.b64decode(sign(counted)))
    assert receipt.peer == identity.peer_id
    assert receipt.transcript == TRANSCRIPT
    assert (receipt.run, receipt.stage, receipt.generation) == ("ab" * 32, 3, 2)
    assert (receipt.step, receipt.microbatch) == (5, 7)
    assert (receipt.samples, receipt.tokens, receipt.loss_sum) == (2, 8, 1.5)
