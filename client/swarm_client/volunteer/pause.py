"""The course of a volunteer's pause: at once, after the grace period, and once it is a long one.

A suspended volunteer keeps its stage and what it has accumulated: it takes no new microbatch,
finishes what is in flight within GRACE_SECONDS or hands it back, and still takes part in step
closes, because the run has counted its gradients. After a long pause it gives the stage up.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import trio

from swarm_client.control.status_document import SuspendReason
from swarm_client.control.status_sentence import Suspension

if TYPE_CHECKING:
    from swarm_client.volunteer.volunteer import Volunteer

GRACE_SECONDS: Final = 0.9
"""Seconds for microbatches in flight to be finished; what remains is handed back. Together with the
time until a user is detected (at most 0.5 s), the machine is its user's again within two
seconds."""


class Pause:
    """The pause switch of one volunteer; a pause of `long_seconds` gives its stage up."""

    def __init__(self, volunteer: Volunteer, long_seconds: float, nursery: trio.Nursery) -> None:
        self.suspension: Suspension | None = None
        self._volunteer = volunteer
        self._long_seconds = long_seconds
        self._nursery = nursery
        self._leaving = False
        self.over = trio.Event()
        """Set when a pause ends, or when the volunteer leaves during one."""

    def suspend(self, reason: SuspendReason, until: float | None) -> None:
        """Begin a pause, or give the one in force this reason and end. `until` in Unix seconds."""
        began = self.suspension is None
        self.suspension = Suspension(reason, until)
        if began:
            self._volunteer.pause_work()
            self.over = trio.Event()
            if not self._leaving:
                self._nursery.start_soon(self._escalate, self.over)

    def resume(self) -> None:
        """End the pause, if there is one."""
        if self.suspension is not None:
            self.suspension = None
            self.over.set()
            self._volunteer.resume_work()

    def leave(self) -> None:
        """Release the tasks that wait for the end of a pause."""
        self._leaving = True
        self.over.set()

    async def _escalate(self, over: trio.Event) -> None:
        with trio.move_on_after(GRACE_SECONDS):
            await over.wait()
            return
        self._volunteer.hand_back_work()
        with trio.move_on_after(self._long_seconds - GRACE_SECONDS):
            await over.wait()
            return
        self._volunteer.leave_until_resumed()
