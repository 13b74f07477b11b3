"""The volunteer's link to the coordinator, as its parts use it."""

from __future__ import annotations

from typing import Protocol

from swarm_shared.base.frozen_model import FrozenModel


class CoordinatorLink(Protocol):
    @property
    def attached(self) -> bool:
        """Whether there is a session."""

    def send(self, message: FrozenModel) -> bool:
        """Send a message; False while there is no session."""
