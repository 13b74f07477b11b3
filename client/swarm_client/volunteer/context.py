"""What a volunteer is made of, and shares with all its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import trio

from swarm_client.machine.home import Home
from swarm_client.volunteer.contribution import ContributionCounter
from swarm_client.volunteer.options import VolunteerOptions
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node


class DiskGuard(Protocol):
    """Decides what may be written to this machine's disk."""

    def claim(self, size_bytes: int) -> None:
        """Raise StorageError when `size_bytes` more may not be written."""


@dataclass(frozen=True, slots=True)
class VolunteerContext:
    """One device in one run."""

    identity: Identity
    invite: Invite
    home: Home
    node: Node
    options: VolunteerOptions
    contribution: ContributionCounter
    disk: DiskGuard
    report: Callable[[str], None]
    """Reports one line for people."""
    nursery: trio.Nursery
    """Runs the volunteer's background tasks."""
