"""The devices offered to a run, and the memory of each, under the preferences."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_client.governor.policy import GIB
from swarm_client.machine.device_names import number_of
from swarm_client.machine.devices import Device, ListedAccelerator, choose_devices
from swarm_client.preferences import Preferences
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.host.memory import host_memory

PROGRAM_BYTES = 896 * 2**20
"""Bytes of the host's memory that a volunteer takes beside what its stage is offered: daemon,
averaging worker, torch, and an allocator's fragments. 0.6 to 0.86 GiB were measured on processors
(presets `tiny` and `small`, offers of 0.8 to 3 GiB)."""


def usable_devices(
    choice: str,
    memory_bytes: int | None,
    preferences: Preferences,
    listed: Sequence[ListedAccelerator] | None = None,
) -> tuple[Device, ...]:
    """Choose devices as `choose_devices` does, but let `auto` skip accelerators that the
    preferences exclude."""
    return choose_devices(
        choice, memory_bytes, listed, lambda number: preferences.for_gpu(number).use
    )


def permitted_memory(
    device: Device, preferences: Preferences, sharers: int, devices: int, *, has_display: bool
) -> MemoryOffer:
    """Return the memory that a stage may take on a device that `sharers` volunteers share, on a
    machine where `devices` volunteers take part.

    With it and the rest of the program together, the volunteers keep to the preferences, so that
    these never pause them (`swarm_client.governor.policy`).
    """
    of_host = _permitted_host_bytes(preferences, has_display=has_display)
    index = number_of(device.name)
    if index is None or device.host_bytes is None:
        of_stage = max(0, of_host // sharers - PROGRAM_BYTES)
        return device.memory.replaced(min(of_stage, device.memory_bytes))
    vram_bytes = int(preferences.for_gpu(index).vram_gib * GIB)  # 0: no limit
    return MemoryOffer(
        device_bytes=min(vram_bytes // sharers or device.memory_bytes, device.memory_bytes),
        host_bytes=min(max(0, of_host // devices - PROGRAM_BYTES), device.host_bytes),
        balance=device.memory.balance,
    )


def _permitted_host_bytes(preferences: Preferences, *, has_display: bool) -> int:
    """Return the host memory that the preferences permit to the whole program.

    On a machine with a display the stage must fit what is allowed while the machine is in use, if
    it is computed then.
    """
    percent = preferences.memory_percent_idle
    if has_display and preferences.run_if_user_active:
        percent = min(percent, preferences.memory_percent_busy)
    return int(host_memory().total_bytes * percent / 100)
