"""Which devices are offered to a run, and how much memory of each, under the preferences."""

from __future__ import annotations

import psutil

from swarm_client.governor.policy import GIB, gpu_index
from swarm_client.machine.devices import Device, choose_devices
from swarm_client.preferences import Preferences


def usable_devices(
    wanted: str,
    memory_bytes: int | None,
    preferences: Preferences,
    gpus: list[tuple[str, int]] | None = None,
) -> tuple[Device, ...]:
    """As `choose_devices`; `auto` passes over GPUs that are not to be used."""
    return choose_devices(wanted, memory_bytes, gpus, lambda index: preferences.for_gpu(index).use)


def most_memory(device: str, preferences: Preferences, *, has_display: bool) -> int | None:
    """What a stage may take; None: as much as there is.

    On a machine with a display the stage must fit what is allowed while somebody sits there, if
    it is to be computed with then.
    """
    index = gpu_index(device)
    if index is not None:
        return int(preferences.for_gpu(index).vram_gib * GIB) or None
    shared = has_display and preferences.run_if_user_active
    percent = preferences.memory_percent_idle
    if shared:
        percent = min(percent, preferences.memory_percent_busy)
    return int(psutil.virtual_memory().total * percent / 100)
