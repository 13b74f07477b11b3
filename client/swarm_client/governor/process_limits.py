"""Cores and priority of this program's processes, set from outside them.

All processes are bound to the allowed cores, this one included, so that a new process is bound from
its first instruction. Only the children's priority is lowered: this process answers the network and
the user. Linux binds each thread separately, and threads inherit the binding.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from swarm_client.governor.probes.machine import ProcessTree
from swarm_shared.base.clock import monotonic

REPEAT_SECONDS = 5.0
"""Seconds between two applications of an unchanged limit; a thread created during one is bound by
the next."""


class ProcessBinding:
    """Applies cores and niceness to a process tree."""

    def __init__(self, process_tree: ProcessTree) -> None:
        self._process_tree = process_tree
        self._available = affinity(os.getpid())
        """Cores that the system gave this process; limits choose from these."""
        self._bound = False
        self._niced: set[int] = set()
        """Processes whose niceness was raised here."""
        self._last: object = None
        self._at = 0.0

    @property
    def available_cores(self) -> int:
        return len(self._available) if self._available else psutil.cpu_count() or 1

    def apply(self, cores: int | None, nice: int) -> None:
        """Bind and renice. Cheap when nothing has changed."""
        pids = [member.pid for member in self._process_tree.members()]
        limits = (cores, nice, tuple(pids))
        if limits == self._last and monotonic() - self._at < REPEAT_SECONDS:
            return
        self._last, self._at = limits, monotonic()
        allowed = chosen_cores(self._available, cores)
        for pid in pids:
            if allowed is not None and (self._bound or allowed != self._available):
                bind(pid, allowed)
            if pid != os.getpid():
                self._set_nice(pid, nice)
        self._bound = allowed is not None and allowed != self._available

    def release(self) -> None:
        """Give this process its cores back, from which a later binding and the number of threads
        of a later participation are chosen."""
        if self._bound and self._available is not None:
            bind(os.getpid(), self._available)
            self._bound, self._last = False, None

    def _set_nice(self, pid: int, nice: int) -> None:
        for thread in threads(pid):
            with contextlib.suppress(OSError):
                now = os.getpriority(os.PRIO_PROCESS, thread)
                # Never below what the system gave; only root may lower a niceness that was raised
                # here.
                if now < nice or (now > nice and pid in self._niced):
                    os.setpriority(os.PRIO_PROCESS, thread, nice)
                    self._niced.add(pid)


def chosen_cores(free: frozenset[int] | None, cores: int | None) -> frozenset[int] | None:
    """Return the last `cores` of the free ones: the first ones serve interrupts on many
    machines."""
    if free is None:
        return None
    return free if cores is None else frozenset(sorted(free)[-cores:])


def affinity(pid: int) -> frozenset[int] | None:
    """Cores of a process; None where the system has no affinity."""
    return frozenset(os.sched_getaffinity(pid)) if hasattr(os, "sched_getaffinity") else None


def bind(pid: int, cores: frozenset[int]) -> None:
    """Bind a process to cores. One that has exited or belongs to another user is left alone."""
    for thread in threads(pid):
        with contextlib.suppress(OSError):
            os.sched_setaffinity(thread, cores)


def threads(pid: int) -> list[int]:
    """Return the threads of a process on Linux; elsewhere the process itself."""
    try:
        return [int(entry.name) for entry in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return [pid]
