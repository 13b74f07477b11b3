"""Cost of the simulator and of one placement decision by size of the fleet.

    make bench-simulator ARGS="--hours 1"

Writes benchmarks/results/simulator.json and docs/simulator-growth.png. Times are CPU seconds of one
process, so that other load on the machine matters little; wall-clock seconds are included.
"""

from __future__ import annotations

import datetime
import gc
import math
import os
import random
import statistics
import time
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import describe_machine
from benchmarks.outcome import RESULTS, write_result
from benchmarks.pages.pictures import pyplot
from benchmarks.simulator.scenarios import manifest_of
from swarm_coordinator.core.rules.rebalancing import rebalancing_of
from swarm_coordinator.core.state.moves import RebalancingRule, RebalancingSettings
from swarm_coordinator.simulator.churn_models import churn_model
from swarm_coordinator.simulator.fleet import FleetFile, HardwareClass, make_fleet
from swarm_coordinator.simulator.fluid_plane import FluidPlane
from swarm_coordinator.simulator.report import outcome_document
from swarm_coordinator.simulator.swarm import Swarm, collect_rarely
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.run.manifest import LimitsConfig, Manifest
from swarm_shared.scheduling.placement import MovePolicy, PeerLoad, StageLoad, choose_moves

RESULT = RESULTS / "simulator.json"
PICTURE = Path(__file__).parents[2] / "docs" / "simulator-growth.png"

STAGES = 64
CHURN = "home:crash=0.02"
FLEET = FleetFile(
    classes=(
        HardwareClass(
            name="desktop, fibre", machines=70, teraflops=18, spread=0.4, memory_gib=24,
            up_mbit=300, down_mbit=600, latency_ms=5,
        ),
        HardwareClass(
            name="workstation, fibre", machines=30, teraflops=40, spread=0.3, memory_gib=24,
            up_mbit=500, down_mbit=1000, latency_ms=5,
        ),
    )
)  # fmt: skip
"""A fleet with fast links: over slow ones the all-reduce of a stage takes minutes, and few steps
close before one of its peers dies."""


def manifest_for(machines: int) -> Manifest:
    """Return a run of a 3-billion-parameter model whose global batch grows with the fleet."""
    limits = LimitsConfig(stage_queue=32, lease_seconds=1800)
    return manifest_of(
        "1b", STAGES, max(64, machines // 10), layers=STAGES, sequences=8, limits=limits
    )


def simulated(machines: int, hours: float) -> dict[str, Any]:
    manifest = manifest_for(machines)
    fleet = make_fleet(FLEET, machines, random.Random(1))
    names = [f"machine-{number}" for number in range(machines)]
    changes = churn_model(CHURN).changes(names, hours, random.Random(2))
    options = SwarmOptions(moves=RebalancingSettings(RebalancingRule.THROUGHPUT, MovePolicy()))
    gc.collect()
    began, began_cpu = time.perf_counter(), time.process_time()
    with collect_rarely():
        swarm = Swarm(manifest, fleet, changes, options, 1, FluidPlane)
        swarm.simulate(hours)
    cpu_seconds = time.process_time() - began_cpu
    document = outcome_document(swarm, {}, time.perf_counter() - began)
    kept = (
        "simulated_hours", "wall_seconds", "events", "steps", "attempts_aborted", "moves",
        "microbatches_per_second", "share_of_best", "joins", "leaves", "crashes",
    )  # fmt: skip
    return {
        "machines": machines,
        "cpu_seconds": cpu_seconds,
        **{name: document[name] for name in kept},
    }


def decision_seconds(machines: int, repetitions: int = 5) -> dict[str, Any]:
    """Measure one decision over fleets that are unbalanced as after a wave of losses."""
    stages = rebalancing_of(manifest_for(machines), RebalancingSettings()).stages
    taken: list[float] = []
    moves = 0
    for repetition in range(repetitions):
        peers = _unbalanced(machines, stages, random.Random(f"{machines} {repetition}"))
        gc.collect()
        began = time.process_time()
        decision = choose_moves(stages, peers, MovePolicy(margin=0.0, rate_noise=0.0))
        taken.append(time.process_time() - began)
        moves += len(decision.moves)
    return {
        "machines": machines,
        "seconds_median": statistics.median(taken),
        "seconds_worst": max(taken),
        "moves_mean": moves / repetitions,
    }


def _unbalanced(machines: int, stages: tuple[StageLoad, ...], rng: random.Random) -> list[PeerLoad]:
    thinned = {stage: rng.uniform(0.7, 1.0) for stage in range(len(stages))}
    peers: list[PeerLoad] = []
    while len(peers) < machines:
        stage = rng.randrange(len(stages))
        if rng.random() < thinned[stage]:
            peers.append(
                PeerLoad(
                    peer=PeerId(f"peer-{len(peers)}"), stage=StageIndex(stage),
                    flops_per_second=1.8e13 * math.exp(rng.gauss(0, 0.4)),
                    memory=MemoryOffer(device_bytes=24 * 2**30),
                    download_bytes_per_second=rng.uniform(1e7, 1e8),
                )
            )  # fmt: skip
    return peers


def draw(document: dict[str, Any], path: Path) -> None:
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for axis, rows, key, title in (
        (axes[0], document["decisions"], "seconds_median", "one placement decision, 64 stages"),
        (axes[1], document["growth"], "cpu_seconds",
         f"{document['growth'][0]['simulated_hours'] * 60:.0f} simulated minutes, 64 stages"),
    ):  # fmt: skip
        sizes = [row["machines"] for row in rows]
        axis.loglog(sizes, [row[key] for row in rows], "o-", label="measured")
        last = rows[-1]
        scale = last[key] / (last["machines"] * math.log(last["machines"]))
        axis.loglog(sizes, [scale * n * math.log(n) for n in sizes], "--", label="n log n")
        axis.set(title=title, xlabel="machines", ylabel="CPU seconds")
        axis.grid(True, which="both", alpha=0.3)
        axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=110, metadata={"Software": None})


def growth_over_nlogn(rows: list[dict[str, Any]], key: str) -> float:
    """Return the growth of the cost from the second largest fleet to the largest, over n log n."""
    few, many = rows[-2], rows[-1]
    n, m = few["machines"], many["machines"]
    return float(many[key] / few[key] / (m * math.log(m) / (n * math.log(n))))


@click.command()
@click.option("--hours", default=1.0, help="Simulated hours of the run with 10,000 machines.")
@click.option("--largest", default=100_000, help="Machines of the largest fleet.")
def main(hours: float, largest: int) -> None:
    sizes = [size for size in (1_000, 3_000, 10_000, 30_000, 100_000) if size <= largest]
    decisions = [decision_seconds(size) for size in sizes]
    for row in decisions:
        click.echo(f"decision, {row['machines']:>7,} machines: {row['seconds_median']:.3f} s")
    hour = simulated(10_000, hours)
    click.echo(
        f"10,000 machines, {STAGES} stages, {hours:g} h: {hour['cpu_seconds']:.0f} CPU "
        f"seconds, {hour['wall_seconds']:.0f} s wall-clock time, {hour['steps']} steps"
    )
    growth = []
    for size in sizes:
        growth.append(simulated(size, 1 / 6))
        click.echo(f"10 minutes, {size:>7,} machines: {growth[-1]['cpu_seconds']:.1f} s")
    document = {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(["pydantic"]),
        "load_average": os.getloadavg(),
        "stages": STAGES,
        "churn": CHURN,
        "hour": hour,
        "decisions": decisions,
        "growth": growth,
        "decision_growth_over_nlogn": growth_over_nlogn(decisions, "seconds_median"),
        "simulation_growth_over_nlogn": growth_over_nlogn(growth, "cpu_seconds"),
    }
    write_result(RESULT, document)
    draw(document, PICTURE)
    click.echo(f"written to {RESULT} and {PICTURE}")


if __name__ == "__main__":
    main()
