"""What the probes found on this machine at one moment. None: it cannot be read here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class GpuReading:
    index: int
    name: str = ""
    temperature_celsius: float | None = None
    utilization: float | None = None
    """0 to 1."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    power_watts: float | None = None
    power_limit_watts: float | None = None


@dataclass(frozen=True, slots=True)
class Readings:
    on_batteries: bool | None = None
    display_idle_seconds: float | None = None
    """Since the last key or mouse movement of somebody at this machine's display."""
    terminal_idle_seconds: float | None = None
    """Since the last key in any terminal, a remote one too."""
    cpu_share: float | None = None
    """Of all cores, by all programs, 0 to 1."""
    own_cpu_share: float | None = None
    memory_total_bytes: int | None = None
    memory_available_bytes: int | None = None
    own_memory_bytes: int | None = None
    disk_free_bytes: int | None = None
    """Where the home lies."""
    disk_used_bytes: int | None = None
    """By the home."""
    running_apps: frozenset[str] = frozenset()
    """Of the exclusive applications that were asked about, those that run."""
    gpus: tuple[GpuReading, ...] = ()
    transferred_bytes_by_day: Mapping[int, int] = field(default_factory=dict)
    """Sent and received, by the day's proleptic ordinal in local time."""

    @property
    def user_idle_seconds(self) -> float | None:
        known = [
            seconds
            for seconds in (self.display_idle_seconds, self.terminal_idle_seconds)
            if seconds is not None
        ]
        return min(known, default=None)

    @property
    def others_cpu_share(self) -> float | None:
        if self.cpu_share is None or self.own_cpu_share is None:
            return None
        return max(0.0, self.cpu_share - self.own_cpu_share)

    def gpu(self, index: int) -> GpuReading | None:
        return next((gpu for gpu in self.gpus if gpu.index == index), None)
