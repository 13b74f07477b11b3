"""Cost in loss of the codecs between stages: `make bench-quality`.

Trains one small model on the demo's data in this process, like `swarm-coordinator reference`, with
every pair of codecs and several seeds. The reference applies the codecs at the stage boundaries and
so computes what a swarm of that manifest computes (tests/integration/test_codecs.py).

Runs of one seed have the same initial values and the same data in the same order. Their gap to the
run without codecs is due to the codecs and to the chaotic effect of any rounding, whose size the
gap of float16 shows. The gap is compared with the noise: the standard deviation over the seeds of
the runs without codecs.

The gaps also go to `swarm_shared/codecs/quality.json`, from which `swarm-coordinator init --codec
auto` chooses; `--from` rewrites that table from an existing result.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.codecs.__main__ import cost_of
from benchmarks.outcome import RESULTS, conclude, out_option, result_head, write_result
from benchmarks.pages.markdown import markdown_table
from benchmarks.run_data import PLAIN_BORDERS
from swarm_coordinator.offline.reference import StepRecord, evaluate, train_reference
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.codecs import quality as shipped
from swarm_shared.codecs.choice import MEGABIT_BYTES, CodecPair, choose
from swarm_shared.codecs.choice import pair_name as name_of
from swarm_shared.codecs.quality import QualityTable
from swarm_shared.data.leaf_files import ShardSamples
from swarm_shared.run.codec_sizes import ActivationCodec, GradientCodec
from swarm_shared.run.manifest import CodecsConfig, Manifest

PACKAGE_FILE = Path(shipped.__file__).with_name(shipped.FILE_NAME)
PACKAGES = ("torch", "numpy")

PAIRS: tuple[tuple[ActivationCodec, GradientCodec], ...] = (
    ("none", "none"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("int8", "int8"),
    ("int8", "int4"),
    ("int8", "topk"),
    ("int4", "int8"),
    ("int4", "int4"),
)
"""Codecs of activations and gradients; the first pair is the baseline."""

SETTINGS: dict[str, object] = {
    **PLAIN_BORDERS,
    "run.name": "quality",
    "model.hidden_size": 64,
    "model.intermediate_size": 176,
    "model.layers": 4,
    "model.heads": 4,
    "model.key_value_heads": 2,
    "model.sequence_length": 64,
    "training.microbatches_per_step": 2,
    "training.sequences_per_microbatch": 16,
    "training.evaluation_microbatches": 24,
    # A rate at which training is smooth: at three times it even bfloat16 and float16 ended 0.03
    # apart, because any rounding changes the trajectory.
    "optimizer.learning_rate": 1e-3,
    "optimizer.warmup_steps": 10,
}
STAGES = 4
"""Stages of the run: three boundaries, the maximum for four layers."""
LINK_RATES_MBIT = (5, 20, 100, 1000, 10_000)
LOSS_BUDGETS = (0.0005, 0.005, 0.03)
"""Largest accepted gap of the loss, relative."""
STEPS = 120
SEEDS = 3


@click.command()
@click.option("--steps", type=click.IntRange(2), default=STEPS, show_default=True)
@click.option("--seeds", type=click.IntRange(2), default=SEEDS, show_default=True)
@click.option(
    "--from",
    "measured",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Write the package's table from this result without measuring.",
)
@out_option("quality.json")
def main(steps: int, seeds: int, measured: Path | None, out: Path) -> None:
    """Measure the final held-out loss per pair of codecs, compared with none."""
    if measured is not None:
        write_result(PACKAGE_FILE, package_table(json.loads(measured.read_text())).model_dump())
        return
    document = measured_losses(steps, seeds, measure)
    write_result(out, document)
    write_result(PACKAGE_FILE, package_table(document).model_dump())
    click.echo(quality_markdown(document, json.loads((RESULTS / "codecs.json").read_text())))


Measure = Callable[[Manifest, Path, Sequence[int]], dict[str, Any]]
"""Trains a run, given its manifest and the folder of its shards, with several seeds."""


def measured_losses(steps: int, seeds: int, measure: Measure) -> dict[str, Any]:
    """Return the result of `measure` for a temporary run of the small model."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        manifest = initialise_run(
            run_dir, "tiny", stages=STAGES, overrides={**SETTINGS, "training.steps": steps}
        )
        began = time.monotonic()
        found = measure(manifest, RunFolder.open(run_dir).data, range(1, seeds + 1))
    return {
        **result_head(PACKAGES),
        "load_before": load,
        "seconds": time.monotonic() - began,
        "settings": SETTINGS,
        "stages": STAGES,
        "steps": steps,
        "tokens_per_step": manifest.tokens_per_step,
        "seeds": list(range(1, seeds + 1)),
        **found,
    }


def loss_benchmark(
    name: str, help: str, measure: Measure, page: Callable[[Mapping[str, Any]], str]
) -> click.Command:
    """Return a command that writes the result of `measure` to NAME.json and prints its page."""

    @click.command(help=help)
    @click.option("--steps", type=click.IntRange(2), default=STEPS, show_default=True)
    @click.option("--seeds", type=click.IntRange(2), default=SEEDS, show_default=True)
    @out_option(f"{name}.json")
    def command(steps: int, seeds: int, out: Path) -> None:
        conclude(out, measured_losses(steps, seeds, measure), page)

    return command


def measure(manifest: Manifest, data: Path, seeds: Sequence[int]) -> dict[str, Any]:
    losses: dict[str, list[float]] = {name_of(*pair): [] for pair in PAIRS}
    for seed in seeds:
        for pair in PAIRS:
            losses[name_of(*pair)].append(final_loss(one_of(manifest, seed, *pair), data))
            click.echo(f"seed {seed} {name_of(*pair)}: {losses[name_of(*pair)][-1]:.4f}", err=True)
    return judged(losses, manifest)


def judged(losses: dict[str, list[float]], manifest: Manifest) -> dict[str, Any]:
    """Return the gaps per seed to the runs without codecs, and the smallest pair within noise."""
    baseline = losses[name_of(*PAIRS[0])]
    noise = statistics.stdev(baseline)
    pairs: dict[str, Any] = {}
    for activation, gradient in PAIRS:
        described = one_of(manifest, 1, activation, gradient)
        pairs[name_of(activation, gradient)] = {
            "activation": activation,
            "gradient": gradient,
            "bytes_per_microbatch": described.activation_bytes + described.gradient_bytes,
            **gap_of(losses[name_of(activation, gradient)], baseline),
        }
    within = {name: one for name, one in pairs.items() if one["within_noise"]}
    return {
        "noise": noise,
        "cheapest_within_noise": min(within, key=lambda n: within[n]["bytes_per_microbatch"]),
        "pairs": pairs,
    }


def gap_of(seen: list[float], baseline: list[float]) -> dict[str, Any]:
    """Return losses and their gaps to the baseline of the same seeds."""
    gaps = [loss - base for loss, base in zip(seen, baseline, strict=True)]
    return {
        "losses": seen,
        "gap_mean": statistics.mean(gaps),
        "gap_spread": max(gaps) - min(gaps),
        "gap_relative": statistics.mean(gaps) / statistics.mean(baseline),
        "within_noise": abs(statistics.mean(gaps)) <= statistics.stdev(baseline),
    }


def package_table(document: Mapping[str, Any]) -> QualityTable:
    """Return the part of a result that is stored in the package."""
    pairs: Mapping[str, Mapping[str, Any]] = document["pairs"]
    baseline = next(iter(pairs.values()))["losses"]
    return QualityTable(
        source="benchmarks/loss/quality.py",
        measured_at=document["measured_at"],
        steps=document["steps"],
        seeds=len(document["seeds"]),
        noise_relative=document["noise"] / statistics.mean(baseline),
        pairs={
            name: CodecPair.model_validate({field: one[field] for field in CodecPair.model_fields})
            for name, one in pairs.items()
        },
    )


def one_of(
    manifest: Manifest, seed: int, activation: ActivationCodec, gradient: GradientCodec
) -> Manifest:
    codecs = CodecsConfig(activation=activation, gradient=gradient)
    training = manifest.training.model_copy(update={"seed": seed})
    return manifest.model_copy(update={"codecs": codecs, "training": training})


def final_loss(manifest: Manifest, data: Path) -> float:
    """Return the held-out loss in nats per token after the last step, with the codecs applied."""
    samples = ShardSamples(data, manifest)
    records: list[StepRecord] = []
    stage = train_reference(
        manifest, samples.of_step, manifest.training.steps, records.append, threads=1
    )
    return evaluate(stage, samples.of_evaluation())


def quality_markdown(document: Mapping[str, Any], codecs: Mapping[str, Any]) -> str:
    """Held-out loss per pair of codecs, and the fastest pair per link rate and loss budget."""
    settings = document["settings"]
    pairs: Mapping[str, Mapping[str, Any]] = document["pairs"]
    baseline = next(iter(pairs.values()))
    rows = []
    for name, one in pairs.items():
        gaps = [loss - base for loss, base in zip(one["losses"], baseline["losses"], strict=True)]
        rows.append((
            name,
            f"{baseline['bytes_per_microbatch'] / one['bytes_per_microbatch']:.2f}",
            f"{statistics.mean(one['losses']):.4f}",
            f"{one['gap_mean']:+.4f} ({one['gap_relative']:+.2%})",
            f"{one['gap_spread']:.4f}",
            "yes" if min(gaps) > 0 else "no",
            "yes" if one["within_noise"] else "no",
        ))  # fmt: skip
    columns = (
        "activation / gradient", "compression", "mean loss", "mean gap", "spread of the gap",
        "worse with every seed", "within the noise",
    )  # fmt: skip
    lines = [
        f"{document['measured_at'][:10]}: {document['steps']} steps of "
        f"{document['tokens_per_step']:,} tokens of the demo's data, width "
        f"{settings['model.hidden_size']}, {settings['model.layers']} layers in "
        f"{document['stages']} stages, float32, {len(document['seeds'])} seeds. Held-out loss in "
        "nats per token.",
        "",
        *markdown_table(columns, "lrrrrll", rows),
        "",
        "The noise, the standard deviation over the seeds without codecs, is "
        f"{document['noise']:.4f}; the smallest pair whose mean gap is within it is "
        f"**{document['cheapest_within_noise']}**.",
        "",
        "Fastest pair by link rate (each direction) and largest accepted gap, from both tables:",
        "",
        *_choices(document, codecs),
    ]
    return "\n".join(lines)


def _choices(quality: Mapping[str, Any], codecs: Mapping[str, Any]) -> list[str]:
    pairs = package_table(quality).pairs
    costs = {name: cost_of(one) for name, one in codecs["codecs"].items()}
    rows = [
        [
            f"{rate:,} Mbit/s",
            *(str(choose(pairs, costs, rate * MEGABIT_BYTES, budget)) for budget in LOSS_BUDGETS),
        ]
        for rate in LINK_RATES_MBIT
    ]
    columns = ["link", *(f"gap up to {budget:.2%}" for budget in LOSS_BUDGETS)]
    return markdown_table(columns, "rlll", rows)


if __name__ == "__main__":
    main()
