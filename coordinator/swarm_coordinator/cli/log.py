"""`swarm-coordinator log`: the metrics of a run for an experiment tracker."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.durability.run_files import database_location, load_manifest
from swarm_coordinator.run_dir.folder import RunFolder, disk_errors, quoted
from swarm_coordinator.tracking.follow import follow
from swarm_coordinator.tracking.metrics_reader import read_metrics
from swarm_coordinator.tracking.targets import (
    STANDARD_OUTPUT,
    JsonLines,
    MetricsTarget,
    Target,
    TensorBoard,
    TrackedRun,
    Trackio,
    WeightsAndBiases,
)
from swarm_coordinator.tracking.trace_reader import StepTrace, read_traces
from swarm_shared.base.atomic_file import make_folder
from swarm_shared.base.errors import UsageError
from swarm_shared.host.stop_signals import on_stop_signals
from swarm_shared.identity.signed_manifest import run_id_of

JSON_LINES = "jsonl"
OPENTELEMETRY = "opentelemetry"
TRACKERS: dict[str, Callable[[TrackedRun], MetricsTarget]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "trackio": Trackio,
    JSON_LINES: JsonLines,
}
ID_CHARACTERS = 12
"""Characters of the run's id that name it to trackers; enough that no two runs share them."""


@click.command("log")
@RUN_DIR
@click.option(
    "--to",
    "target",
    required=True,
    type=click.Choice([*TRACKERS, OPENTELEMETRY]),
    help="What to write to.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    help="File (jsonl; - for standard output, the default) or folder (the others; by default "
    "log/TARGET in RUN_DIR).",
)
@click.option(
    "--endpoint",
    metavar="URL",
    help="OTLP/HTTP receiver of opentelemetry; by default OTEL_EXPORTER_OTLP_ENDPOINT, or "
    "http://localhost:4318.",
)
@click.option("--once", is_flag=True, help="Write what there is, and end.")
def log_command(
    run_dir: Path, target: str, output: Path | None, endpoint: str | None, once: bool
) -> None:
    """Write the metrics of the run in RUN_DIR to an experiment tracker while the run goes on.

    Loss, held-out loss, learning rate, tokens, seconds and peers of each step; to opentelemetry,
    one trace for each step: where its time went. It reads the run's database, whether a
    coordinator runs or not, and ends with the run or at Ctrl-C. Started again, it continues where
    it stopped.
    """
    if endpoint is not None and target != OPENTELEMETRY:
        raise UsageError(f"--endpoint goes with --to {OPENTELEMETRY} only; leave it out")
    folder = RunFolder.open(run_dir)
    manifest, location = load_manifest(folder), database_location(folder)
    if output is None:
        output = STANDARD_OUTPUT if target == JSON_LINES else folder.log / target
    run = TrackedRun(run_id_of(manifest)[:ID_CHARACTERS], manifest.name, output)
    position_file = _position_file(run, target)
    steps = manifest.training.steps
    # Set at Ctrl-C and the like, so that none interrupts a record half written; in this order: a
    # tracker may ask for a login, which Ctrl-C has to interrupt.
    stop = threading.Event()
    if target == OPENTELEMETRY:
        with contextlib.closing(_traces(run, endpoint)) as traces, on_stop_signals(stop.set):
            click.echo(f"sending traces of {manifest.name}; Ctrl-C ends this", err=True)
            read_steps = partial(read_traces, location, steps=steps)
            follow(read_steps, traces, position_file, stop.wait, once=once)
        return
    with contextlib.closing(TRACKERS[target](run)) as tracker, on_stop_signals(stop.set):
        if output != STANDARD_OUTPUT:
            click.echo(f"writing {manifest.name} to {quoted(output)}; Ctrl-C ends this", err=True)
        read_numbers = partial(read_metrics, location, steps=steps)
        follow(read_numbers, tracker, position_file, stop.wait, once=once)


def _traces(run: TrackedRun, endpoint: str | None) -> Target[StepTrace]:
    # Its module needs packages that the other targets do not.
    from swarm_coordinator.tracking.opentelemetry_traces import OpenTelemetryTraces

    return OpenTelemetryTraces(run, endpoint)


def _position_file(run: TrackedRun, target: str) -> Path | None:
    """Return the file that says where to continue; it counts only together with the output."""
    if target != JSON_LINES:
        with disk_errors(run.output):
            make_folder(run.output)
        return run.output / f"{run.id}.position"
    if run.output == STANDARD_OUTPUT:
        return None
    path = Path(f"{run.output}.position")
    if not run.output.exists():
        path.unlink(missing_ok=True)
    return path
