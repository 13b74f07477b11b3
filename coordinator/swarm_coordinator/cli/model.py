"""The commands that load a model: export and reference.

Owns their output. torch is imported inside them, because that takes seconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from swarm_coordinator.cli.run import RUN_DIR
from swarm_coordinator.durability.run_files import database_location, load_manifest, read_database
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_coordinator.storage.database import database_exists
from swarm_coordinator.storage.history import HistoryStep, history, steps_document
from swarm_coordinator.storage.records import read_checkpoints
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import StorageError, UsageError
from swarm_shared.base.types import Step, Version
from swarm_shared.run.manifest import Manifest


@click.command("export")
@RUN_DIR
@click.argument("out", type=click.Path(path_type=Path))
def export_command(run_dir: Path, out: Path) -> None:
    """Write the newest checkpoint of RUN_DIR to OUT as a folder that `transformers` loads."""
    folder = RunFolder.open(run_dir)
    manifest = load_manifest(folder)
    _check_out(out)
    version, files = newest_checkpoint(folder, manifest)
    from swarm_coordinator.offline.hf_export import export_huggingface

    export_huggingface(manifest, files, folder.tokenizer, out)
    click.echo(f"wrote the model after step {version} to {out}")


def newest_checkpoint(folder: RunFolder, manifest: Manifest) -> tuple[Version, list[Path]]:
    """Return the newest checkpoint that verifies, and its files, one per stage."""
    checkpoints = CheckpointFolder.of_run(folder, manifest)
    known = read_database(folder, read_checkpoints)
    found = checkpoints.latest_valid(lambda text: click.echo(text, err=True), known)
    if found is None:
        raise StorageError(
            f"there is no usable checkpoint in {folder.checkpoints}; the run writes one every "
            f"{manifest.checkpoint_steps} steps and when it is stopped with Ctrl-C, so let it "
            f"run on with `swarm-coordinator start {quoted(folder.path)}`"
        )
    return found.version, checkpoints.stage_files(found.version)


def _check_out(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} exists and is not a folder; choose another name")
    if out.is_dir() and any(out.iterdir()) and not (out / "config.json").exists():
        raise UsageError(
            f"{out} holds files other than an exported model; choose another name, or empty it"
        )


@click.command("reference")
@RUN_DIR
@click.option("--steps", type=click.IntRange(1), help="Stop after this many steps.")
@click.option(
    "--json",
    "json_file",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Write the steps to this file, in the format of `history --json`.",
)
@click.option("--threads", type=click.IntRange(1), help="Compute threads.")
def reference_command(
    run_dir: Path, steps: int | None, json_file: Path | None, threads: int | None
) -> None:
    """Train the run in RUN_DIR in one process and compare its losses with the swarm's."""
    folder = RunFolder.open(run_dir)
    manifest = load_manifest(folder)
    wanted = min(steps or manifest.training.steps, manifest.training.steps)
    done: list[HistoryStep] = []
    if json_file is not None:
        # Fails before hours of training, not after them, if it cannot be written.
        _write_steps(json_file, done)
    if threads is not None:
        # Libraries under torch read this once, when they are loaded.
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        heldout = _train(folder, manifest, wanted, threads, done)
    finally:
        if json_file is not None:
            _write_steps(json_file, done)
    if heldout is not None:
        click.echo(f"held-out loss: {heldout:.4f}")
    location = database_location(folder)
    if database_exists(location):
        click.echo(compare_losses(history(location).steps, done, manifest))


def compare_losses(
    run: Sequence[HistoryStep], alone: Sequence[HistoryStep], manifest: Manifest
) -> str:
    """Compare a run's losses with those of one process, in one sentence."""
    of_run = {step.step: step.loss for step in run}
    both = [(step.step, of_run[step.step], step.loss) for step in alone if step.step in of_run]
    if not both:
        return "the run itself has applied none of these steps yet"
    # `or 1.0`: a loss of 0 must not end in a division by zero.
    unequal = [
        (abs(found - loss) / (abs(loss) or 1.0), step)
        for step, found, loss in both
        if found != loss
    ]
    count = f"{len(both)} step{'s' if len(both) > 1 else ''}"
    if not unequal:
        return f"the run's losses are the same, to the bit, in all {count}"
    farthest, step = max(unequal)
    text = f"the run's losses differ from these in {len(unequal)} of {count}, by {farthest:.1e} at "
    text += f"most (step {step})"
    average = manifest.codecs.average
    if average == "exact":
        return (
            f"{text}: its machines compute differently from this one (another device or number of "
            "threads)"
        )
    return (
        f"{text}; sums that do not depend on the order need "
        f'[codecs] average = "exact", not "{average}"'
    )


def _train(
    folder: RunFolder, manifest: Manifest, steps: int, threads: int | None, done: list[HistoryStep]
) -> float | None:
    from swarm_coordinator.offline.reference import StepRecord, evaluate, train_reference
    from swarm_shared.data.leaf_files import ShardSamples

    samples = ShardSamples(folder.data, manifest)

    def on_step(record: StepRecord) -> None:
        done.append(
            HistoryStep(
                Step(record.step), record.loss, record.tokens, record.seconds, written_at=0.0
            )
        )
        click.echo(f"step {record.step} loss {record.loss:.4f} {record.seconds:.2f} s")

    stage = train_reference(
        manifest, samples.of_step, steps, on_step, threads, initial_files(folder, manifest)
    )
    if steps < manifest.training.steps or not manifest.training.evaluation_microbatches:
        return None
    return evaluate(stage, samples.of_evaluation())


def _write_steps(path: Path, steps: list[HistoryStep]) -> None:
    document: dict[str, Any] = steps_document(tuple(steps))
    write_atomically(path, (json.dumps(document) + "\n").encode())
