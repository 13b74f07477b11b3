"""The lines of a run's public ledger, as bounded values.

What they mean together, and how they are chained, is in `swarm_shared.credit.ledger`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import (
    MAX_EXACT_INTEGER,
    Count,
    Credit,
    DisplayName,
    Envelope,
    ManifestEnvelope,
    PeerId,
    RunId,
    Sha256,
    UnixSeconds,
)
from swarm_shared.identity.signing import SignedMessage
from swarm_shared.trust.evidence import SumVerdict, Verdict


class Head(FrozenModel):
    line: Literal["head"] = "head"
    format: Literal[3] = 3
    run: RunId
    as_of: UnixSeconds
    """Unix seconds at which the recent averages are computed."""
    manifest: ManifestEnvelope
    """The signed envelope, in base64."""


class StepLine(FrozenModel):
    line: Literal["step"] = "step"
    step: Annotated[int, Field(ge=1, le=MAX_EXACT_INTEGER)]
    applied_at: UnixSeconds
    shares: Annotated[tuple[tuple[PeerId, Count, Count], ...], Field(max_length=200_000)]
    """(peer, stage, microbatches) of every peer that counted."""


class OwnerLine(FrozenModel):
    line: Literal["owner"] = "owner"
    peer: PeerId
    """The device."""
    binding: Envelope
    """The envelope signed by the owner, in base64."""


class VerdictLine(FrozenModel):
    line: Literal["verdict"] = "verdict"
    verdict: Verdict


class SumVerdictLine(FrozenModel):
    line: Literal["sum_verdict"] = "sum_verdict"
    verdict: SumVerdict


class TotalLine(FrozenModel):
    line: Literal["total"] = "total"
    peer: PeerId
    name: DisplayName | None
    """The name the peer chose; no number depends on it."""
    team: DisplayName | None
    """The team the peer is in now, as it declares."""
    microbatches: Count
    """Of steps in which the peer's credit is not void, as all further numbers."""
    tokens: Count
    credit: Credit
    credit_per_day: Credit


class Seal(SignedMessage):
    """What the organiser signs."""

    domain = "swarmtrain-ledger-1"

    run: RunId
    lines: Count
    digest: Sha256


class SealLine(FrozenModel):
    line: Literal["seal"] = "seal"
    envelope: Envelope


Line = Annotated[
    Head | OwnerLine | VerdictLine | SumVerdictLine | StepLine | TotalLine | SealLine,
    Field(discriminator="line"),
]
ledger_lines: TypeAdapter[Line] = TypeAdapter(Line)
