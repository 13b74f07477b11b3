"""What this machine offers: its devices, and the memory that a stage may take on each.

torch is never imported into the daemon: CUDA devices are listed by a short-lived child process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import psutil

from swarm_shared.base.errors import CapacityError, UsageError
from swarm_shared.base.memory import MemoryOffer

MEMORY_SHARE = 0.8
"""Fraction of the free memory that is offered; the rest is for what the profile cannot predict."""

MAX_DEVICES = 64
"""Maximum number of devices. Each is a peer with processes of its own; machines with more GPUs run
several clients."""

_PROBE = """
import json, torch
print(json.dumps([[torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)[0]]
                  for i in range(torch.cuda.device_count())]))
"""
PROBE_SECONDS = 60.0
"""Timeout of the child process that lists CUDA devices."""


@dataclass(frozen=True, slots=True)
class Device:
    """`name` in torch's spelling, `label` for people, and the memory to offer, in bytes."""

    name: str
    label: str
    memory_bytes: int
    number: int = 1
    """Number among volunteers that share the device."""
    host_bytes: int | None = None
    """Of the host besides; None: the device computes in the host's memory."""

    @property
    def memory(self) -> MemoryOffer:
        return MemoryOffer(device_bytes=self.memory_bytes, host_bytes=self.host_bytes)

    @property
    def id(self) -> str:
        """Like cuda:0; cuda:0#2 for the second volunteer on it."""
        return self.name if self.number == 1 else f"{self.name}#{self.number}"


def choose_device(
    wanted: str, memory_bytes: int | None = None, gpus: list[tuple[str, int]] | None = None
) -> Device:
    """The requested device. `auto` chooses the first GPU if there is one.

    `gpus`, as (name, free bytes), avoids listing them again. UsageError for an invalid name,
    CapacityError when the GPU does not exist.
    """
    if wanted == "cpu":
        return _cpu(memory_bytes)
    if wanted != "auto" and not re.fullmatch(r"cuda:[0-9]{1,3}", wanted):
        raise UsageError(f"--device {wanted!r} is not valid; give cpu, cuda:0 or auto")
    gpus = _gpus() if gpus is None else gpus
    if wanted == "auto":
        if not gpus:
            return _cpu(memory_bytes)
        wanted = "cuda:0"
    index = int(wanted.removeprefix("cuda:"))
    if index >= len(gpus):
        seen = f"torch sees {len(gpus)} GPU(s)" if gpus else "torch sees no GPU"
        raise CapacityError(
            f"this machine has no {wanted}: {seen}; use --device cpu, or install a driver and a "
            "torch build with CUDA"
        )
    name, free = gpus[index]
    return Device(wanted, name, memory_bytes or int(free * MEMORY_SHARE), host_bytes=_host_bytes())


def choose_devices(
    wanted: str,
    memory_bytes: int | None = None,
    gpus: list[tuple[str, int]] | None = None,
    usable: Callable[[int], bool] = lambda index: True,
) -> tuple[Device, ...]:
    """All requested devices, named with commas between them; at least one.

    `auto` alone chooses every GPU that is `usable`, by its number, or else the processor. A device
    that is named twice is shared with its memory, and all share the host's; `memory_bytes` is per
    volunteer.
    """
    names = [name.strip() for name in wanted.split(",")]
    if len(names) > MAX_DEVICES:
        raise UsageError(
            f"{len(names)} devices were given; at most {MAX_DEVICES} can be used at once"
        )
    if len(names) > 1 and "auto" in names:
        raise UsageError("--device auto uses all devices; give no other device with it")
    if names != ["cpu"]:
        gpus = _gpus() if gpus is None else gpus
    if names == ["auto"] and gpus:
        names = [f"cuda:{i}" for i in range(len(gpus)) if usable(i)][:MAX_DEVICES] or ["cpu"]
    found = [choose_device(name, memory_bytes, gpus) for name in names]
    return tuple(_share(found, place) for place in range(len(found)))


def _share(devices: Sequence[Device], place: int) -> Device:
    """The device at `place` with its share of the host's memory, and of its own when it occurs
    several times in the list."""
    device = devices[place]
    if device.host_bytes is not None:
        device = replace(device, host_bytes=device.host_bytes // len(devices))
    sharers = [at for at, other in enumerate(devices) if other.name == device.name]
    if len(sharers) == 1:
        return device
    number = sharers.index(place) + 1
    return replace(
        device, label=f"{device.label} ({number} of {len(sharers)})", number=number,
        memory_bytes=device.memory_bytes // len(sharers),
    )  # fmt: skip


def _cpu(memory_bytes: int | None) -> Device:
    cores = psutil.cpu_count(logical=True) or 1
    return Device("cpu", f"CPU, {cores} cores", memory_bytes or _host_bytes())


def _host_bytes() -> int:
    return int(psutil.virtual_memory().available * MEMORY_SHARE)


def _gpus() -> list[tuple[str, int]]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True, timeout=PROBE_SECONDS, check=True, text=True,
        )  # fmt: skip
        return [(str(name), int(free)) for name, free in json.loads(done.stdout)]
    except (subprocess.SubprocessError, ValueError):
        return []  # a torch without CUDA, or a driver that does not answer: no GPU to use
