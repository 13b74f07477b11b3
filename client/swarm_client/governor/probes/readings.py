"""The readings of this machine at one moment. None: not available here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import date


@dataclass(frozen=True, slots=True)
class GpuReading:
    """What was read of one GPU; None for what it does not report."""

    index: int
    temperature_celsius: float | None = None
    utilization: float | None = None
    """0 to 1."""
    memory_used_bytes: int | None = None
    power_limit_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    """What the probes have read of this machine; None for what cannot be read."""

    on_batteries: bool | None = None
    display_idle_seconds: float | None = None
    """Seconds since the last key or mouse movement at this machine's display."""
    terminal_idle_seconds: float | None = None
    """Seconds since the last key in any terminal, remote ones included."""
    cpu_share: float | None = None
    """Share of all cores, by all programs, 0 to 1."""
    own_cpu_share: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    own_memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    """Free bytes on the home's disk."""
    disk_used_bytes: int | None = None
    """Used by the home."""
    running_apps: frozenset[str] = frozenset()
    """The exclusive applications that are running."""
    gpus: tuple[GpuReading, ...] = ()
    transferred_bytes_by_day: Mapping[date, int] = field(default_factory=dict)
    """Bytes sent and received, by the day in local time."""

    @property
    def user_idle_seconds(self) -> float | None:
        """Seconds since the last input at the display or in a terminal; None if neither can be
        read."""
        readable = [
            seconds
            for seconds in (self.display_idle_seconds, self.terminal_idle_seconds)
            if seconds is not None
        ]
        return min(readable, default=None)

    @property
    def others_cpu_share(self) -> float | None:
        """Share of all cores that other programs use, 0 to 1; None if it cannot be read."""
        if self.cpu_share is None or self.own_cpu_share is None:
            return None
        return max(0.0, self.cpu_share - self.own_cpu_share)

    def gpu(self, index: int) -> GpuReading | None:
        return next((gpu for gpu in self.gpus if gpu.index == index), None)
