"""The lines of a run's public ledger, as bounded values.

What they mean together, and how they are chained, is in `swarm_shared.credit.ledger`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import RunId
from swarm_shared.credit.credit import MAX_TEAM_CHARACTERS

Count = Annotated[int, Field(ge=0, lt=2**53)]
Finite = Annotated[float, Field(ge=0, le=1e300, allow_inf_nan=False)]
Hex = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Peer = Annotated[str, Field(min_length=1, max_length=100)]


class Head(FrozenModel):
    line: Literal["head"] = "head"
    format: Literal[2] = 2
    run: RunId
    as_of: Finite
    """Unix seconds at which the recent averages are computed."""
    manifest: Annotated[str, Field(max_length=4 * 2**20)]
    """The signed envelope, in base64."""


class StepLine(FrozenModel):
    line: Literal["step"] = "step"
    step: Annotated[int, Field(ge=1, lt=2**53)]
    applied_at: Finite
    shares: Annotated[tuple[tuple[Peer, Count, Count], ...], Field(max_length=200_000)]
    """(peer, stage, microbatches) of every peer that counted."""


class OwnerLine(FrozenModel):
    line: Literal["owner"] = "owner"
    peer: Peer
    """The device."""
    binding: Annotated[str, Field(max_length=8_192)]
    """The envelope signed by the owner, in base64."""


class TotalLine(FrozenModel):
    line: Literal["total"] = "total"
    peer: Peer
    name: Annotated[str, Field(max_length=60)] | None
    """The name the peer chose; no number depends on it."""
    team: Annotated[str, Field(max_length=MAX_TEAM_CHARACTERS)] | None
    """The team the peer is in now, as it declares."""
    microbatches: Count
    tokens: Count
    credit: Finite
    credit_per_day: Finite


class Seal(FrozenModel):
    """What the organiser signs."""

    run: RunId
    lines: Count
    digest: Hex


class SealLine(FrozenModel):
    line: Literal["seal"] = "seal"
    envelope: Annotated[str, Field(max_length=8_192)]


Line = Annotated[Head | StepLine | OwnerLine | TotalLine | SealLine, Field(discriminator="line")]
ledger_lines: TypeAdapter[Line] = TypeAdapter(Line)
