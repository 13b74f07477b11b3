"""Signed statements of work: the largest ones fit the messages that carry them."""

from __future__ import annotations

from pydantic import TypeAdapter

from kits.scalar_sums import sketch_of
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import (
    CHECKS_PER_SECRET,
    MAX_EXACT_INTEGER,
    Envelope,
    Generation,
    MicrobatchIndex,
    RunId,
    StageIndex,
    Step,
)
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import AuditStatement

AUDITOR = Identity.from_seed(b"a" * 32)
DIGEST = "f" * 32


def test_an_audit_with_sketches_of_both_parts_for_every_check_fits_its_message() -> None:
    statement = AuditStatement(
        run=RunId("f" * 64), generation=Generation(MAX_EXACT_INTEGER), audit=MAX_EXACT_INTEGER,
        step=Step(MAX_EXACT_INTEGER), microbatch=MicrobatchIndex(65_535), stage=StageIndex(511),
        peer=AUDITOR.peer_id, auditor=AUDITOR.peer_id,
        transcript=Transcript(
            input=DIGEST, output=DIGEST, output_gradient=DIGEST, input_gradient=DIGEST,
            gradient=DIGEST,
        ),
        loss_sum=-1.2345678901234567e-99, distance=1.2345678901234567e-99,
        sums=(("f" * 16,) * CHECKS_PER_SECRET,) * 2,
        sketches=((sketch_of(-1),) * CHECKS_PER_SECRET,) * 2,
    )  # fmt: skip
    signed = statement.sign(AUDITOR)
    assert AuditStatement.open(signed) == statement
    assert TypeAdapter(Envelope).validate_python(encode_envelope(signed))
