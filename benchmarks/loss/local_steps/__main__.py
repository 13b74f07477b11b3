"""Cost in loss of local steps, compared with synchronous training: `make bench-local-steps`.

Trains one small model after the other in this process, on the demo's data: synchronously, with
larger batches, and with cohorts that take several steps of their own between two averages. All see
the same tokens in the same order. The peak learning rate of each method is tuned with one seed.

Every finished training is a row of benchmarks/results/local-steps.json and is not computed again:
the program may be interrupted, and `--minutes` limits how long it begins new ones.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.loss.local_steps.page import local_steps_markdown
from benchmarks.loss.local_steps.search import LARGER_MODEL_METHODS, METHODS, Training, train_all
from benchmarks.loss.local_steps.training import Diverged, train_local_steps
from benchmarks.loss.quality import SETTINGS
from benchmarks.outcome import now, out_option, result_head, write_result
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.offline.reference import StepRecord, compute_threads, evaluate
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.base.clock import monotonic
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.run.manifest import Manifest

PACKAGES = ("torch", "numpy")
LAST_SHARE = 10
"""The training loss is the mean over the last of so many parts of the tokens."""

SMALL, LARGER = "width 64, 2 layers", "width 128, 4 layers"
_SMALL: dict[str, object] = {
    **SETTINGS,
    "run.name": "local-steps",
    "model.layers": 2,
    "training.steps": 300,
    "training.microbatches_per_step": 4,
    "training.sequences_per_microbatch": 4,
    "training.evaluation_microbatches": 64,
    "optimizer.warmup_steps": 30,
}
MODELS: dict[str, dict[str, object]] = {
    SMALL: _SMALL,
    LARGER: {
        **_SMALL,
        "model.layers": 4,
        "model.hidden_size": 128,
        "model.intermediate_size": 352,
    },
}
"""Settings of the run of each model; the microbatches and sizes are those of the base batch."""


class Gate:
    """The trainings of one result file, those that are done and those that are begun."""

    def __init__(self, out: Path, runs: Mapping[str, Path], minutes: float) -> None:
        self._out = out
        self._runs = runs
        self._end = monotonic() + 60 * minutes
        self._document = read_document(out)
        self._rows: list[dict[str, Any]] = self._document["trainings"]

    def loss(self, training: Training) -> float:
        """Return the held-out loss of a training, infinite if it diverged; compute it only if it is
        not in the result file."""
        settings = training.settings()
        row = next((row for row in self._rows if settings.items() <= row.items()), None)
        if row is None:
            if monotonic() >= self._end:
                raise OutOfTime
            row = settings | trained(self._runs[training.model], training)
            self._rows.append(row)
            write_result(self._out, {**self._document, **result_head(PACKAGES)})
            click.echo(json.dumps(row), err=True)
        found = row["heldout_loss"]
        return math.inf if found is None else float(found)


class OutOfTime(Exception):
    """No further training shall begin."""


def read_document(out: Path) -> dict[str, Any]:
    """Return the result file, or an empty one; refuse one of models with other settings."""
    empty: dict[str, Any] = {"models": MODELS, "trainings": []}
    if not out.exists():
        return empty
    document: dict[str, Any] = json.loads(out.read_text())
    if document["models"] != MODELS:
        raise click.ClickException(
            f"{out} holds trainings of models with other settings; move it away to begin anew"
        )
    return document


def manifest_of(base: Manifest, training: Training) -> Manifest:
    """Return the manifest of a training: its seed, rate and batch, and as many tokens as the base
    run."""
    batch = training.method.batch
    sizes = base.training.model_copy(
        update={
            "seed": training.seed,
            "steps": base.training.steps // batch,
            "microbatches_per_step": base.training.microbatches_per_step * batch,
        }
    )
    optimizer = base.optimizer.model_copy(
        update={
            "learning_rate": training.learning_rate,
            "warmup_steps": base.optimizer.warmup_steps // batch,
        }
    )
    return base.model_copy(update={"training": sizes, "optimizer": optimizer})


def trained(run_dir: Path, training: Training) -> dict[str, Any]:
    """Return the losses of a training in nats per token; None if it diverged."""
    folder = RunFolder.open(run_dir)
    manifest = manifest_of(load_manifest(folder), training)
    samples = ShardSamples(folder.data, manifest)
    records: list[StepRecord] = []
    began, cpu_began = monotonic(), time.process_time()
    heldout, last = None, None
    try:
        stage = train_local_steps(manifest, training.method.local, samples.training, records.append)
    except Diverged:
        pass
    else:
        with compute_threads(1):
            heldout, last = evaluate(stage, samples.of_evaluation()), last_loss(records)
    return {
        "heldout_loss": heldout,
        "training_loss": last,
        "tokens": manifest.training.steps * manifest.tokens_per_step,
        "seconds": round(monotonic() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
        "finished_at": now(),
    }


def last_loss(records: Sequence[StepRecord]) -> float:
    """Return the mean training loss of the last steps."""
    count = -(-len(records) // LAST_SHARE)
    return math.fsum(record.loss for record in records[-count:]) / count


@click.command()
@click.option("--seeds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--minutes", type=click.FloatRange(0), default=600.0, show_default=True)
@click.option("--model", type=click.Choice(list(MODELS)), default=SMALL, show_default=True)
@out_option("local-steps.json")
def main(seeds: int, minutes: float, model: str, out: Path) -> None:
    """Measure the final loss with local steps, compared with synchronous training."""
    methods = METHODS if model == SMALL else LARGER_MODEL_METHODS
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        initialise_run(run_dir, "tiny", stages=1, overrides=MODELS[model])
        gate = Gate(out, {model: run_dir}, minutes)
        try:
            train_all(model, methods, range(1, seeds + 1), gate.loss)
        except OutOfTime:
            click.echo("stopped: the minutes are over", err=True)
    click.echo(local_steps_markdown(read_document(out)))


if __name__ == "__main__":
    main()
