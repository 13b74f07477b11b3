"""Permits: what the coordinator signs for each order to audit."""

from __future__ import annotations

from typing import Any, cast

import pytest

from kits.peer_names import named
from swarm_coordinator.admission.tickets import TicketOffice
from swarm_shared.base.types import Generation, MicrobatchIndex, RunId, StageIndex, Step
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import AuditPermit
from swarm_shared.protocol import Audit, AuditSources

DIGEST = "d" * 32


@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_permit_names_the_auditor_the_audited_peer_and_those_beside_it(is_hidden: bool) -> None:
    organiser = Identity.generate()
    office = TicketOffice(organiser, RunId("ab" * 32), Generation(3), cast(Any, None))
    sources = AuditSources(before=named("before"), behind=None)
    order = Audit(
        audit=7, step=Step(5), microbatch=MicrobatchIndex(2), stage=StageIndex(1),
        peer=named("audited"), input=DIGEST, output_gradient="", targets=DIGEST,
        sources=sources if is_hidden else None, patience_seconds=1.0,
    )  # fmt: skip
    signed = office.with_permit(order, named("auditor"))
    assert signed.model_copy(update={"permit": ""}) == order
    permit = AuditPermit.open(decode_envelope(signed.permit, "a permit"), organiser.peer_id)
    assert permit == AuditPermit(
        run=RunId("ab" * 32), generation=Generation(3), audit=7, step=Step(5),
        microbatch=MicrobatchIndex(2), stage=StageIndex(1), auditor=named("auditor"),
        peer=named("audited"), before=sources.before if is_hidden else None, behind=None,
    )  # fmt: skip
