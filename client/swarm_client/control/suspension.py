"""Why nothing is computed for the moment, and who may say so.

A volunteer that is suspended keeps its stage and what it has accumulated in it: it takes no new
microbatch, finishes or hands back within `GRACE_SECONDS` what is in flight, and still takes part
in closing a step, because the run holds it to the gradients that it has counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

from swarm_client.control.status_document import SuspendReason

GRACE_SECONDS: Final = 0.9
"""For microbatches in flight to be finished; what is not by then is handed back. Together with the
time until somebody is seen (at most 0.5 s, 1 s through logind), a machine is its user's again
within two seconds."""

LONG_PAUSE_SECONDS: Final = 600.0
"""After so long a pause the stage is given back: until then coming back costs nothing, and later
averaging along every step costs the volunteer's line more than a download does."""


@dataclass(frozen=True, slots=True)
class Suspension:
    reason: SuspendReason
    until: float | None = None
    """Unix seconds at which it ends by itself, where that is known. Who suspends keeps the time:
    nothing here resumes on its own."""


class Suspendable(Protocol):
    """What can be told to stop computing and to go on: a volunteer, or the daemon for it."""

    @property
    def suspended(self) -> Suspension | None: ...

    def suspend(self, reason: SuspendReason, until: float | None = None) -> None:
        """Compute nothing from now on. Again with another reason or time: that one counts."""

    def resume(self) -> None:
        """Go on. Nothing happens when it is not suspended."""
