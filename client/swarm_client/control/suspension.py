"""A suspension and the interface to order and end one (`swarm_client.volunteer.pause` carries it
out)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from swarm_client.control.status_document import SuspendReason


@dataclass(frozen=True, slots=True)
class Suspension:
    reason: SuspendReason
    until: float | None = None
    """Unix seconds at which it ends by itself, where that is known. The caller that suspends keeps
    the time: nothing here resumes on its own."""


class Suspendable(Protocol):
    """What can be ordered to stop computing and to continue: a volunteer, or a group of them."""

    @property
    def suspended(self) -> Suspension | None: ...

    def suspend(self, reason: SuspendReason, until: float | None = None) -> None:
        """Compute nothing from now on. A second call replaces reason and time."""

    def resume(self) -> None:
        """Continue. Does nothing when not suspended."""
