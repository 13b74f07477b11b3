"""All probes of this machine, read together into one value for the policy and the status."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Protocol

from swarm_client.governor.probes.amd_gpus import AmdSmiGpus
from swarm_client.governor.probes.apps import AppProbe
from swarm_client.governor.probes.gpus import NvmlGpus
from swarm_client.governor.probes.idle import IdleProbe, TerminalIdle, display_idle
from swarm_client.governor.probes.machine import (
    MEMORY_SECONDS,
    POWER_SECONDS,
    CachedReading,
    CpuProbe,
    DiskProbe,
    ProcessTree,
    on_batteries,
)
from swarm_client.governor.probes.readings import GpuReading, Readings
from swarm_client.machine.device_names import is_accelerator, is_cuda
from swarm_client.preferences import Preferences
from swarm_shared.base.clock import Clock, monotonic
from swarm_shared.host.memory import host_memory

CPU_SECONDS = 1.0
"""Shortest interval over which processor shares are measured."""
RELAXED_DISPLAY_SECONDS = 10.0
"""Seconds between two readings of the display's idle time where no device pauses for its user; on
some systems a reading starts a program."""


class GpuProbe(Protocol):
    """A driver's readings of its GPUs."""

    def read(self) -> tuple[GpuReading, ...]:
        """Return them in torch's order; none without such GPUs."""


class SystemProbes:
    """Processor, memory, disk and power: what the status shows without a run. Not thread-safe."""

    def __init__(self, home: Path, clock: Clock = monotonic) -> None:
        self.process_tree = ProcessTree(clock)
        self.disk = DiskProbe(home, clock)
        self._clock = clock
        self._cpu = CpuProbe(self.process_tree)
        self._own_memory = CachedReading(self.process_tree.memory_bytes, MEMORY_SECONDS, clock)
        self._on_batteries = CachedReading(on_batteries, POWER_SECONDS, clock)
        self._last = Readings()
        self._cpu_at = -1e9

    def read_system(self) -> Readings:
        """Processor shares are since the previous reading; None at the first."""
        memory = host_memory()
        self._last = replace(
            self._last,
            on_batteries=self._on_batteries(),
            memory_total_bytes=memory.total_bytes,
            memory_available_bytes=memory.available_bytes,
            own_memory_bytes=self._own_memory(),
            disk_free_bytes=self.disk.free_bytes(),
            disk_used_bytes=self.disk.used(),
        )
        now = self._clock()
        if now - self._cpu_at >= CPU_SECONDS:
            self._cpu_at = now
            share, own_share = self._cpu.shares()
            self._last = replace(self._last, cpu_share=share, own_cpu_share=own_share)
        return self._last


class MachineProbes(SystemProbes):
    """All probes of this machine. Not thread-safe."""

    def __init__(
        self,
        home: Path,
        display: IdleProbe | None = None,
        terminals: IdleProbe | None = None,
        clock: Clock = monotonic,
    ) -> None:
        super().__init__(home, clock)
        self._apps = AppProbe(clock)
        self._gpus: tuple[GpuProbe, ...] = NvmlGpus(), AmdSmiGpus()
        self._display = display or display_idle()
        self._terminals = terminals or TerminalIdle()
        self._display_at = -1e9

    def read(
        self,
        preferences: Preferences,
        devices: Sequence[str],
        transferred_bytes_by_day: Mapping[date, int],
    ) -> Readings:
        """Read everything; what changes slowly, or affects no decision, may be older."""
        self.read_system()
        on_gpu = any(map(is_accelerator, devices))
        apps = preferences.exclusive_apps
        self._last = replace(
            self._last,
            terminal_idle_seconds=self._terminals.idle_seconds(),
            running_apps=self._apps.running(
                (*apps, *preferences.exclusive_gpu_apps) if on_gpu else apps
            ),
            gpus=self._read_gpus(devices),
            transferred_bytes_by_day=transferred_bytes_by_day,
        )
        self._read_display(preferences, devices, self._clock())
        return self._last

    def _read_gpus(self, devices: Sequence[str]) -> tuple[GpuReading, ...]:
        """Read the GPUs of the first driver that has some. Drivers number only the GPUs that torch
        calls cuda."""
        if any(is_accelerator(device) and not is_cuda(device) for device in devices):
            return ()
        return next(filter(None, (probe.read() for probe in self._gpus)), ())

    def _read_display(self, preferences: Preferences, devices: Sequence[str], now: float) -> None:
        is_urgent = not all(
            preferences.run_gpu_if_user_active
            if is_accelerator(device)
            else preferences.run_if_user_active
            for device in devices
        )
        if not is_urgent and now - self._display_at < RELAXED_DISPLAY_SECONDS:
            # The policy remembers when a user was last seen.
            self._last = replace(self._last, display_idle_seconds=None)
            return
        self._display_at = now
        self._last = replace(self._last, display_idle_seconds=self._display.idle_seconds())
