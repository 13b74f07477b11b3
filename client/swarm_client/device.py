"""What this machine offers: the device and the memory a stage may take on it.

Never imports torch into the daemon: a CUDA device is looked up by a short-lived child process.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass

import psutil

from swarm_shared.errors import CapacityError, UsageError

MEMORY_SHARE = 0.8
"""Share of the free memory that is offered; the rest is for what the profile cannot foresee."""

_PROBE = """
import json, torch
print(json.dumps([[torch.cuda.get_device_name(i), torch.cuda.mem_get_info(i)[0]]
                  for i in range(torch.cuda.device_count())]))
"""
PROBE_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Device:
    """`name` as torch spells it, `label` for people, free memory in bytes."""

    name: str
    label: str
    memory_bytes: int


def choose_device(
    wanted: str, memory_bytes: int | None = None, gpus: list[tuple[str, int]] | None = None
) -> Device:
    """The device asked for. `auto` takes the first GPU if there is one.

    `gpus`, as (name, free bytes), spares the look by whoever knows them already.
    UsageError for a name that is none, CapacityError when the GPU is not there.
    """
    if wanted == "cpu":
        return _cpu(memory_bytes)
    if wanted != "auto" and not re.fullmatch(r"cuda:[0-9]{1,3}", wanted):
        raise UsageError(f"--device {wanted!r} is not known; give cpu, cuda:0 or auto")
    gpus = _gpus() if gpus is None else gpus
    if wanted == "auto":
        if not gpus:
            return _cpu(memory_bytes)
        wanted = "cuda:0"
    index = int(wanted.removeprefix("cuda:"))
    if index >= len(gpus):
        seen = f"torch sees {len(gpus)} GPU(s)" if gpus else "torch sees no GPU"
        raise CapacityError(
            f"there is no {wanted} here: {seen}; use --device cpu, or install a driver and a "
            "torch build with CUDA"
        )
    name, free = gpus[index]
    return Device(wanted, name, memory_bytes or int(free * MEMORY_SHARE))


def _cpu(memory_bytes: int | None) -> Device:
    free = int(psutil.virtual_memory().available * MEMORY_SHARE)
    cores = psutil.cpu_count(logical=True) or 1
    return Device("cpu", f"CPU, {cores} cores", memory_bytes or free)


def _gpus() -> list[tuple[str, int]]:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE],
            capture_output=True, timeout=PROBE_SECONDS, check=True, text=True,
        )  # fmt: skip
        return [(str(name), int(free)) for name, free in json.loads(done.stdout)]
    except (subprocess.SubprocessError, ValueError):
        return []  # a torch without CUDA, or a driver that does not answer: no GPU to use
