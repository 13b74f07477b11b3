"""What the machine does: processor, memory, disk, by all programs and by this one (psutil).

Read when somebody asks, never in the background: a daemon that nobody looks at measures nothing.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import psutil

from swarm_client.control.status_document import MachineView
from swarm_shared.base.clock import Clock, monotonic

DISK_SECONDS = 60.0
"""Between two looks at what the home takes: it may hold thousands of files."""


class Gauges:
    def __init__(self, home: Path, clock: Clock = monotonic) -> None:
        self._home = home
        self._clock = clock
        self._own = psutil.Process()
        self._own_seconds: dict[int, float] = {}
        self._read_at: float | None = None
        self._disk_used_bytes = 0
        self._disk_read_at: float | None = None

    def read(self) -> MachineView:
        """Shares are those since the last reading; None in the first one."""
        now = self._clock()
        family = self._family()
        seconds = {process.pid: _cpu_seconds(process) for process in family}
        since, self._read_at = self._read_at, now
        share = psutil.cpu_percent(interval=None) / 100
        own: float | None = None
        if since is not None and now > since:
            used = sum(s - self._own_seconds.get(pid, 0.0) for pid, s in seconds.items())
            own = max(0.0, min(1.0, used / (now - since) / (psutil.cpu_count() or 1)))
        self._own_seconds = seconds
        memory = psutil.virtual_memory()
        return MachineView(
            cpu_share=None if since is None else share,
            own_cpu_share=own,
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            own_memory_bytes=sum(_memory_bytes(process) for process in family),
            on_batteries=_on_batteries(),
            disk_free_bytes=_disk_free_bytes(self._home),
            disk_used_bytes=self._disk_used(now),
        )

    def _family(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.Error):
            return [self._own, *self._own.children(recursive=True)]
        return [self._own]

    def _disk_used(self, now: float) -> int:
        if self._disk_read_at is None or now - self._disk_read_at >= DISK_SECONDS:
            self._disk_read_at = now
            self._disk_used_bytes = folder_bytes(self._home)
        return self._disk_used_bytes


def folder_bytes(folder: Path) -> int:
    """Of all files below; what vanishes meanwhile counts nothing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += Path(parent, name).lstat().st_size
    return total


def _cpu_seconds(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)


def _memory_bytes(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0


def _on_batteries() -> bool | None:
    try:
        battery = psutil.sensors_battery()
    except (AttributeError, OSError, ValueError):  # not on every system
        return None
    return None if battery is None or battery.power_plugged is None else not battery.power_plugged


def _disk_free_bytes(folder: Path) -> int:
    try:
        return int(psutil.disk_usage(str(folder)).free)
    except OSError:
        return 0
