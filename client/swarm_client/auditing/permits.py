"""Permits at a peer that an auditor asks for tensors: who may have what, once."""

from __future__ import annotations

from collections import OrderedDict

from swarm_client.membership.member_context import MemberContext
from swarm_shared.base.errors import AdmissionError, FrameError, SignatureError
from swarm_shared.base.transcript import KeptTensors
from swarm_shared.base.types import Generation, PeerId, StageIndex
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import AuditPermit
from swarm_shared.protocol import KeptRequest

REMEMBERED = 4096
"""Uses that are remembered, the newest ones: far more than audits of one peer in a step."""

Use = tuple[Generation, int, KeptTensors]


class PermitCheck:
    """Checks the permits of what auditors ask this peer for."""

    def __init__(self, member: MemberContext) -> None:
        self._member = member
        self._used: OrderedDict[Use, None] = OrderedDict()

    def use(self, remote: PeerId, request: KeptRequest) -> tuple[AuditPermit, StageIndex]:
        """The permit of a request, and this peer's stage in it. AdmissionError, with the reason,
        unless the coordinator lets the remote have these tensors of this peer, once."""
        member = self._member.membership.now
        try:
            envelope = decode_envelope(request.permit, "the permit of an audit")
            permit = AuditPermit.open(envelope, member.organiser)
        except (FrameError, SignatureError) as error:
            raise AdmissionError(f"an auditor came without a permit: {error}") from error
        if (permit.run, permit.auditor) != (member.run, remote):
            raise AdmissionError("an auditor came with the permit of another one")
        holder, further = _holder(permit, request.tensors)
        if holder != self._member.node.peer_id:
            raise AdmissionError(f"the permit of audit {permit.audit} is for another peer")
        use = (permit.generation, permit.audit, request.tensors)
        if use in self._used:
            raise AdmissionError(f"the permit of audit {permit.audit} was used before")
        self._used[use] = None
        if len(self._used) > REMEMBERED:
            self._used.popitem(last=False)
        return permit, StageIndex(permit.stage + further)


def _holder(permit: AuditPermit, tensors: KeptTensors) -> tuple[PeerId | None, int]:
    """Return the peer that gives these tensors, if there is one, and its stage as a difference from
    the audited stage."""
    match tensors:
        case KeptTensors.INPUTS | KeptTensors.COMPUTED:
            return permit.peer, 0
        case KeptTensors.OUTPUT:
            return permit.before, -1
        case KeptTensors.INPUT_GRADIENT:
            return permit.behind, 1
