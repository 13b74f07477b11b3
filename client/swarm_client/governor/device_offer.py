"""The devices offered to a run, and the memory of each, under the preferences."""

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
    """As `choose_devices`, but `auto` skips GPUs that the preferences exclude."""
    return choose_devices(wanted, memory_bytes, gpus, lambda index: preferences.for_gpu(index).use)


def most_memory(device: str, preferences: Preferences, *, has_display: bool) -> int | None:
    """Maximum bytes that a stage may take; None: as much as there is.

    On a machine with a display the stage must fit what is allowed while the machine is in use, if
    it is computed then.
    """
    index = gpu_index(device)
    if index is not None:
        return int(preferences.for_gpu(index).vram_gib * GIB) or None
    shared = has_display and preferences.run_if_user_active
    percent = preferences.memory_percent_idle
    if shared:
        percent = min(percent, preferences.memory_percent_busy)
    return int(psutil.virtual_memory().total * percent / 100)
