"""The lines of a run's public ledger, as values: what each may hold, and no more.

What they mean together, and how they are chained, is `ledger`'s.
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
    """Unix seconds: the recent averages are as of then."""
    manifest: Annotated[str, Field(max_length=4 * 2**20)]
    """The signed envelope, in base64."""


class StepLine(FrozenModel):
    line: Literal["step"] = "step"
    step: Annotated[int, Field(ge=1, lt=2**53)]
    applied_at: Finite
    shares: Annotated[tuple[tuple[Peer, Count, Count], ...], Field(max_length=200_000)]
    """(peer, stage, microbatches)."""


class OwnerLine(FrozenModel):
    line: Literal["owner"] = "owner"
    peer: Peer
    """The device."""
    binding: Annotated[str, Field(max_length=8_192)]
    """The owner's envelope, in base64."""


class TotalLine(FrozenModel):
    line: Literal["total"] = "total"
    peer: Peer
    name: Annotated[str, Field(max_length=60)] | None
    """As the peer calls itself; nothing follows from it."""
    team: Annotated[str, Field(max_length=MAX_TEAM_CHARACTERS)] | None
    """That it is in now, by its own word."""
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
