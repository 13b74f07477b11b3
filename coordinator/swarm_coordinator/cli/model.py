"""The commands that load a model: export and reference.

Owns their output. torch is imported inside them, because that takes seconds.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.durability.run_files import (
    database_location,
    load_manifest,
    read_database,
    read_progress,
)
from swarm_coordinator.model_hub.model_card import RunFigures, model_card
from swarm_coordinator.model_hub.models import check_push, push_model
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder, quoted, read_bytes
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_coordinator.storage.database import database_exists
from swarm_coordinator.storage.history import HistoryStep, history, read_reached, steps_document
from swarm_coordinator.storage.records import read_checkpoints
from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import StorageError, UsageError
from swarm_shared.base.text import parse_size, printable
from swarm_shared.base.types import Step, Version
from swarm_shared.identity.signed_manifest import MAX_MANIFEST_BYTES, run_id_of
from swarm_shared.run.manifest import Manifest

if TYPE_CHECKING:
    from swarm_coordinator.offline.weight_files import ExportDtype


class Size(click.ParamType[int]):
    """A size of files, such as `5GB`."""

    name = "size"

    def convert(
        self, value: str | int, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        if isinstance(value, int):
            return value
        try:
            found = parse_size(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)
        if found == 0:
            self.fail("a file has more than 0 bytes", param, ctx)
        return found


@click.command("export")
@RUN_DIR
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    default="float32",
    show_default=True,
    help="Type of the parameters; training keeps them in float32.",
)
@click.option(
    "--shard-size",
    "shard_bytes",
    type=Size(),
    default="5GB",
    show_default=True,
    help="Largest file of parameters; a larger model has several, and an index.",
)
@click.option(
    "--merge",
    is_flag=True,
    help="Of a run that trains adapters: write a whole model that has them in its matrices.",
)
@click.option(
    "--push",
    "push_to",
    metavar="ORG/NAME",
    help="Upload OUT to the Hugging Face hub, with the token of `hf auth login` or HF_TOKEN.",
)
@click.option("--private", is_flag=True, help="With --push: only members of ORG see the model.")
def export_command(
    run_dir: Path,
    out: Path,
    dtype: ExportDtype,
    shard_bytes: int,
    merge: bool,
    push_to: str | None,
    private: bool,
) -> None:
    """Write the newest checkpoint of RUN_DIR to OUT as a folder that `transformers` loads, or
    `peft` if the run trains adapters.

    An earlier export in OUT is replaced. README.md in it is a model card with the run's figures.
    """
    if private and push_to is None:
        raise UsageError("--private says how to push; name the model with --push ORG/NAME")
    repository = None if push_to is None else check_push(push_to)
    folder = RunFolder.open(run_dir)
    manifest = load_manifest(folder)
    if merge and not manifest.model.has_adapters:
        raise UsageError("--merge is for runs that train adapters; this one trains a whole model")
    from swarm_coordinator.offline.hf_export import (
        check_out,
        export_adapters,
        export_huggingface,
        exported_files,
    )

    check_out(out)
    version, files = newest_checkpoint(folder, manifest)
    place = "FOLDER" if repository is None else repository.name
    as_adapters = manifest.model.has_adapters and not merge
    card = model_card(
        manifest, _figures(folder, manifest, version), dtype, place, as_adapters=as_adapters
    )
    if as_adapters:
        export_adapters(manifest, files, folder.tokenizer, out, dtype, card)
    else:
        initial = initial_files(folder, manifest)
        export_huggingface(
            manifest, files, folder.tokenizer, out, dtype, shard_bytes, card, initial
        )
    what = "adapters" if as_adapters else "model"
    click.echo(f"wrote the {what} after step {version} to {out}")
    if repository is not None:
        address = push_model(out, exported_files(out), repository, private=private)
        click.echo(f"pushed it to {printable(address)}")


def _figures(folder: RunFolder, manifest: Manifest, version: Version) -> RunFigures:
    """Read the figures of a version; without the run's database, only those of the manifest."""
    reached = read_database(folder, partial(read_reached, version=version))
    envelope = read_bytes(folder.manifest, MAX_MANIFEST_BYTES)
    return RunFigures(
        run_id=run_id_of(manifest),
        manifest_sha256=hashlib.sha256(envelope).hexdigest(),
        steps=version,
        training_loss=reached.training_loss if reached else None,
        heldout_loss=reached.heldout_loss if reached else None,
        volunteers=reached.peers if reached else None,
    )


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
@click.option(
    "--device", default="cpu", show_default=True,
    help="Device that computes the microbatches, in torch's spelling.",
)  # fmt: skip
def reference_command(
    run_dir: Path, steps: int | None, json_file: Path | None, threads: int | None, device: str
) -> None:
    """Train the run in RUN_DIR in one process and compare its losses with the swarm's."""
    folder = RunFolder.open(run_dir)
    manifest = load_manifest(folder)
    wanted = min(steps or manifest.training.steps, manifest.training.steps)
    done: list[HistoryStep] = []
    # Both fail before hours of training, not after them.
    read_progress(folder)
    if json_file is not None:
        _write_steps(json_file, done)
    if threads is not None:
        # Libraries under torch read this once, when they are loaded.
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        heldout = _train(folder, manifest, wanted, threads, device, done)
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
    folder: RunFolder, manifest: Manifest, steps: int, threads: int | None, device: str,
    done: list[HistoryStep],
) -> float | None:  # fmt: skip
    from swarm_coordinator.offline.reference import (
        StepRecord,
        evaluate,
        train_reference,
        usable_device,
    )
    from swarm_shared.data.leaf_files import ShardSamples

    samples = ShardSamples(folder.data, manifest)

    def on_step(record: StepRecord) -> None:
        done.append(
            HistoryStep(
                Step(record.step), record.loss, record.tokens, record.seconds, written_at=0.0
            )
        )
        click.echo(f"step {record.step} loss {record.loss:.4f} {record.seconds:.2f} s")

    initial = initial_files(folder, manifest)
    stage = train_reference(
        manifest, samples.of_step, steps, on_step, threads, initial, usable_device(device)
    )
    if steps < manifest.training.steps or not manifest.training.evaluation_microbatches:
        return None
    return evaluate(stage, samples.of_evaluation())


def _write_steps(path: Path, steps: list[HistoryStep]) -> None:
    document: dict[str, Any] = steps_document(tuple(steps))
    write_atomically(path, (json.dumps(document) + "\n").encode())
