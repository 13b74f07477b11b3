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
    """At least one volunteer."""

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
        return (one for one in self.volunteers if one.node.peer_id not in self.ended)

    @property
    def reporting_device(self) -> Volunteer:
        """The volunteer whose view of the run is reported: one with a session, if there is one."""
        those = tuple(self.active) or self.volunteers
        return next((one for one in those if one.attachment.attached), those[0])

    @property
    def finished(self) -> bool:
        """Whether the coordinator has ended at least one device's session because the run is
        finished."""
        return any(
            one.attachment.finished and not one.attachment.leaving for one in self.volunteers
        )

    @property
    def attached(self) -> bool:
        return any(one.attachment.attached for one in self.active)

    @property
    def suspended(self) -> Suspension | None:
        """The user's pause if there is one; otherwise a suspension that all active devices
        share."""
        found = [one.suspended for one in self.active]
        known = [suspension for suspension in found if suspension is not None]
        own = [one for one in known if one.reason is SuspendReason.PAUSED_BY_USER]
        if own:
            return own[0]
        return known[0] if known and len(known) == len(found) else None

    def pause(self, until: float | None) -> None:
        """Begin the user's pause; `until` in Unix seconds, None for one that `resume` ends."""
        for one in self.active:
            one.suspend(SuspendReason.PAUSED_BY_USER, until)

    def resume(self) -> None:
        """End the user's pause. Devices suspended for another reason stay suspended."""
        for one in self.active:
            if one.suspended is not None and one.suspended.reason is SuspendReason.PAUSED_BY_USER:
                one.resume()

    async def fall_asleep(self, seconds: float) -> None:
        """Have every device say goodbye to the coordinator, within `seconds` and the time that
        closing its session takes."""
        async with trio.open_nursery() as nursery:
            for one in self.active:
                nursery.start_soon(one.fall_asleep, seconds)

    def wake(self) -> None:
        """Attach again after a sleep; a pause that the user has ordered goes on."""
        for one in self.active:
            one.wake()

    def leave(self) -> None:
        for one in self.active:
            one.leave()
