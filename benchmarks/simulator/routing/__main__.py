"""Rate over the placement's, by rule of choosing peers, size of the fleet and length of a step.

    make bench-routing

Simulates the same machines with each rule at the simulator's fine level, with the production
coordinator, delivery and hedges. A step has as many microbatches as `per peer` times the machines,
over the stages. The rates are those of whole steps, so the beginning, the end and the close of a
step are in them. `at most` is a bound for any rule, without close and links: the slowest stage's
work at the rate of all its peers, after a microbatch has come through the fastest peers before it,
and before its gradient has gone back through them. `fluid level` is the plan's rate as the coarse
level predicts it. Writes benchmarks/results/routing.json.
"""

from __future__ import annotations

import datetime
import random
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import click

from benchmarks.machine import describe_machine
from benchmarks.outcome import RESULTS, write_result
from benchmarks.pages.markdown import headed_table
from benchmarks.simulator.routing.rules import RULES
from benchmarks.simulator.scenarios import manifest_of
from swarm_coordinator.core.state.moves import RebalancingRule, RebalancingSettings
from swarm_coordinator.simulator.fleet import FleetFile, Hardware, HardwareClass, make_fleet
from swarm_coordinator.simulator.fluid_plane import FluidPlane
from swarm_coordinator.simulator.microbatch_plane import MicrobatchPlane
from swarm_coordinator.simulator.pipeline_peer import PART_OF_WORK
from swarm_coordinator.simulator.swarm import Swarm, collect_rarely
from swarm_coordinator.simulator.trace import TraceEvent
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.scheduling.placement import MovePolicy

STAGES = 4
GIGAFLOPS = 0.3
"""Median rate of a machine: a microbatch takes 4 to 5 s, as on a graphics card with a model that it
just holds, and the transfers and the close of a step are short against that."""
SPREAD = 0.6
"""Standard deviation of the logarithm of speeds."""
JOIN_SECONDS = 20.0
WARM_UP_SECONDS = 150.0
"""Seconds before the first measured step: all have joined, reported rates, and been moved."""
STEPS = 4
"""Measured steps."""
END_SECONDS = 1e6
CASES = (
    (4, 4), (4, 16), (8, 4), (8, 16), (16, 1), (16, 4), (16, 16), (48, 1), (48, 4), (48, 16),
    (96, 1), (96, 4), (96, 16), (300, 1), (1000, 1), (300, 4),
)  # fmt: skip
"""Machines, and microbatches a peer and step."""
MANY_MACHINES = 20
"""Machines from which one seed is simulated."""


def fleet_of(machines: int, seed: int) -> list[Hardware]:
    one = HardwareClass(
        name="unlike", machines=machines, teraflops=GIGAFLOPS / 1000, spread=SPREAD, memory_gib=16,
        up_mbit=100, down_mbit=100, latency_ms=10,
    )  # fmt: skip
    return make_fleet(FleetFile(classes=(one,)), machines, random.Random(f"{seed} fleet"))


def simulated(
    rule: str, machines: int, per_peer: int, seed: int,
    level: type[FluidPlane] | type[MicrobatchPlane] = MicrobatchPlane,
) -> dict[str, Any]:  # fmt: skip
    microbatches = max(1, machines * per_peer // STAGES)
    rng = random.Random(f"{seed} join")
    joins = sorted(rng.uniform(0, JOIN_SECONDS) for _ in range(machines))
    changes = [TraceEvent(at, "join", f"machine-{n}") for n, at in enumerate(joins)]
    options = SwarmOptions(
        moves=RebalancingSettings(RebalancingRule.THROUGHPUT, MovePolicy(period_seconds=60.0)),
        heartbeat_seconds=15.0,
        routing=RULES[rule],
    )
    manifest = manifest_of("tiny", STAGES, microbatches)
    with collect_rarely():
        swarm = Swarm(manifest, fleet_of(machines, seed), changes, options, seed, level)
        swarm.event_heap.run_until(WARM_UP_SECONDS)
        began_at, possible = _end_of_step(swarm, 1)
        ended_at, possible_at_end = _end_of_step(swarm, STEPS)
    seconds = (ended_at - began_at) / STEPS
    rate = (possible_at_end - possible) / (ended_at - began_at)
    return {
        "seed": seed, "step_seconds": seconds, "share": microbatches / seconds / rate,
        "at_most": microbatches / rate / _shortest_seconds(swarm, microbatches),
        "duplicated": swarm.run.statistics.work.duplicated,
    }  # fmt: skip


def _end_of_step(swarm: Swarm, steps: int) -> tuple[float, float]:
    """Simulate some steps; return the time, and the microbatches possible until then."""
    wanted = len(swarm.applied) + steps
    swarm.event_heap.run_until(END_SECONDS, lambda: len(swarm.applied) >= wanted)
    swarm.meter.account()
    return swarm.event_heap.now, swarm.meter.made


def _shortest_seconds(swarm: Swarm, microbatches: int) -> float:
    """Return a bound of the seconds of a step, from the peers' speeds alone."""
    fastest, longest = 0.0, 0.0
    for stage, cut in enumerate(swarm.manifest.stages):
        serving = [v for v in swarm.volunteers.values() if v.stage == stage]
        rates = [v.hardware.flops_per_second / cut.work_flops for v in serving]
        longest = max(longest, fastest + microbatches / sum(rates))
        fastest += 2 * PART_OF_WORK / max(rates)  # forward, and later the input's gradient
    return longest


def routing_markdown(results: Mapping[str, Any]) -> str:
    rows: list[list[str]] = []
    errors: list[float] = []
    for case in results["cases"]:
        shares = {name: _mean(found, "share") for name, found in case["rules"].items()}
        best = _mean(case["rules"]["plan"], "at_most")
        fluid = _mean(case["fluid"], "share")
        errors.append(fluid / shares["plan"] - 1)
        figures = [f"{share:.2f}" for share in (*shares.values(), best, fluid)]
        rows.append([f"{case['machines']:,}", str(case["per_peer"]), *figures])
    head = ["machines", "microbatches a peer", *RULES, "at most", "fluid level"]
    described = (
        f"{results['date']}: rate of whole steps over the placement's rate; {STAGES} stages, "
        f"seeds: {results['seeds']} (above {MANY_MACHINES} machines: 1). The error of the fluid "
        f"level is {min(errors):+.0%} to {max(errors):+.0%}, of the absolute values the mean is "
        f"{statistics.fmean(map(abs, errors)):.0%}."
    )
    return headed_table(described, head, "r" * len(head), rows)


def _mean(found: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.fmean(one[name] for one in found)


@click.command()
@click.option("--seeds", default=3, show_default=True)
def main(seeds: int) -> None:
    """Simulate all cases with all rules."""
    cases: list[dict[str, Any]] = []
    document = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": describe_machine(()), "seeds": seeds, "cases": cases,
    }  # fmt: skip
    for machines, per_peer in CASES:
        numbers = range(1, 2 if machines > MANY_MACHINES else seeds + 1)
        rules = {
            rule: [simulated(rule, machines, per_peer, seed) for seed in numbers] for rule in RULES
        }
        shares = ", ".join(f"{rule} {_mean(found, 'share'):.3f}" for rule, found in rules.items())
        click.echo(f"{machines} machines, {per_peer} a peer: {shares}")
        fluid = [simulated("plan", machines, per_peer, seed, FluidPlane) for seed in numbers]
        cases.append({"machines": machines, "per_peer": per_peer, "rules": rules, "fluid": fluid})
        write_result(RESULTS / "routing.json", document)


if __name__ == "__main__":
    main()
