"""Signed receipts of a held stage."""

from __future__ import annotations

import base64

from swarm_client.pipeline.receipts import receipt_signer
from swarm_shared.base.types import Generation, MicrobatchIndex, RunId, StageIndex, Step
from swarm_shared.identity.credentials import open_receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.volunteer_rules.stage_account import Counted


def test_a_receipt_names_the_run_the_stage_the_peer_and_the_coordinator_of_now() -> None:
    identity = Identity.from_seed(b"r" * 32)
    generation = 1
    sign = receipt_signer(
        identity, RunId("ab" * 32), StageIndex(3), 2, lambda: Generation(generation)
    )
    counted = Counted(Step(5), MicrobatchIndex(7), tokens=8, loss_sum=1.5)
    sign(counted)
    generation = 2
    receipt = open_receipt(base64.b64decode(sign(counted)))
    assert receipt.peer == identity.peer_id
    assert (receipt.run, receipt.stage, receipt.generation) == ("ab" * 32, 3, 2)
    assert (receipt.step, receipt.microbatch) == (5, 7)
    assert (receipt.samples, receipt.tokens, receipt.loss_sum) == (2, 8, 1.5)
