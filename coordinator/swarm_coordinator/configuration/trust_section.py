"""The section `[trust]` of run.toml: audits of what volunteers count, and checks of sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import Field

from swarm_coordinator.core.trust.audits import AuditSettings
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import PeerId
from swarm_shared.run.model_config import ComputeDtype

TOLERANCES: Mapping[ComputeDtype, float] = {"float32": 1e-4, "bfloat16": 3e-2}
"""Default of `tolerance` by the dtype in which the run computes: honest machines that are unlike
come to 5e-7 and 6e-3 (docs/decisions, number 0036)."""


class TrustSection(FrozenModel):
    audit_share: float = Field(
        default=0.02,
        ge=0,
        le=1,
        description="Share of the counted microbatches that another volunteer computes again, "
        "drawn secretly. 0: none but those that contradict each other.",
    )
    probation_cells: int = Field(
        default=50,
        ge=0,
        le=1_000_000,
        description="Audits that a new owner must pass. Until then a quarter of its microbatches "
        "are audited, and it judges others only where no other owner can.",
    )
    tolerance: float = Field(
        default=TOLERANCES["float32"],
        ge=0,
        le=1,
        description="Largest relative distance between what two machines compute of the same "
        "microbatch; equal machines have 0. bfloat16 needs a larger one than float32.",
    )
    trusted_owners: tuple[PeerId, ...] = Field(
        default=(),
        max_length=100,
        description="Peer IDs of owners whose audits decide at once, such as your own machine's.",
    )
    check_sums: bool = Field(
        default=True,
        description="Whether members prove in every step that what they took out of an average is "
        "the sum of what all put in; of exact averages only. It costs each step a round trip.",
    )

    on_late_verdict: Literal["go on", "roll back"] = Field(
        default="go on",
        description="What follows when an owner loses an audit and has earlier work in the model "
        'that no passed audit covers. "roll back": the run returns to the checkpoint before it, '
        "but computes no step more than twice for that.",
    )

    @property
    def audit_settings(self) -> AuditSettings:
        return AuditSettings(
            audit_share=self.audit_share,
            probation_cells=self.probation_cells,
            tolerance=self.tolerance,
            trusted_owners=frozenset(self.trusted_owners),
            check_sums=self.check_sums,
            rolls_back=self.on_late_verdict == "roll back",
        )
