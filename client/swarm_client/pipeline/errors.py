"""Reasons why a microbatch did not come back.

EdgeRefused          the receiver refused; `reason` shows whether another peer may serve
MicrobatchAbandoned  no further attempt: the step is over, or no peer can serve
"""

from __future__ import annotations

from swarm_shared.base.errors import SwarmError
from swarm_shared.protocol import RefusalReason


class EdgeRefused(SwarmError):
    def __init__(self, reason: RefusalReason, detail: str) -> None:
        super().__init__(f"{reason.value}: {detail}" if detail else reason.value)
        self.reason = reason
        self.detail = detail


class MicrobatchAbandoned(SwarmError):
    """The sender has given this microbatch up; the coordinator leases it again if needed."""
