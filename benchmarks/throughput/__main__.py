"""Throughput of the swarm compared with torch alone: `make bench`.

All contenders have the same model, data, microbatches, optimizer and stage boundaries. Repetitions
are interleaved, so that a slowdown of the machine affects all of them; results are medians. Losses
are compared at the end: a contender that computed something else fails the benchmark.

Throughput is tokens over seconds of the steps after the warm-up. Nothing else should run on the
machine meanwhile.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.outcome import RESULTS, conclude, refuse_other_losses, result_head, work_folder
from benchmarks.pages.tables import throughput_markdown
from benchmarks.run_data import PLAIN_BORDERS, TimedStep, loss_disagreement, preset_sizes
from benchmarks.throughput.contenders import CONTENDERS, Contender, run_contender
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_shared.run.model_config import PRESETS

PACKAGES = ("torch", "numpy", "libp2p", "hivemind", "swarmtrain")
Results = dict[str, list[Sequence[TimedStep]]]


@click.command()
@click.option(
    "--steps", default=6, show_default=True, type=click.IntRange(2), help="Steps per run."
)
@click.option("--warmup", default=2, show_default=True, type=click.IntRange(1))
@click.option("--repetitions", default=3, show_default=True, type=click.IntRange(1))
@click.option("--preset", default="small", show_default=True, type=click.Choice(list(PRESETS)))
@click.option("--only", multiple=True, type=click.Choice(list(CONTENDERS)), help="Repeatable.")
@click.option(
    "--out", type=click.Path(path_type=Path), help=f"Result file; default: under {RESULTS.name}/."
)
def main(
    steps: int, warmup: int, repetitions: int, preset: str, only: tuple[str, ...], out: Path | None
) -> None:
    """Measure tokens/s of the swarm, of one torch process and of torch's own pipeline."""
    if warmup >= steps:
        raise click.UsageError("--steps must exceed --warmup")
    chosen = {name: CONTENDERS[name] for name in CONTENDERS if not only or name in only}
    with work_folder("throughput") as work:
        results = _measure(chosen, work, steps, repetitions, preset)
    document = _document(chosen, results, warmup, steps, preset)
    conclude(out or RESULTS / f"throughput-{preset}.json", document, throughput_markdown)
    refuse_other_losses([document["loss_disagreement"]])


def _measure(
    chosen: Mapping[str, Contender], work: Path, steps: int, repetitions: int, preset: str
) -> Results:
    templates: dict[tuple[int, int], Path] = {}
    for contender in chosen.values():
        stages, peers = shape = _shape(contender)
        if shape in templates:
            continue
        templates[shape] = work / f"template-{stages}x{peers}"
        make_template(templates[shape], contender, steps, preset)
    results: Results = {name: [] for name in chosen}
    for repetition in range(1, repetitions + 1):
        for name, contender in chosen.items():
            place = work / f"{name}-{repetition}"
            timed = run_contender(contender, templates[_shape(contender)], place, steps)
            results[name].append(timed)
            shutil.rmtree(place)
            click.echo(
                f"{repetition}/{repetitions}  {contender.name:<34}"
                f"{tokens_per_second(timed[1:]):>10,.0f} tokens/s  loss {timed[-1].loss:.4f}"
            )
    return results


def make_template(place: Path, contender: Contender, steps: int, preset: str) -> None:
    """Make the run folder that `run_contender` takes."""
    stages, peers = _shape(contender)
    click.echo(f"making a run of {stages} stage(s), {peers} peer(s) each")
    initialise_run(place, preset, stages=stages, overrides={
        "training.steps": steps, "training.evaluation_microbatches": 0,
        "run.name": "benchmark", "network.listen_host": "127.0.0.1",
        "limits.starting_peers_per_stage": peers,
        # So few steps would all be on probation, which `make bench-trust` measures.
        "trust.probation_cells": 0,
        **PLAIN_BORDERS, **preset_sizes(preset),
    })  # fmt: skip


def _shape(contender: Contender) -> tuple[int, int]:
    """Return the number of stages and of peers in each."""
    return contender.stages, contender.processes // contender.stages


def tokens_per_second(timed: Sequence[TimedStep]) -> float:
    return sum(step.tokens for step in timed) / sum(step.seconds for step in timed)


def _document(
    chosen: Mapping[str, Contender], results: Results, warmup: int, steps: int, preset: str
) -> dict[str, Any]:
    rates = {
        name: [tokens_per_second(timed[warmup:]) for timed in runs]
        for name, runs in results.items()
    }
    return {
        **result_head(PACKAGES),
        "preset": preset,
        "model": PRESETS[preset].model.model_dump(),
        "microbatches_per_step": PRESETS[preset].microbatches_per_step,
        "sequences_per_microbatch": PRESETS[preset].sequences_per_microbatch,
        "steps": steps,
        "warmup_steps": warmup,
        "repetitions": len(next(iter(results.values()))),
        "contenders": {
            name: {
                "name": contender.name,
                "stages": contender.stages,
                "compute_processes": contender.processes,
                "threads_per_process": contender.compute_threads,
                "tokens_per_second_median": median(rates[name]),
                "tokens_per_second_all": rates[name],
                "losses": [step.loss for step in results[name][0]],
            }
            for name, contender in chosen.items()
        },
        "ratios": _ratios({name: median(values) for name, values in rates.items()}),
        "loss_disagreement": loss_disagreement(
            {name: [[step.loss for step in run] for run in runs] for name, runs in results.items()}
        ),
    }


def _ratios(medians: Mapping[str, float]) -> dict[str, float]:
    """Return each swarm's rate over one torch process and over torch's pipeline of equal size."""
    found: dict[str, float] = {}
    for name, rate in medians.items():
        processes = CONTENDERS[name].processes
        for other in ("torch", f"1f1b-{processes}"):
            if name != other and name != "torch" and other in medians:
                found[f"{name} / {other}"] = rate / medians[other]
    return found


if __name__ == "__main__":
    main()
