"""Suspension: why nothing is computed for the moment, and the interface to order and end it.

A suspended volunteer keeps its stage and what it has accumulated: it takes no new microbatch,
finishes what is in flight within GRACE_SECONDS or hands it back, and still takes part in step
closes, because the run has counted its gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from swarm_client.control.status_document import SuspendReason

GRACE_SECONDS: Final = 0.9
"""Seconds for microbatches in flight to be finished; what remains is handed back. Together with the
time until a user is detected (at most 0.5 s, 1 s through logind), the machine is its user's again
within two seconds."""

LONG_PAUSE_SECONDS: Final = 600.0
"""Length of a pause after which the stage is given up. Until then coming back costs nothing; later,
averaging in every step costs more uplink than a download does."""


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
