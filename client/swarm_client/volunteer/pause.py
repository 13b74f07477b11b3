"""A volunteer's pause as it passes: at once, after the grace, and when it is a long one.

What a pause means and who may order one is in `suspension`. Here is what happens in it.
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarm_client.control.status_document import SuspendReason
from swarm_client.control.suspension import GRACE_SECONDS, Suspension
from swarm_client.pipeline.stage_server import StageServer
from swarm_client.pipeline.trainer_role import TrainerRole


class Pause:
    """The one switch of a volunteer. `changed` tells the coordinator of it."""

    def __init__(
        self,
        trainer: TrainerRole,
        server: StageServer,
        changed: Callable[[], None],
        leave_until_resumed: Callable[[], None],
        long_seconds: float,
        nursery: trio.Nursery,
    ) -> None:
        """`leave_until_resumed` gives the stage up: a pause has lasted for `long_seconds`."""
        self.suspension: Suspension | None = None
        self._trainer = trainer
        self._server = server
        self._changed = changed
        self._leave_until_resumed = leave_until_resumed
        self._long_seconds = long_seconds
        self._nursery = nursery
        self._leaving = False
        self._over = trio.Event()
        """Set when a pause ends, or when the volunteer is to leave in the middle of one."""

    def suspend(self, reason: SuspendReason, until: float | None) -> None:
        began = self.suspension is None
        self.suspension = Suspension(reason, until)
        if began:
            self._trainer.pause()
            self._server.pause()
            self._changed()
            self._over = trio.Event()
            if not self._leaving:
                self._nursery.start_soon(self._escalate, self._over)

    def resume(self) -> None:
        if self.suspension is not None:
            self.suspension = None
            self._over.set()
            self._trainer.resume()
            self._server.resume()
            self._changed()

    def leave(self) -> None:
        """Nobody waits for the end of a pause any more."""
        self._leaving = True
        self._over.set()

    async def wait_over(self) -> None:
        await self._over.wait()

    @property
    def awaited(self) -> bool:
        """Whether something stands still until the pause is over."""
        return self._over.statistics().tasks_waiting > 0

    async def _escalate(self, over: trio.Event) -> None:
        with trio.move_on_after(GRACE_SECONDS):
            await over.wait()
            return
        self._server.hand_back()
        with trio.move_on_after(self._long_seconds - GRACE_SECONDS):
            await over.wait()
            return
        self._leave_until_resumed()
