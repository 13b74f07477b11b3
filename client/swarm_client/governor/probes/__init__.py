"""What can be read of this machine, each by a probe of its own.

A probe is cheap, never raises for what the machine lacks (None: unknown), and knows nothing of
preferences. They are called from one thread at a time, not on the event loop.
"""

from __future__ import annotations

from typing import Protocol

from swarm_client.governor.probes.readings import GpuReading


class IdleProbe(Protocol):
    """How long somebody at this machine has touched nothing."""

    def idle_seconds(self) -> float | None: ...


class GpuProbe(Protocol):
    def read(self) -> tuple[GpuReading, ...]: ...
