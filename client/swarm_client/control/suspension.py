"""A suspension (`swarm_client.volunteer.pause` carries it out)."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_client.control.status_document import SuspendReason


@dataclass(frozen=True, slots=True)
class Suspension:
    reason: SuspendReason
    until: float | None = None
    """Unix seconds at which it ends by itself, where that is known. The caller that suspends keeps
    the time: nothing here resumes on its own."""
