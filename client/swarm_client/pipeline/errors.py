"""Why a microbatch did not come back, as the engine tells it apart.

PipelineError
├── EdgeRefused          the receiver said no; `reason` says whether somebody else may serve
└── MicrobatchAbandoned  it is not worth going on: the step is over, or nobody can serve
"""

from __future__ import annotations

from swarm_shared.base.errors import SwarmError
from swarm_shared.protocol import RefusalReason


class PipelineError(SwarmError):
    """Base of what can happen to one microbatch on its way."""


class EdgeRefused(PipelineError):
    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason


class MicrobatchAbandoned(PipelineError):
    """The sender has given this microbatch up; the coordinator leases it again if need be."""
