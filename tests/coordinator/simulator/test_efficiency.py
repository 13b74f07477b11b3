"""The best placement of a fleet's machines."""

from __future__ import annotations

import random

import pytest

from kits.memory import WORK
from swarm_coordinator.simulator.efficiency import best_rate
from swarm_coordinator.simulator.fleet import (
    GIBIBYTE,
    FleetFile,
    Hardware,
    HardwareClass,
    make_fleet,
)
from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.run.manifest import StageRange
from swarm_shared.scheduling.placement.stage_sizes import StageSizes

SIZES = StageSizes(1, 0, 0, 0, 0, WORK)


def machine(flops_per_second: float, device_bytes: int) -> Hardware:
    offer = MemoryOffer(device_bytes=device_bytes)
    return Hardware("one", flops_per_second, offer, 1e6, 1e6, 0.0)


def stage(work_flops: float, device_bytes: int) -> StageRange:
    memory = StageMemory(device_bytes=device_bytes, comfortable_bytes=device_bytes)
    return StageRange(first_layer=0, end_layer=1, work_flops=work_flops, memory=memory)


@pytest.mark.parametrize("stages", [(stage(2, 10), stage(2, 50)), (stage(2, 50), stage(2, 10))])
def test_a_fast_machine_takes_the_stage_that_the_others_cannot_hold(
    stages: tuple[StageRange, ...],
) -> None:
    machines = [machine(8, 60), machine(2, 20), machine(4, 20)]
    assert best_rate(machines, stages, [SIZES, SIZES]) == pytest.approx(3.0)


def test_without_a_machine_for_each_stage_nothing_is_trained() -> None:
    assert best_rate([machine(8, 60)], [stage(2, 10), stage(2, 10)], [SIZES, SIZES]) == 0


def test_a_card_behind_a_slow_link_computes_streamed_weights_more_slowly() -> None:
    tight = StageMemory(
        device_bytes=3 * GIBIBYTE, comfortable_bytes=4 * GIBIBYTE, streamable_bytes=2 * GIBIBYTE
    )
    held = StageRange(first_layer=0, end_layer=1, work_flops=1e12, memory=tight)

    def seconds(**link: float) -> float:
        one = HardwareClass(
            name="card", teraflops=15, memory_gib=1, host_memory_gib=32, up_mbit=1, down_mbit=1,
            latency_ms=1, **link,
        )  # fmt: skip
        (card,) = make_fleet(FleetFile(classes=(one,)), 1, random.Random(1))
        assert card.memory.balance is not None
        assert card.memory.balance.float32 == 15e12 / (link.get("copied_gb_s", 12.0) * 1e9)
        return card.computing_seconds(held, SIZES)

    assert seconds() == seconds(copied_gb_s=12.0) < seconds(copied_gb_s=3.0)
