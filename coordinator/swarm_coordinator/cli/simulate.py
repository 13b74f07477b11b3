"""`swarm-coordinator simulate`: the run with a simulated fleet.

Reads the run's manifest; changes nothing in its folder.
"""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import click

from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.core.state.moves import RebalancingRule, RebalancingSettings
from swarm_coordinator.durability.run_files import load_manifest, load_settings
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.simulator.audits import with_liars
from swarm_coordinator.simulator.churn_models import churn_model
from swarm_coordinator.simulator.fleet import fleet_from
from swarm_coordinator.simulator.fluid_plane import FluidPlane
from swarm_coordinator.simulator.microbatch_plane import MicrobatchPlane
from swarm_coordinator.simulator.report import outcome_document, outcome_lines
from swarm_coordinator.simulator.swarm import Swarm, collect_rarely
from swarm_coordinator.simulator.trace import TraceEvent, read_trace, write_trace
from swarm_coordinator.simulator.volunteer import SwarmOptions
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import UsageError
from swarm_shared.scheduling.placement import MovePolicy

MAX_FOLLOWED_MACHINES = 200
"""Maximum number of machines for which every microbatch is simulated; minutes, not hours."""


@click.command("simulate")
@RUN_DIR
@click.option(
    "--fleet",
    required=True,
    metavar="FILE|home|N",
    help="Machines: a file, the built-in home machines, or a number of them.",
)
@click.option(
    "--trace",
    required=True,
    metavar="FILE|MODEL",
    help="When machines join and leave: a recording, or steady, home or spot with parameters.",
)
@click.option("--seed", default=1, show_default=True, help="Seed of everything random.")
@click.option(
    "--hours",
    type=click.FloatRange(0.01, 10_000),
    default=1.0,
    show_default=True,
    help="Simulated hours.",
)
@click.option(
    "--rule",
    type=click.Choice([rule.value for rule in RebalancingRule]),
    default=RebalancingRule.THROUGHPUT.value,
    show_default=True,
    help="Rule by which peers are moved between stages.",
)
@click.option(
    "--period",
    type=click.FloatRange(1, 86_400),
    default=60.0,
    show_default=True,
    help="Seconds between two placement decisions.",
)
@click.option(
    "--level",
    type=click.Choice(["auto", "fluid", "microbatches"]),
    default="auto",
    show_default=True,
    help="Simulate every microbatch, or only rates (fluid).",
)
@click.option(
    "--liars",
    type=click.FloatRange(0, 1),
    default=0.0,
    show_default=True,
    help="Share of the machines that lie; audits look for them.",
)
@click.option(
    "--lies",
    type=click.FloatRange(0, 1, min_open=True),
    default=1.0,
    show_default=True,
    help="Share of its microbatches in which such a machine lies.",
)
@click.option(
    "--save-trace",
    type=click.Path(path_type=Path),
    help="Write the joins and departures to this file.",
)
@click.option(
    "--json", "out", type=click.Path(path_type=Path), help="Write all figures to this file."
)
def simulate_command(
    run_dir: Path, fleet: str, trace: str, seed: int, hours: float, rule: str, period: float,
    level: str, liars: float, lies: float, save_trace: Path | None, out: Path | None,
) -> None:  # fmt: skip
    """Simulate RUN_DIR with a fleet that joins and leaves, on a virtual clock.

    The coordinator's own code decides; machines, links and users are modelled.
    docs/simulator.md describes the model and the file formats.
    """
    folder = RunFolder.open(run_dir)
    manifest = load_manifest(folder)
    machines = fleet_from(fleet, random.Random(f"{seed} fleet"))
    machines = with_liars(machines, liars, lies, random.Random(f"{seed} liars"))
    changes = trace_from(trace, len(machines), hours, seed)
    if save_trace is not None:
        write_trace(save_trace, changes, f"--trace {trace} --fleet {fleet} --seed {seed}")
    if level == "auto":
        level = "microbatches" if len(machines) <= 32 and hours <= 1 else "fluid"
    if level == "microbatches" and len(machines) > MAX_FOLLOWED_MACHINES:
        raise UsageError(
            f"microbatches of {len(machines):,} machines are too many to follow; use "
            f"--level fluid, or at most {MAX_FOLLOWED_MACHINES} machines"
        )
    if level == "fluid" and any(machine.lies for machine in machines):
        raise UsageError(
            "liars are found in single microbatches; use --level microbatches, which takes at most "
            f"{MAX_FOLLOWED_MACHINES} machines"
        )
    trust = load_settings(folder).trust
    plane = MicrobatchPlane if level == "microbatches" else FluidPlane
    options = SwarmOptions(
        moves=RebalancingSettings(RebalancingRule(rule), MovePolicy(period_seconds=period)),
        audits=trust.audit_settings if level == "microbatches" else None,
    )
    began = time.monotonic()
    with collect_rarely():
        swarm = Swarm(manifest, machines, changes, options, seed, plane)
        swarm.simulate(hours)
    parameters = {"fleet": fleet, "trace": trace, "seed": seed, "level": level, "liars": liars}
    document = outcome_document(swarm, parameters, time.monotonic() - began)
    for line in outcome_lines(document):
        click.echo(line)
    if out is not None:
        write_atomically(out, (json.dumps(document, indent=1) + "\n").encode())
        click.echo(f"written to {out}")


def trace_from(text: str, machines: int, hours: float, seed: int) -> list[TraceEvent]:
    """Return the events of `--trace`: of a file if there is one of that name, otherwise of a
    model."""
    path = Path(text)
    if path.is_file():
        return read_trace(path)
    model = churn_model(text)
    names = [f"machine-{number + 1}" for number in range(machines)]
    return model.changes(names, hours, random.Random(f"{seed} churn"))
