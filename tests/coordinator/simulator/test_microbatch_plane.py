"""The fine level: senders hedge as the client does, and each microbatch counts once."""

from __future__ import annotations

import random
from collections import Counter

from benchmarks.simulator.routing.rules import RULES
from swarm_coordinator.simulator.churn_models import churn_model
from swarm_coordinator.simulator.fleet import FleetFile, HardwareClass, make_fleet
from swarm_coordinator.simulator.microbatch_plane import MicrobatchPlane
from swarm_coordinator.simulator.swarm import Swarm
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.run.manifest import Manifest
from swarm_shared.volunteer_rules.delivery import MAX_HEDGES

UNEQUAL = FleetFile(
    classes=(
        HardwareClass(
            name="fast", machines=10, teraflops=1e-3, spread=0.3, memory_gib=8, up_mbit=100,
            down_mbit=100, latency_ms=10,
        ),
        HardwareClass(
            name="very slow", machines=2, teraflops=1e-5, spread=0.3, memory_gib=8, up_mbit=100,
            down_mbit=100, latency_ms=10,
        ),
    )
)  # fmt: skip
HOURS = 0.03


def simulated(
    manifest: Manifest, churn: str, min_steps: int, rule: str = "plan"
) -> MicrobatchPlane:
    """Simulate, and check every step: each microbatch counts once in each stage."""
    names = [f"machine-{number}" for number in range(12)]
    changes = churn_model(churn).changes(names, HOURS, random.Random(1))
    fleet = make_fleet(UNEQUAL, 12, random.Random(2))
    options = SwarmOptions(heartbeat_seconds=2.0, routing=RULES[rule])
    swarm = Swarm(manifest, fleet, changes, options, 1, MicrobatchPlane)
    swarm.simulate(HOURS)
    assert len(swarm.applied) >= min_steps
    for step in swarm.applied:
        counted = Counter[int]()
        for share in step.shares:
            counted[share.stage] += share.microbatches
        per_step = manifest.training.microbatches_per_step
        assert counted == dict.fromkeys(range(manifest.stage_count), per_step)
    assert isinstance(swarm.plane, MicrobatchPlane)
    return swarm.plane


def test_what_a_slow_peer_holds_is_hedged_and_cancelled_there(manifest: Manifest) -> None:
    # By the rates of the roster the slow peers get nothing; in turns they do.
    plane = simulated(manifest, "steady", min_steps=10, rule="turns")
    nodes = plane._nodes.values()
    assert sum(sent.hedged for node in nodes for sent in node.downstreams.values()) > 0
    # What is over makes room again: no more than one step's microbatches are in flight.
    one_step = manifest.training.microbatches_per_step * manifest.stage_count
    assert 0 <= sum(node.in_flight for node in nodes) <= (1 + MAX_HEDGES) * one_step


def test_while_peers_come_and_are_lost_each_microbatch_counts_once(manifest: Manifest) -> None:
    simulated(manifest, "home:on_hours=0.02,crash=0.7", min_steps=5)
