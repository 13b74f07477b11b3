"""Throughput over that of the best placement, and moves, by rebalancing rule.

    make bench-rebalancing ARGS="FOLDER_OF_TRACES"

Simulates the same machines with the same churn without rebalancing, with SWARM's rule of queue
lengths and with this project's, every 60 and every 300 seconds. Recordings are not part of the
project: their folder is an argument, and without it only generated churn is simulated. Every seed
takes another window of a recording, so that ten of them cover it. Writes
benchmarks/results/rebalancing.json.
"""

from __future__ import annotations

import datetime
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import describe_machine
from benchmarks.outcome import out_option
from benchmarks.pages.markdown import headed_table
from benchmarks.simulator.scenarios import manifest_of
from benchmarks.simulator.swarm_rule import choose_swarm_moves
from benchmarks.simulator.trace_formats import convert
from swarm_coordinator.core.state.moves import RebalancingRule, RebalancingSettings
from swarm_coordinator.simulator.churn_models import churn_model
from swarm_coordinator.simulator.fleet import (
    GIBIBYTE,
    HOME,
    FleetFile,
    Hardware,
    HardwareClass,
    make_fleet,
)
from swarm_coordinator.simulator.fluid_plane import FluidPlane
from swarm_coordinator.simulator.report import outcome_document
from swarm_coordinator.simulator.swarm import Swarm, collect_rarely
from swarm_coordinator.simulator.trace import TraceEvent
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement import MovePolicy

RULES: tuple[tuple[str, float], ...] = (
    ("none", 60.0), ("swarm", 60.0), ("throughput", 60.0), ("swarm", 300.0), ("throughput", 300.0),
)  # fmt: skip
"""Rules and the seconds between two decisions. Without `swarm`, they are those of the
coordinator."""
RENTED = Hardware(
    kind="rented", flops_per_second=2.5e12, memory=MemoryOffer(device_bytes=32 * GIBIBYTE),
    up_bytes_per_second=250e6, down_bytes_per_second=250e6, latency_seconds=0.002,
)  # fmt: skip
"""Rented machines, all alike as in a cloud zone: their best placement is known exactly."""
PROCESSORS = FleetFile(
    classes=(
        HardwareClass(
            name="a desktop's processor", machines=1, teraflops=0.3, spread=0.4, memory_gib=32,
            up_mbit=100, down_mbit=300, latency_ms=10,
        ),
    )
)  # fmt: skip
"""Desktop CPUs of different speeds, which take longer to compute than to send. Graphics cards at
home (`HOME`) take longer to send for a model as small as this one."""

FIRST_MINUTE = 60.0

MakeChanges = Callable[[int, float], list[TraceEvent]]


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    stages: int
    fleet: FleetFile | None
    """The fleet; None for rented machines, all alike."""
    changes: MakeChanges
    """Makes the joins and leaves of a seed over a number of hours."""


def manifest_for(scenario: Scenario) -> Manifest:
    """Return a run whose step takes about half a minute and whose stage transfer takes seconds,
    so that several moves fit into a period."""
    if scenario.fleet is HOME:
        return manifest_of("small", scenario.stages, 128, sequences=32)
    if scenario.fleet is not None:
        return manifest_of("125m", scenario.stages, 128, sequences=4)
    return manifest_of("125m", scenario.stages, 32, sequences=32)


# ---------------------------------------------------------------- churn


def window(changes: Sequence[TraceEvent], begin_seconds: float, hours: float) -> list[TraceEvent]:
    """Cut a window out of a trace and shift it to second 0.

    Machines present at its beginning join within the first minute.
    """
    end_seconds = begin_seconds + 3600 * hours
    present: list[str] = []
    found: list[TraceEvent] = []
    for change in changes:
        if change.seconds < begin_seconds:
            (present.append if change.kind == "join" else present.remove)(change.name)
        elif change.seconds < end_seconds:
            shifted = change.seconds - begin_seconds
            found.append(TraceEvent(max(FIRST_MINUTE, shifted), change.kind, change.name))
    early = [
        TraceEvent(FIRST_MINUTE * number / max(1, len(present)), "join", name)
        for number, name in enumerate(present)
    ]
    return early + found


def of_recording(
    form: str, path: Path, users: int | None = None, end_hours: float | None = None
) -> MakeChanges:
    def changes(seed: int, hours: float) -> list[TraceEvent]:
        whole = convert(form, path, seed, users=users)
        last = 3600 * end_hours if end_hours is not None else whole[-1].seconds
        begin = max(0.0, last - 3600 * hours) * (seed - 1) / 9
        return window(whole, begin, hours)

    return changes


def of_model(model: str, machines: int) -> MakeChanges:
    def changes(seed: int, hours: float) -> list[TraceEvent]:
        names = [f"machine-{number}" for number in range(machines)]
        return churn_model(model).changes(names, hours, random.Random(f"{seed} {model}"))

    return changes


def recordings(folder: Path) -> list[Scenario]:
    """Return the recordings that the folder has. UsageError if it has none."""
    bamboo, skypilot = folder / "bamboo-nsdi23", folder / "skypilot-spot-traces"
    us_east = skypilot / "availability/16-node/aws-08-27-2023/us-east-2b_v100_1.json"
    # The recording of 64 nodes ends with the experimenter's own shutdown.
    rented: tuple[tuple[str, str, Path, int, float | None], ...] = (
        ("p3", "events", bamboo / "p3-trace.csv", 4, None),
        ("g4dn", "events", bamboo / "g4dn-trace.csv", 4, None),
        ("a100x1-east1b", "counts", bamboo / "a100x1-east1b.txt", 4, None),
        ("v100x1-east1c", "counts", bamboo / "v100x1-east1c.txt", 4, None),
        ("skypilot us-east-2b", "gaps", us_east, 2, None),
        ("full-64-node", "counts", bamboo / "full-64-node-trace.csv", 4, 5.5),
    )
    found = [
        Scenario(name, stages, None, of_recording(form, path, end_hours=end_hours))
        for name, form, path, stages, end_hours in rented
        if path.exists()
    ]
    phones = folder / "stunner-2014" / "stunner_weekly_80_seconds.txt"
    if phones.exists():
        sessions = of_recording("sessions", phones, users=150)
        found.append(Scenario("stunner, 150 users", 4, PROCESSORS, sessions))
    if not found:
        raise click.UsageError(
            f"{folder} has no recording, such as {rented[0][2].relative_to(folder)}; without a "
            "folder generated churn is simulated"
        )
    return found


GENERATED = (
    Scenario("spot, 64 machines", 4, None, of_model("spot", 64)),
    Scenario("home, 80 processors", 4, PROCESSORS, of_model("home:on_hours=1.5", 80)),
    Scenario("home, 80 graphics cards", 4, HOME, of_model("home:on_hours=1.5", 80)),
)


# ---------------------------------------------------------------- measuring


def simulated(
    scenario: Scenario, rule: str, period_seconds: float, seed: int, hours: float
) -> dict[str, Any]:
    changes = scenario.changes(seed, hours)
    machines = len({change.name for change in changes})
    fleet = [RENTED]
    if scenario.fleet is not None:
        fleet = make_fleet(scenario.fleet, machines, random.Random(f"{seed} fleet"))
    policy = MovePolicy(period_seconds=period_seconds)
    if rule == "swarm":
        moves = RebalancingSettings(
            RebalancingRule.THROUGHPUT, policy, loss_reaction_seconds=math.inf,
            choose=choose_swarm_moves,
        )  # fmt: skip
    else:
        moves = RebalancingSettings(RebalancingRule(rule), policy)
    options = SwarmOptions(moves=moves, heartbeat_seconds=15.0)
    with collect_rarely():
        swarm = Swarm(manifest_for(scenario), fleet, changes, options, seed, FluidPlane)
        swarm.simulate(hours)
    found = outcome_document(swarm, {}, 0.0)
    meter = swarm.meter
    return {
        "seed": seed,
        "made": meter.made, "possible": meter.possible, "bound": meter.bound,
        **{
            name: found[name]
            for name in ("steps", "moves", "moves_dropped", "moved_bytes", "roll_backs",
                         "attempts_aborted", "standstill_seconds", "microbatches_per_second")
        },
    }  # fmt: skip


def summed(
    scenario: Scenario, rule: str, period: float, runs: list[dict[str, Any]],
    hours: float,
) -> dict[str, Any]:  # fmt: skip
    possible, bound = sum(run["possible"] for run in runs), sum(run["bound"] for run in runs)
    made = sum(run["made"] for run in runs)
    shares = [run["made"] / run["possible"] for run in runs if run["possible"]]
    simulated_hours = hours * len(runs)
    microbatches = manifest_for(scenario).training.microbatches_per_step
    completed = microbatches * sum(run["steps"] for run in runs)
    return {
        "scenario": scenario.name, "stages": scenario.stages, "rule": rule,
        "period_seconds": period,
        "share_of_best": made / possible if possible else 0.0,
        "share_of_bound": made / bound if bound else 0.0,
        "microbatches_per_step": microbatches,
        "share_of_placement": completed / made if made else 0.0,
        "share_spread": statistics.stdev(shares) if len(shares) > 1 else 0.0,
        "moves_per_hour": sum(run["moves"] for run in runs) / simulated_hours,
        "moved_bytes_per_hour": sum(run["moved_bytes"] for run in runs) / simulated_hours,
        "microbatches_per_second": statistics.mean(run["microbatches_per_second"] for run in runs),
        "runs": runs,
    }  # fmt: skip


def rebalancing_markdown(document: Mapping[str, Any]) -> str:
    """Share of the best placement, rate of whole steps over the placement's (moves an hour, GB an
    hour) by scenario and rule."""
    rows = {(row["scenario"], row["rule"], row["period_seconds"]): row for row in document["rows"]}
    head = (
        f"{document['date']}, {document['seeds']} seeds of {document['hours']:g} h each. "
        "The placement's rate in percent of the best placement's; tokens/s in percent of the "
        "placement's rate (moves per hour, gigabytes per hour):"
    )
    columns = ("", "none", "SWARM, 60 s", "ours, 60 s", "SWARM, 300 s", "ours, 300 s")
    cells = [
        (name, *(_cell(rows[name, rule, period], rule) for rule, period in RULES))
        for name in dict.fromkeys(scenario for scenario, _, _ in rows)
    ]
    return headed_table(head, columns, "lrrrrr", cells)


def _cell(row: Mapping[str, Any], rule: str) -> str:
    share = f"{100 * row['share_of_best']:.1f}; {100 * row['share_of_placement']:.0f}"
    if rule == "none":
        return share
    gigabytes = row["moved_bytes_per_hour"] / 1e9
    return f"{share} ({row['moves_per_hour']:.1f}, {gigabytes:.1f})"


@click.command()
@click.argument("traces", required=False, type=click.Path(path_type=Path, exists=True))
@click.option("--seeds", default=10)
@click.option("--hours", default=1.0, help="Hours of each simulation.")
@click.option("--only", default="", help="Run only scenarios whose names contain this.")
@out_option("rebalancing.json")
def main(traces: Path | None, seeds: int, hours: float, only: str, out: Path) -> None:
    scenarios = [*(recordings(traces) if traces is not None else ()), *GENERATED]
    began = time.process_time()
    rows: list[dict[str, Any]] = []
    for scenario in scenarios:
        if only not in scenario.name:
            continue
        for rule, period in RULES:
            runs = [simulated(scenario, rule, period, seed, hours) for seed in range(1, seeds + 1)]
            rows.append(summed(scenario, rule, period, runs, hours))
            row = rows[-1]
            click.echo(
                f"{scenario.name}, {rule}, {period:.0f} s: {row['share_of_best']:.4f} of the "
                f"best, {row['moves_per_hour']:.1f} moves/h"
            )
        write_atomically(out, (json.dumps(_document(rows, seeds, hours, began)) + "\n").encode())
    click.echo(rebalancing_markdown(_document(rows, seeds, hours, began)))


def _document(rows: list[dict[str, Any]], seeds: int, hours: float, began: float) -> dict[str, Any]:
    return {
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(["pydantic"]),
        "seeds": seeds,
        "hours": hours,
        "cpu_seconds": time.process_time() - began,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
