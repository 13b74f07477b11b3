"""Cores and priority of this program's processes, set from outside.

All of them are bound to the allowed cores, this one included, so that what is started later is
bound from its first instruction. Priority is lowered for the children only: this process answers
the network and the owner. Linux binds threads one by one, and threads inherit.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from swarm_client.governor.probes.machine import ProcessTree
from swarm_shared.base.clock import Clock, monotonic

REPEAT_SECONDS = 5.0
"""A thread that was being made while the others were bound is bound the next time."""


class ProcessBinding:
    def __init__(self, process_tree: ProcessTree, clock: Clock = monotonic) -> None:
        self._process_tree = process_tree
        self._clock = clock
        self._available = affinity(os.getpid())
        """What the system gave us; limits choose from these."""
        self._bound = False
        self._niced: set[int] = set()
        """Processes whose niceness is our doing."""
        self._last: object = None
        self._at = 0.0

    @property
    def available_cores(self) -> int:
        return len(self._available) if self._available else psutil.cpu_count() or 1

    def apply(self, cores: int | None, nice: int) -> None:
        """Cheap when nothing has changed."""
        pids = [member.pid for member in self._process_tree.members()]
        wanted = (cores, nice, tuple(pids))
        if wanted == self._last and self._clock() - self._at < REPEAT_SECONDS:
            return
        self._last, self._at = wanted, self._clock()
        allowed = chosen_cores(self._available, cores)
        for pid in pids:
            if allowed is not None and (self._bound or allowed != self._available):
                bind(pid, allowed)
            if pid != os.getpid():
                self._set_nice(pid, nice)
        self._bound = allowed is not None and allowed != self._available

    def _set_nice(self, pid: int, nice: int) -> None:
        if not hasattr(os, "setpriority"):
            return
        for thread in threads(pid):
            with contextlib.suppress(OSError):
                now = os.getpriority(os.PRIO_PROCESS, thread)
                # Less than the system gave is never tried; only root may take back what we did.
                if now < nice or (now > nice and pid in self._niced):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                    self._niced.add(pid)


def chosen_cores(free: frozenset[int] | None, cores: int | None) -> frozenset[int] | None:
    """The last ones: the first serve interrupts on many machines."""
    if free is None:
        return None
    return free if cores is None else frozenset(sorted(free)[-cores:])


def affinity(pid: int) -> frozenset[int] | None:
    """None where the system has no such thing."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(pid))
    process = psutil.Process(pid)
    if hasattr(process, "cpu_affinity"):
        return frozenset(process.cpu_affinity())
    return None


def bind(pid: int, cores: frozenset[int]) -> None:
    """A process that is gone, or belongs to somebody else, is left alone."""
    if hasattr(os, "sched_setaffinity"):
        for thread in threads(pid):
            with contextlib.suppress(OSError):
                os.sched_setaffinity(thread, cores)
        return
    process = psutil.Process(pid)
    if hasattr(process, "cpu_affinity"):
        with contextlib.suppress(psutil.Error, OSError):
            process.cpu_affinity(sorted(cores))


def threads(pid: int) -> list[int]:
    """On Linux all threads; elsewhere the process."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return [pid]
