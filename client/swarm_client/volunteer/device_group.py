"""The volunteers of one machine in one run, one for each of its devices.

Each is a member of its own, with a key, a node, a session and a stage (decision 0019). The owner's
commands (pause, resume, leave) apply to all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import trio

from swarm_client.control.status_document import SuspendReason
from swarm_client.control.status_sentence import Suspension
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import PeerId


class DeviceGroup:
    """The volunteers of one machine in one run; there is at least one."""

    def __init__(self, volunteers: Sequence[Volunteer]) -> None:
        assert volunteers, "a machine has at least one device"
        self.volunteers = tuple(volunteers)
        self.ended: set[PeerId] = set()
        """Peers whose participation has ended while other devices may continue."""
        self.failures: dict[PeerId, SwarmError] = {}
        """The error of each ended device that ended with one."""

    @property
    def active(self) -> Iterator[Volunteer]:
        """Volunteers that still participate."""
        return (v for v in self.volunteers if v.node.peer_id not in self.ended)

    @property
    def reporting_device(self) -> Volunteer:
        """The volunteer whose view of the run is reported: one with a session, if there is one."""
        candidates = tuple(self.active) or self.volunteers
        return next((v for v in candidates if v.attachment.attached), candidates[0])

    @property
    def finished(self) -> bool:
        """Whether the coordinator has ended at least one device's session because the run is
        finished."""
        return any(v.attachment.finished and not v.attachment.leaving for v in self.volunteers)

    @property
    def attached(self) -> bool:
        """Whether a device has a session with the coordinator."""
        return any(v.attachment.attached for v in self.active)

    @property
    def suspended(self) -> Suspension | None:
        """The user's pause if there is one; otherwise a suspension that all active devices
        share."""
        per_device = [volunteer.suspended for volunteer in self.active]
        suspensions = [suspension for suspension in per_device if suspension is not None]
        for suspension in suspensions:
            if suspension.reason is SuspendReason.PAUSED_BY_USER:
                return suspension
        return suspensions[0] if suspensions and len(suspensions) == len(per_device) else None

    def pause(self, until: float | None) -> None:
        """Begin the user's pause; `until` in Unix seconds, None for one that `resume` ends."""
        for volunteer in self.active:
            volunteer.suspend(SuspendReason.PAUSED_BY_USER, until)

    def resume(self) -> None:
        """End the user's pause. Devices suspended for another reason stay suspended."""
        for volunteer in self.active:
            if (
                volunteer.suspended is not None
                and volunteer.suspended.reason is SuspendReason.PAUSED_BY_USER
            ):
                volunteer.resume()

    async def fall_asleep(self, seconds: float) -> None:
        """Have every device say goodbye to the coordinator, within `seconds` and the time that
        closing its session takes."""
        async with trio.open_nursery() as nursery:
            for volunteer in self.active:
                nursery.start_soon(volunteer.fall_asleep, seconds)

    def wake(self) -> None:
        """Attach again after a sleep; a pause that the user has ordered goes on."""
        for volunteer in self.active:
            volunteer.wake()

    def leave(self) -> None:
        """Have every device finish what is in flight, then leave the run."""
        for volunteer in self.active:
            volunteer.leave()
