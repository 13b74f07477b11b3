"""AUDIT_PROTOCOL: an auditor and a peer that has counted what it audits, one stream per request.

    auditor     TransferHello (its certificate), then KeptRequest
    peer        KeptPart + bytes, in order, until all are sent; or TransferRefused

The peer is the audited one, or its neighbour in the pipeline: of the stage before it for an output,
of the stage behind it for an input's gradient. Both know the size of what is sent from the
manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.transcript import KeptTensors
from swarm_shared.base.types import Count, Envelope, SampledBlocks
from swarm_shared.protocol.transfer import TransferHello, TransferRefused

AUDIT_PROTOCOL = "/swarmtrain/audit/1"

PART_BYTES = 2**20
"""Bytes of a KeptPart, but for the last one."""


class KeptRequest(FrozenModel):
    """A query for tensors of the microbatch that a permit names."""

    kind: Literal["kept_request"] = "kept_request"
    permit: Envelope
    """The coordinator's signed `AuditPermit`."""
    tensors: KeptTensors
    blocks: SampledBlocks = ()
    """Of the gradient that was computed: these blocks, and the digests of all."""


class KeptPart(FrozenModel):
    """The payload is a part of the tensors, one behind the other."""

    kind: Literal["kept_part"] = "kept_part"
    offset: Count


AuditMessage = Annotated[
    TransferHello | KeptRequest | KeptPart | TransferRefused, Field(discriminator="kind")
]

audit_messages: TypeAdapter[AuditMessage] = TypeAdapter(AuditMessage)
