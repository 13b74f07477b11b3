"""The volunteers of one machine in one run: one for each of its devices.

Each is a member in its own right, with a key, a link, a session and a stage (decision 0019). What
their owner says (pause, resume, leave) is said to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from swarm_client.control.status_document import SuspendReason
from swarm_client.control.suspension import Suspension
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import PeerId


class DeviceGroup:
    """Satisfies `Suspendable`, for the owner's own pause. Has at least one member."""

    def __init__(self, volunteers: Sequence[Volunteer]) -> None:
        assert volunteers, "a machine has at least one device"
        self.volunteers = tuple(volunteers)
        self.ended: set[PeerId] = set()
        """Who takes part no more, while others may still do."""
        self.failures: dict[PeerId, SwarmError] = {}
        """Of those, why, where it was an error."""

    @property
    def active(self) -> Iterator[Volunteer]:
        """Those that take part."""
        return (one for one in self.volunteers if one.node.peer_id not in self.ended)

    @property
    def reporting_device(self) -> Volunteer:
        """Whose word on the run as a whole is taken: one that hears the coordinator, if any."""
        those = tuple(self.active) or self.volunteers
        return next((one for one in those if one.attachment.session is not None), those[0])

    @property
    def finished(self) -> bool:
        """The run is, as at least one of them was told."""
        return any(
            one.attachment.finished and not one.attachment.leaving for one in self.volunteers
        )

    @property
    def attached(self) -> bool:
        return any(one.attachment.session is not None for one in self.active)

    @property
    def suspended(self) -> Suspension | None:
        """The owner's pause, if there is one; else another one that holds for all of them."""
        found = [one.suspended for one in self.active]
        known = [suspension for suspension in found if suspension is not None]
        own = [one for one in known if one.reason is SuspendReason.PAUSED_BY_USER]
        if own:
            return own[0]
        return known[0] if known and len(known) == len(found) else None

    def suspend(self, reason: SuspendReason, until: float | None = None) -> None:
        for one in self.active:
            one.suspend(reason, until)

    def resume(self) -> None:
        """What their owner paused goes on; what was paused for another reason waits for its end."""
        for one in self.active:
            if one.suspended is not None and one.suspended.reason is SuspendReason.PAUSED_BY_USER:
                one.resume()

    def leave(self) -> None:
        for one in self.active:
            one.leave()
