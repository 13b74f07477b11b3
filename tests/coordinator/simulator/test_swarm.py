"""The simulated swarm's accounting stays correct while machines join, crash and return."""

from __future__ import annotations

import random

import pytest

from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.simulator.churn_models import churn_model
from swarm_coordinator.simulator.fleet import FleetFile, HardwareClass, make_fleet
from swarm_coordinator.simulator.fluid_plane import FluidPlane
from swarm_coordinator.simulator.swarm import Swarm
from swarm_coordinator.simulator.trace import TraceEvent
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.run.manifest import Manifest

SLOW_LINES = FleetFile(
    classes=(
        HardwareClass(
            name="far away", machines=12, teraflops=1e-4, spread=0.3, memory_gib=8, up_mbit=1,
            down_mbit=100, latency_ms=10,
        ),
    )
)  # fmt: skip
"""A stage's state takes these machines minutes: they download for most of their life."""
HOURS = 0.3


def simulated(
    manifest: Manifest, changes: list[TraceEvent], seed: int, until: RunPhase | None = None
) -> Swarm:
    rng = random.Random(f"{seed} fleet")
    fleet = make_fleet(SLOW_LINES, 12, rng)
    swarm = Swarm(manifest, fleet, changes, SwarmOptions(heartbeat_seconds=2.0), seed, FluidPlane)
    swarm.event_heap.run_until(3600 * HOURS, lambda: swarm.run.phase is until)
    return swarm


@pytest.mark.parametrize("seed", range(3))
def test_an_uplink_serves_only_downloads_that_are_still_awaited(
    manifest: Manifest, seed: int
) -> None:
    names = [f"machine-{number}" for number in range(12)]
    model = churn_model("home:on_hours=0.05,crash=0.7")
    swarm = simulated(manifest, model.changes(names, HOURS, random.Random(seed)), seed)
    assert swarm.downloads.bytes > 0
    waited_for = {id(one) for v in swarm.volunteers.values() if v.alive for one in v.loading}
    assert swarm.downloads.under_way() <= waited_for
    served = sum(v.uploads for v in swarm.volunteers.values())
    assert served <= 32 * len(swarm.downloads.under_way())


def test_a_machine_that_returns_before_its_loss_is_detected_receives_only_its_own_messages(
    manifest: Manifest,
) -> None:
    """It says that it leaves, vanishes, and connects anew while the coordinator still waits."""
    changes = [TraceEvent(float(number), "join", f"machine-{number}") for number in range(6)]
    for again in range(1, 36):
        at = 30.0 * again
        name = f"machine-{again % 6}"
        changes += [TraceEvent(at, "leave", name), TraceEvent(at + 0.5, "join", name)]
    swarm = simulated(manifest, changes, seed=1)
    assert len(swarm.applied) > 0


def test_an_average_does_not_end_without_a_member_that_is_lost_meanwhile(
    manifest: Manifest,
) -> None:
    changes = [TraceEvent(float(number), "join", f"machine-{number}") for number in range(12)]
    steady = simulated(manifest, changes, seed=1, until=RunPhase.APPLYING)
    changes.append(TraceEvent(steady.event_heap.now - 3, "crash", "machine-3"))
    swarm = simulated(manifest, changes, seed=1)
    assert (steady.counts["abort"], swarm.counts["abort"]) == (0, 1)
    assert len(swarm.applied) > 0


@pytest.mark.parametrize("churn", ["steady", "home:on_hours=0.1,crash=0.7"])
def test_machines_with_slow_lines_and_crashes_are_not_refused(
    manifest: Manifest, churn: str
) -> None:
    names = [f"machine-{number}" for number in range(12)]
    swarm = simulated(manifest, churn_model(churn).changes(names, HOURS, random.Random(1)), 1)
    assert swarm.applied
    held_time = swarm.run.held_time
    now = swarm.event_heap.now
    assert max(held_time.seconds(key, now) for key in held_time.accounts) > 0.0
    assert all(account.refused_until < now for account in held_time.accounts.values())
