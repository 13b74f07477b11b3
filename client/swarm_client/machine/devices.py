"""What this machine offers: its devices, and the memory that a stage may take on each.

torch is never imported into the daemon: accelerators are listed by a short-lived child process
(`swarm_client.stage.worker.accelerator`).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from swarm_client.machine.device_names import (
    MAX_DEVICES,
    PROCESSOR,
    check_name,
    full_name,
    number_of,
    split_names,
)
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MachineBalance, MemoryOffer
from swarm_shared.host.cores import usable_cores
from swarm_shared.host.memory import host_memory
from swarm_shared.host.python_modules import module_command

MEMORY_SHARE = 0.8
"""Fraction of the free memory that is offered; the rest is for what the profile cannot predict."""

_PROBE_MODULE = "swarm_client.stage.worker.accelerator"
PROBE_SECONDS = 60.0
"""Timeout of the child process that lists accelerators."""


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """The measured rates at which a device copies and computes."""

    copied_bytes_per_second: float
    """Bytes per second from and to pinned host memory, in each direction while both are copied."""
    float32_flops_per_second: float
    """Operations per second in products of matrices."""
    bfloat16_flops_per_second: float

    @property
    def balance(self) -> MachineBalance:
        return MachineBalance(
            float32=self.float32_flops_per_second / self.copied_bytes_per_second,
            bfloat16=self.bfloat16_flops_per_second / self.copied_bytes_per_second,
        )


@dataclass(frozen=True, slots=True)
class ListedAccelerator:
    """An accelerator of this machine, by its name in torch's spelling."""

    name: str
    label: str
    free_bytes: int
    has_own_memory: bool = True
    """False: it computes in the host's memory."""
    rates: DeviceRates | None = None
    """The measured rates; None if they are unknown, or for a device without memory of its own."""


@dataclass(frozen=True, slots=True)
class Device:
    """`name` in torch's spelling, `label` for people, and the memory to offer, in bytes."""

    name: str
    label: str
    memory_bytes: int
    number: int = 1
    """Number among volunteers that share the device."""
    host_bytes: int | None = None
    """Memory of the host that is offered besides, in bytes; None if the device computes in the
    host's memory."""
    rates: DeviceRates | None = None

    def offering(self, memory: MemoryOffer) -> Device:
        """Return the device with another offer."""
        return replace(self, memory_bytes=memory.device_bytes, host_bytes=memory.host_bytes)

    @property
    def memory(self) -> MemoryOffer:
        balance = None if self.rates is None else self.rates.balance
        return MemoryOffer(
            device_bytes=self.memory_bytes, host_bytes=self.host_bytes, balance=balance
        )

    @property
    def id(self) -> str:
        """The name, with #2 behind it for the second volunteer on the device."""
        return self.name if self.number == 1 else f"{self.name}#{self.number}"


def choose_device(
    wanted: str,
    memory_bytes: int | None = None,
    listed: Sequence[ListedAccelerator] | None = None,
) -> Device:
    """The requested device. `auto` chooses the first accelerator if there is one.

    `listed` avoids listing the accelerators again. UsageError for an invalid name, CapacityError
    when the device does not exist.
    """
    check_name(wanted)
    if wanted == PROCESSOR:
        return _cpu(memory_bytes)
    listed = list_accelerators() if listed is None else listed
    if wanted == "auto":
        if not listed:
            return _cpu(memory_bytes)
        wanted = listed[0].name
    accelerator = next((a for a in listed if a.name == full_name(wanted)), None)
    if accelerator is None:
        seen = ", ".join(a.name for a in listed) or "no GPU"
        raise CapacityError(
            f"this machine has no {wanted}: torch sees {seen}; use --device cpu, or install a "
            "driver and a torch that is built for this device"
        )
    return Device(
        accelerator.name, accelerator.label,
        memory_bytes or int(accelerator.free_bytes * MEMORY_SHARE),
        host_bytes=_host_bytes() if accelerator.has_own_memory else None, rates=accelerator.rates,
    )  # fmt: skip


def choose_devices(
    wanted: str,
    memory_bytes: int | None = None,
    listed: Sequence[ListedAccelerator] | None = None,
    usable: Callable[[int], bool] = lambda number: True,
) -> tuple[Device, ...]:
    """Return all requested devices, named with commas between them; at least one.

    `auto` alone chooses every accelerator that is `usable`, by its number, or else the processor. A
    device that is named twice is shared with its memory, and all share the host's; `memory_bytes`
    is per volunteer.
    """
    names = split_names(wanted)
    if names != [PROCESSOR]:
        listed = list_accelerators() if listed is None else listed
    if names == ["auto"] and listed:
        usable_names = [a.name for a in listed if usable(number_of(a.name) or 0)]
        names = usable_names[:MAX_DEVICES] or [PROCESSOR]
    devices = [choose_device(name, memory_bytes, listed) for name in names]
    return tuple(_share(devices, place) for place in range(len(devices)))


def _share(devices: Sequence[Device], place: int) -> Device:
    """The device at `place` with its share of the host's memory, and of its own when it occurs
    several times in the list."""
    device = devices[place]
    sharers = [at for at, other in enumerate(devices) if other.name == device.name]
    in_one_memory = len(sharers)
    if device.host_bytes is not None:
        # Each reading is of another moment.
        least_host_bytes = min(
            other.host_bytes for other in devices if other.host_bytes is not None
        )
        device = replace(device, host_bytes=least_host_bytes // len(devices))
    else:  # devices that compute in the host's memory, of whatever name
        in_one_memory = sum(other.host_bytes is None for other in devices)
    device = replace(device, memory_bytes=device.memory_bytes // in_one_memory)
    if len(sharers) == 1:
        return device
    number = sharers.index(place) + 1
    return replace(device, label=f"{device.label} ({number} of {len(sharers)})", number=number)


def _cpu(memory_bytes: int | None) -> Device:
    cores = usable_cores()
    label = f"CPU, {cores} core{'' if cores == 1 else 's'}"
    return Device(PROCESSOR, label, memory_bytes or _host_bytes())


def _host_bytes() -> int:
    return int(host_memory().available_bytes * MEMORY_SHARE)


def list_accelerators() -> list[ListedAccelerator]:
    """The accelerators that torch sees and can compute with."""
    try:
        done = subprocess.run(
            module_command(_PROBE_MODULE),
            capture_output=True, timeout=PROBE_SECONDS, check=True, text=True,
        )  # fmt: skip
        return [listed_accelerator(entry) for entry in json.loads(done.stdout)]
    except (subprocess.SubprocessError, ValueError):
        return []  # a torch without one, or a driver that does not answer: nothing to use


def listed_accelerator(entry: Mapping[str, Any]) -> ListedAccelerator:
    """Return an accelerator from its entry in the answer of the child process."""
    rates = entry["rates"]
    return ListedAccelerator(
        str(entry["name"]), str(entry["label"]), int(entry["free_bytes"]),
        bool(entry["has_own_memory"]), None if rates is None else DeviceRates(**rates),
    )  # fmt: skip
