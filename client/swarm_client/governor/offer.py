"""Which device is offered to a run, and how much of its memory, under the preferences."""

from __future__ import annotations

import psutil

from swarm_client.device import Device, choose_device
from swarm_client.governor.policy import GIB, gpu_index
from swarm_client.preferences import Preferences
from swarm_shared.errors import CapacityError


def usable_device(
    wanted: str,
    memory_bytes: int | None,
    preferences: Preferences,
    gpus: list[tuple[str, int]] | None = None,
) -> Device:
    """As `choose_device`; `auto` passes over GPUs that are not to be used."""
    device = choose_device(wanted, memory_bytes, gpus)
    index = gpu_index(device.name)
    while wanted == "auto" and index is not None and not preferences.for_gpu(index).use:
        index += 1
        try:
            device = choose_device(f"cuda:{index}", memory_bytes, gpus)
        except CapacityError:  # that was the last one
            device, index = choose_device("cpu", memory_bytes, gpus), None
    return device


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
