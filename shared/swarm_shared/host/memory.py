"""The memory of the host that this process may use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from swarm_shared.host.control_groups import OF_THIS_PROCESS, memory_limits


@dataclass(frozen=True, slots=True)
class HostMemory:
    """Bytes of memory, of the machine or of the control group that allows least."""

    total_bytes: int
    available_bytes: int
    """What can be taken without swapping."""


def host_memory(process: Path = OF_THIS_PROCESS) -> HostMemory:
    """Return the memory that the machine and the process's control groups leave."""
    machine = psutil.virtual_memory()
    limits = list(memory_limits(machine.total, process))
    return HostMemory(
        min([machine.total, *(limit.limit_bytes for limit in limits)]),
        min([machine.available, *(limit.available_bytes for limit in limits)]),
    )
