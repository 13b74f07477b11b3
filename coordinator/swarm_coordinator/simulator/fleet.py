"""The machines of a fleet: speed, memory and link.

A fleet is a list of machines, read from a file of classes or built from the classes below. Their
figures are assumptions, not measurements: a mix of home machines that an organiser may hope for.
Links are asymmetric; a class's link is the provider's nominal rate, and the actual rates vary about
it.
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, ValidationError

from swarm_shared.base.errors import DataError, UsageError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import first_error
from swarm_shared.base.memory import MachineBalance, MemoryOffer
from swarm_shared.run.manifest import StageRange
from swarm_shared.scheduling.placement.stage_sizes import StageSizes

MEGABIT_BYTES = 125_000
GIBIBYTE = 2**30
LARGEST_FLEET = 1_000_000
HOME_FLEET = "home"
"""Name of the built-in fleet, `HOME` in its whole size."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """One machine."""

    kind: str
    flops_per_second: float
    """The rate that training achieves, not the nominal one."""
    memory: MemoryOffer
    up_bytes_per_second: float
    down_bytes_per_second: float
    latency_seconds: float
    """One-way latency to the middle of the network; between two machines it is the sum of both."""
    lies: float = 0.0
    """Share of its microbatches in which it lies, 0 to 1."""
    arithmetic: int = 0
    """Machines with different numbers round differently."""

    def rate_at(self, stage: StageRange, sizes: StageSizes, uplink: float = 1.0) -> float:
        """Return its microbatches per second at a stage, with this fraction of its uplink: the
        slowest of computing, sending and receiving."""
        seconds = max(
            self.computing_seconds(stage, sizes),
            sizes.sent_bytes / (uplink * self.up_bytes_per_second),
            sizes.received_bytes / self.down_bytes_per_second,
        )
        return 1.0 / seconds

    def computing_seconds(self, stage: StageRange, sizes: StageSizes) -> float:
        """Return the seconds of the device for a microbatch; more where the stage's memory is
        short."""
        speed = self.memory.speed(stage.memory, sizes.streamed)
        return (stage.work_flops or 1.0) / (self.flops_per_second * speed)


_Figure = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]
"""Beyond any machine on both sides; no sum or quotient of such figures overflows."""


class HardwareClass(FrozenModel):
    """Machines of one kind. The speed and link of each are drawn about the class's medians."""

    name: str = Field(min_length=1, max_length=60)
    machines: int = Field(default=1, ge=1, le=LARGEST_FLEET)
    """Number of machines; for a fleet of another size, a proportion."""
    teraflops: _Figure
    spread: float = Field(default=0.0, ge=0, le=2)
    """Standard deviation of the logarithm of speed and link: 0.2 is about ±20 %."""
    memory_gib: _Figure
    """Of the device that computes."""
    host_memory_gib: _Figure | None = None
    """None: the device computes in the host's memory."""
    copied_gb_s: _Figure = 12.0
    """GB/s between the two memories, in each direction."""
    up_mbit: _Figure
    down_mbit: _Figure
    latency_ms: float = Field(ge=0, le=1e6, allow_inf_nan=False)
    lies: float = Field(default=0.0, ge=0, le=1)
    arithmetic: int = Field(default=0, ge=0, le=15)


class FleetFile(FrozenModel):
    format: Literal["swarmtrain-fleet-1"] = "swarmtrain-fleet-1"
    classes: tuple[HardwareClass, ...] = Field(min_length=1, max_length=1000)


HOME = FleetFile(
    classes=(
        HardwareClass(
            name="gaming desktop, cable", machines=35, teraflops=15, spread=0.4, memory_gib=12,
            host_memory_gib=32, up_mbit=40, down_mbit=400, latency_ms=12,
        ),
        HardwareClass(
            name="gaming desktop, fibre", machines=20, teraflops=18, spread=0.4, memory_gib=12,
            host_memory_gib=32, up_mbit=300, down_mbit=600, latency_ms=5,
        ),
        HardwareClass(
            name="workstation, fibre", machines=10, teraflops=40, spread=0.3, memory_gib=24,
            host_memory_gib=64, up_mbit=500, down_mbit=1000, latency_ms=5,
        ),
        HardwareClass(
            name="laptop, DSL", machines=20, teraflops=5, spread=0.3, memory_gib=8,
            host_memory_gib=16, up_mbit=20, down_mbit=80, latency_ms=18,
        ),
        HardwareClass(
            name="older desktop, cable", machines=15, teraflops=7, spread=0.3, memory_gib=8,
            host_memory_gib=16, up_mbit=30, down_mbit=250, latency_ms=14,
        ),
    )
)  # fmt: skip


def fleet_from(text: str, rng: random.Random) -> list[Hardware]:
    """Parse `--fleet`: the built-in home machines, a number of them, or a file of classes."""
    if text.isdecimal():
        count = int(text)
        if not 1 <= count <= LARGEST_FLEET:
            raise UsageError(f"a fleet has 1 to {LARGEST_FLEET:,} machines, not {count:,}")
        return make_fleet(HOME, count, rng)
    fleet_file = HOME if text == HOME_FLEET else read_fleet(Path(text))
    return make_fleet(fleet_file, sum(c.machines for c in fleet_file.classes), rng)


def read_fleet(path: Path) -> FleetFile:
    try:
        return FleetFile.model_validate(json.loads(path.read_bytes()))
    except OSError as error:
        raise DataError(
            f"the fleet {path} cannot be read ({error.strerror}); name a file of machine classes, "
            f"{HOME_FLEET}, or a number of home machines"
        ) from error
    except ValueError as error:
        reason = first_error(error) if isinstance(error, ValidationError) else error
        raise DataError(
            f"{path} is not a fleet ({reason}); docs/simulator.md shows what one looks like"
        ) from error


def make_fleet(fleet_file: FleetFile, count: int, rng: random.Random) -> list[Hardware]:
    """Return `count` machines in the proportion of the classes, in an order drawn by `rng`."""
    total = sum(one.machines for one in fleet_file.classes)
    machines: list[Hardware] = []
    wanted = 0.0
    for one in fleet_file.classes:
        wanted += count * one.machines / total
        while len(machines) < round(wanted):
            machines.append(_machine(one, rng))
    rng.shuffle(machines)
    return machines


def _machine(one: HardwareClass, rng: random.Random) -> Hardware:
    def about(median: float) -> float:
        return median * math.exp(rng.gauss(0.0, one.spread)) if one.spread else median

    flops_per_second = about(one.teraflops) * 1e12
    balance = flops_per_second / (one.copied_gb_s * 1e9)
    return Hardware(
        kind=one.name,
        flops_per_second=flops_per_second,
        memory=MemoryOffer(
            device_bytes=int(one.memory_gib * GIBIBYTE),
            host_bytes=None if one.host_memory_gib is None else int(one.host_memory_gib * GIBIBYTE),
            balance=MachineBalance(float32=balance, bfloat16=balance),
        ),
        up_bytes_per_second=about(one.up_mbit) * MEGABIT_BYTES,
        down_bytes_per_second=about(one.down_mbit) * MEGABIT_BYTES,
        latency_seconds=one.latency_ms / 1000,
        lies=one.lies,
        arithmetic=one.arithmetic,
    )
