"""Cost in loss of gradients that are one version stale: `make bench-lateness`.

Trains one small model like `swarm-coordinator reference`, with staleness 0 and 1 (decision 0024),
several seeds and learning rates: a delay harms more the larger the steps are. A swarm of the same
manifest computes the same (tests/integration/test_staleness.py). Runs of one seed have the same
initial values and the same data; model and data are those of `benchmarks.loss.quality`.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.loss.quality import final_loss, gap_of, loss_benchmark
from benchmarks.pages.markdown import headed_table
from swarm_shared.run.manifest import Manifest

RATES = (1e-3, 3e-3)
"""Learning rates; the first is that of `benchmarks.loss.quality`."""

TIMES_AS_MANY = 1.5
"""Steps that a run with staleness takes on a cable link per step of one without
(docs/benchmarks.md); it allows comparing the loss after equal time."""


def measure(manifest: Manifest, data: Path, seeds: Sequence[int]) -> dict[str, Any]:
    steps = manifest.training.steps
    kinds = {"prompt": (0, steps), "late": (1, steps), "longer": (1, round(TIMES_AS_MANY * steps))}
    losses: dict[tuple[float, str], list[float]] = {}
    for seed in seeds:
        for rate in RATES:
            for kind, (staleness, taken) in kinds.items():
                one = _one_of(manifest, seed, rate, staleness, taken)
                found = final_loss(one, data)
                losses.setdefault((rate, kind), []).append(found)
                click.echo(f"seed {seed}, rate {rate:g}, {kind}: {found:.4f}", err=True)
    return {
        "longer_steps": kinds["longer"][1],
        "rates": [
            {
                "learning_rate": rate,
                "prompt": losses[rate, "prompt"],
                "noise": statistics.stdev(losses[rate, "prompt"]),
                "late": gap_of(losses[rate, "late"], losses[rate, "prompt"]),
                "longer": gap_of(losses[rate, "longer"], losses[rate, "prompt"]),
            }
            for rate in RATES
        ],
    }


def _one_of(manifest: Manifest, seed: int, rate: float, staleness: int, steps: int) -> Manifest:
    training = manifest.training.model_copy(
        update={"seed": seed, "staleness": staleness, "steps": steps}
    )
    optimizer = manifest.optimizer.model_copy(update={"learning_rate": rate})
    return manifest.model_copy(update={"training": training, "optimizer": optimizer})


def lateness_markdown(document: Mapping[str, Any]) -> str:
    """Loss with and without staleness, by learning rate."""
    head = (
        f"{document['measured_at'][:10]}: {document['steps']} steps of "
        f"{document['tokens_per_step']:,} tokens, model and data of the codec table, "
        f"{len(document['seeds'])} seeds. Held-out loss in nats per token."
    )
    rows = [
        (
            f"{one['learning_rate']:g}",
            f"{statistics.mean(one['prompt']):.4f}",
            *_cells(one["late"]),
            *_cells(one["longer"]),
            f"{one['noise']:.4f}",
        )
        for one in document["rates"]
    ]
    columns = (
        "learning rate", "staleness 0", "staleness 1", "gap",
        f"staleness 1, {document['longer_steps']} steps", "gap", "noise over the seeds",
    )  # fmt: skip
    return headed_table(head, columns, "rrrrrrr", rows)


def _cells(found: Mapping[str, Any]) -> tuple[str, str]:
    mean, share = statistics.mean(found["losses"]), 100 * found["gap_relative"]
    return f"{mean:.4f}", f"{found['gap_mean']:+.4f} ({share:+.2f}%)"


if __name__ == "__main__":
    loss_benchmark(
        "lateness",
        "Measure the final held-out loss with staleness 1, compared with staleness 0.",
        measure,
        lateness_markdown,
    )()
