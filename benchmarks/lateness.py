"""What gradients that are one version late cost in loss: `make bench-lateness`.

Trains one small model as `swarm-coordinator reference` does, with staleness 0 and 1 (decision
0024), with several seeds and learning rates: a delay does more harm the further a step goes.
A swarm of the same manifest computes the same (tests/integration/test_staleness.py). Runs of one
seed have the same initial values and the same data; model and data are those of
`benchmarks.quality`.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from benchmarks.outcome import result_head, write_result
from benchmarks.quality import PACKAGES, RESULTS, SETTINGS, STAGES, final_loss, gap_of, opened
from swarm_coordinator.initialise_run import initialise_run
from swarm_shared.manifest import Manifest

RATES = (1e-3, 3e-3)
"""The first is that of `benchmarks.quality`."""


@click.command()
@click.option("--steps", type=click.IntRange(2), default=120, show_default=True)
@click.option("--seeds", type=click.IntRange(2), default=3, show_default=True)
@click.option(
    "--out", type=click.Path(path_type=Path, dir_okay=False), default=RESULTS / "lateness.json"
)
def main(steps: int, seeds: int, out: Path) -> None:
    """Final held-out loss with late gradients, against prompt ones."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        initialise_run(
            run_dir, "tiny", stages=STAGES, overrides={**SETTINGS, "training.steps": steps}
        )
        document = measure(run_dir, range(1, seeds + 1))
    write_result(out, document)
    click.echo(lateness_markdown(document))


def measure(run_dir: Path, seeds: Sequence[int]) -> dict[str, Any]:
    manifest, train, heldout = opened(run_dir)
    began, load_before = time.monotonic(), os.getloadavg()[0]
    losses: dict[tuple[float, int], list[float]] = {}
    for seed in seeds:
        for rate in RATES:
            for staleness in (0, 1):
                one = _one_of(manifest, seed, rate, staleness)
                found = final_loss(one, train, heldout)
                losses.setdefault((rate, staleness), []).append(found)
                click.echo(
                    f"seed {seed}, rate {rate:g}, staleness {staleness}: {found:.4f}", err=True
                )
    return {
        **result_head(PACKAGES),
        "load_before": load_before,
        "seconds": time.monotonic() - began,
        "settings": SETTINGS,
        "steps": manifest.training.steps,
        "tokens_per_step": manifest.tokens_per_step,
        "seeds": list(seeds),
        "rates": [
            {
                "learning_rate": rate,
                "prompt": losses[rate, 0],
                "noise": statistics.stdev(losses[rate, 0]),
                "late": gap_of(losses[rate, 1], losses[rate, 0]),
            }
            for rate in RATES
        ],
    }


def _one_of(manifest: Manifest, seed: int, rate: float, staleness: int) -> Manifest:
    training = manifest.training.model_copy(update={"seed": seed, "staleness": staleness})
    optimizer = manifest.optimizer.model_copy(update={"learning_rate": rate})
    return manifest.model_copy(update={"training": training, "optimizer": optimizer})


def lateness_markdown(document: Mapping[str, Any]) -> str:
    """A row per learning rate."""
    lines = [
        f"{document['measured_at'][:10]}: {document['steps']} steps of "
        f"{document['tokens_per_step']:,} tokens, the model and the data of the codecs' table, "
        f"{len(document['seeds'])} seeds. Losses are held-out, in nats per token.",
        "",
        "| learning rate | staleness 0 | staleness 1 | gap, mean | its spread "
        "| noise from seed to seed |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for one in document["rates"]:
        late = one["late"]
        lines.append(
            f"| {one['learning_rate']:g} | {statistics.mean(one['prompt']):.4f} "
            f"| {statistics.mean(late['losses']):.4f} "
            f"| {late['gap_mean']:+.4f} ({100 * late['gap_relative']:+.2f}%) "
            f"| {late['gap_spread']:.4f} | {one['noise']:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
