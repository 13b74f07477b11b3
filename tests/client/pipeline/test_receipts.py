"""Signed receipts of a held stage."""

from __future__ import annotations

import base64
from dataclasses import replace

import pytest
from pydantic import TypeAdapter, ValidationError

from kits.client.held_stage import membership_in
from kits.transcripts import TRANSCRIPT
from swarm_client.pipeline.receipts import receipt_signer
from swarm_client.pipeline.stage_server import MAX_HEADER_BYTES
from swarm_shared.base.json_messages import encode
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import (
    MAX_EXACT_INTEGER,
    MAX_MICROBATCHES,
    MAX_STAGES,
    Generation,
    MicrobatchIndex,
    ReceiptEnvelope,
    RunId,
    StageIndex,
    Step,
)
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.protocol import Backward
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


def test_an_answer_has_room_for_the_receipts_and_peers_of_all_stages() -> None:
    me, digest = Identity.generate(), "f" * 32
    longest = Receipt(
        run=RunId("f" * 64),
        generation=Generation(MAX_EXACT_INTEGER),
        step=Step(MAX_EXACT_INTEGER),
        microbatch=MicrobatchIndex(MAX_MICROBATCHES - 1),
        stage=StageIndex(MAX_STAGES - 1),
        peer=me.peer_id,
        samples=MAX_EXACT_INTEGER,
        tokens=MAX_EXACT_INTEGER,
        loss_sum=-1.2345678901234567e-100,
        transcript=Transcript(
            input=digest, output=digest, output_gradient=digest, input_gradient=digest,
            gradient=digest,
        ),
    )  # fmt: skip
    room = TypeAdapter(ReceiptEnvelope)
    room.validate_python(encode_envelope(longest.sign(me)))
    with pytest.raises(ValidationError):
        room.validate_python("A" * 1000)
    answer = Backward(
        request=MAX_EXACT_INTEGER, receipts=("A" * 960,) * MAX_STAGES, service_seconds=1 / 3,
        total_seconds=1 / 3, uplink_seconds=1 / 3, loss_sum=-1.2345678901234567e-100,
        tokens=MAX_EXACT_INTEGER, owing=(me.peer_id,) * MAX_STAGES,
    )  # fmt: skip
    assert len(encode(answer)) <= MAX_HEADER_BYTES
