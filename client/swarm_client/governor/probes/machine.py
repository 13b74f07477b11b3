"""Processor, memory, disk and power, through psutil, with this program's own use of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

import psutil

from swarm_shared.base.clock import Clock, monotonic

T = TypeVar("T")

PROCESS_TREE_SECONDS = 5.0
"""Seconds between two searches for new child processes, which read every process of the machine."""
DISK_SECONDS = 10.0
"""Seconds between two walks through the home; free space is read every time."""
POWER_SECONDS = 2.0
"""Seconds between two readings of the power supply."""
MEMORY_SECONDS = 5.0
"""Seconds between two readings of the own processes' memory, which the kernel has to add up."""


class ProcessTree:
    """This process and all its descendants."""

    def __init__(self, clock: Clock = monotonic) -> None:
        self._self = psutil.Process()
        self._clock = clock
        self._looked_at = -PROCESS_TREE_SECONDS
        self._members: list[psutil.Process] = [self._self]

    def members(self) -> list[psutil.Process]:
        if self._clock() - self._looked_at >= PROCESS_TREE_SECONDS:
            self.refresh()
        return self._members

    def refresh(self) -> None:
        """Search now, because a process was started."""
        self._looked_at = self._clock()
        previous = {member.pid: member for member in self._members}
        try:
            children = self._self.children(recursive=True)
        except psutil.Error:
            children = []
        # Keep the old objects, which hold their previous readings.
        self._members = [self._self, *(_same(previous.get(child.pid), child) for child in children)]

    def memory_bytes(self) -> int:
        """Resident memory; pages that processes share (tensors passed between them) count once."""
        total, shared = 0, 0
        for process in self.members():
            try:
                memory = process.memory_info()
            except psutil.Error:
                continue
            common = getattr(memory, "shared", 0)
            total += memory.rss - common
            shared = max(shared, common)
        return total + shared


def _same(old: psutil.Process | None, new: psutil.Process) -> psutil.Process:
    return old if old is not None and old == new else new


class CpuProbe:
    """Shares of all cores since the previous call; None at the first."""

    def __init__(self, process_tree: ProcessTree) -> None:
        self._process_tree = process_tree
        self._cores = psutil.cpu_count() or 1
        self._all: tuple[float, float] | None = None

    def shares(self) -> tuple[float | None, float | None]:
        """Return the share of all programs, and that of this one with its children."""
        times = psutil.cpu_times()
        # Guest times are part of user's; waiting for a disk counts as idle.
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        busy = total - times.idle - getattr(times, "iowait", 0.0)
        own_percent = 0.0  # of one core; each process remembers its previous reading
        for process in self._process_tree.members():
            with contextlib.suppress(psutil.Error):
                own_percent += process.cpu_percent()
        before, self._all = self._all, (busy, total)
        if before is None or total <= before[1]:
            return None, None
        share = (busy - before[0]) / (total - before[1])
        return min(1.0, max(0.0, share)), min(1.0, own_percent / 100 / self._cores)


class CachedReading(Generic[T]):
    """Calls `ask` only every `seconds` and caches the answer."""

    def __init__(self, ask: Callable[[], T | None], seconds: float, clock: Clock) -> None:
        self._ask = ask
        self._seconds = seconds
        self._clock = clock
        self._asked_at = -seconds
        self._answer: T | None = None

    def __call__(self) -> T | None:
        if self._clock() - self._asked_at >= self._seconds:
            self._asked_at = self._clock()
            self._answer = self._ask()
        return self._answer

    def forget(self) -> None:
        """Have the next call ask anew."""
        self._asked_at = self._clock() - self._seconds


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below; files that vanish meanwhile count nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total


class DiskProbe:
    """The free space of a folder's disk, and the bytes of the folder."""

    def __init__(self, folder: Path, clock: Clock = monotonic) -> None:
        self._folder = folder
        self.used = CachedReading(lambda: folder_bytes(folder), DISK_SECONDS, clock)

    def free_bytes(self) -> int | None:
        """Free bytes on the disk; None if they cannot be read."""
        try:
            return psutil.disk_usage(str(self._folder)).free
        except OSError:
            return None


def on_batteries() -> bool | None:
    """Whether this machine runs on battery power; None without a battery, or when its use is
    unknown."""
    try:
        battery = psutil.sensors_battery()
    except (OSError, RuntimeError, psutil.Error):
        return None
    if battery is None or battery.power_plugged is None:
        return None
    return not battery.power_plugged
