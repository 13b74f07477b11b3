"""The user's options for one participation in a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import trio

from swarm_client.machine.devices import Device
from swarm_shared.base.types import StageIndex

LONG_PAUSE_SECONDS: Final = 600.0
"""Length of a pause after which the stage is given up. Until then coming back costs nothing; later,
averaging in every step costs more uplink than a download does."""


@dataclass(slots=True)
class VolunteerOptions:
    device: Device
    """Its offered memory follows the preferences."""
    threads: int
    wanted_stage: StageIndex | None
    name: str | None
    may_relay: bool = True
    long_pause_seconds: float = LONG_PAUSE_SECONDS
    team: str | None = None
    owner: str | None = None
    """The machine's signed owner binding for this device, in base64; None for the machine
    itself."""
    data_lock: trio.Lock | None = None
    """Shared by devices with a common data folder: one of them fills it at a time."""
