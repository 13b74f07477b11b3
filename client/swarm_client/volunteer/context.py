"""What a volunteer is made of, and shares with all its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import trio

from swarm_client.control.contribution_log import ContributionCounter
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.training_data.leaf_cache import LeafCache
from swarm_client.volunteer.memory_shortage import MemoryShortage
from swarm_shared.base.clock import RunClock
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import StageIndex
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node

LONG_PAUSE_SECONDS: Final = 600.0
"""Length of a pause after which the stage is given up. Until then coming back costs nothing; later,
averaging in every step costs more uplink than a download does."""


SELF_TEST_SECONDS: Final = 60.0
"""Duration of the self-test of a machine whose results were found wrong."""


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """The limits of what a worker may use of its device. `threads` counts only below the number
    that the worker was started with."""

    duty_cycle: float = 1.0
    threads: int = 1024
    vram_bytes: int | None = None


@dataclass(slots=True)
class VolunteerOptions:
    """What a user has chosen for one device; the governor changes the device's offer, and the
    limits."""

    device: Device
    """The device; its offered memory follows the preferences."""
    threads: int
    wanted_stage: StageIndex | None
    name: str | None
    may_relay: bool = True
    long_pause_seconds: float = LONG_PAUSE_SECONDS
    self_test_seconds: float = SELF_TEST_SECONDS
    team: str | None = None
    owner: str | None = None
    """The machine's signed owner binding for this device, in base64; None for the machine
    itself."""
    private_web_downloads: bool = False
    """Whether mirrors with http or private addresses may be asked."""
    shortage: MemoryShortage = field(default_factory=MemoryShortage)
    limits: WorkerLimits = WorkerLimits()

    def offer(self, now: float) -> MemoryOffer:
        """Return the memory that a stage may take now."""
        return self.shortage.remaining(self.device.memory, now)


@dataclass(frozen=True, slots=True)
class VolunteerContext:
    """What a volunteer of one device in one run is made from."""

    identity: Identity
    invite: Invite
    home: Home
    node: Node
    options: VolunteerOptions
    contribution: ContributionCounter
    data_cache: LeafCache
    """The training data on this machine's disk, shared by its devices."""
    claim_disk: Callable[[int], None]
    """Raises StorageError when so many bytes more may not be written."""
    report: Callable[[str], None]
    """Reports one line for people."""
    nursery: trio.Nursery
    """Runs the volunteer's background tasks."""
    clock: RunClock = field(default_factory=RunClock)
