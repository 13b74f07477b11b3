"""What audits cost in throughput: `make bench-trust`.

Real runs of two stages with two volunteers each on this machine, with audits off, at 2 % of the
cells, and at the share of owners on probation. Repetitions are interleaved, so that a slowdown of
the machine affects all of them; results are medians. All runs must have the same losses, because
audits never change a value. Tokens over seconds of the steps after the first. Nothing else should
run on the machine meanwhile.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.contenders import Contender, run_contender
from benchmarks.markdown import markdown_table
from benchmarks.outcome import result_head, work_folder, write_result
from benchmarks.run_data import PLAIN_BORDERS, loss_disagreement
from benchmarks.throughput import tokens_per_second
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.records import read_standings
from swarm_shared.run.model_config import PRESETS

RESULT = Path(__file__).parent / "results" / "trust-overhead.json"
PACKAGES = ("torch", "numpy", "libp2p", "hivemind", "swarmtrain")

SWARM = Contender("swarm, 2 stages x 2 peers", 2, 4, 1)

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "off": {"trust.audit_share": 0.0, "trust.probation_cells": 0},
    "2 %": {"trust.audit_share": 0.02, "trust.probation_cells": 0},
    "probation": {"trust.audit_share": 0.02, "trust.probation_cells": 1_000_000},
}
"""`[trust]` of each row; on probation a quarter of the cells is audited."""

NAMES = {
    "off": "no audits",
    "2 %": "2 % of the cells, as of established owners",
    "probation": "a quarter of the cells, as on probation",
}


@click.command()
@click.option("--steps", default=8, show_default=True, type=click.IntRange(3), help="Per run.")
@click.option("--repetitions", default=5, show_default=True, type=click.IntRange(1))
@click.option("--preset", default="small", show_default=True, type=click.Choice(list(PRESETS)))
@click.option("--out", type=click.Path(path_type=Path), default=RESULT)
def main(steps: int, repetitions: int, preset: str, out: Path) -> None:
    """Measure tokens/s with and without audits."""
    rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
    audits: dict[str, list[int]] = {name: [] for name in SETTINGS}
    losses: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
    with work_folder("trust") as work:
        for name, settings in SETTINGS.items():
            initialise_run(work / f"template {name}", preset, stages=SWARM.stages, overrides={
                "training.steps": steps, "training.evaluation_microbatches": 0,
                "run.name": "benchmark", "network.listen_host": "127.0.0.1",
                "limits.starting_peers_per_stage": 2, **PLAIN_BORDERS, **settings,
            })  # fmt: skip
        for repetition in range(1, repetitions + 1):
            for name in SETTINGS:
                place = work / f"{name} {repetition}"
                timed = run_contender(SWARM, work / f"template {name}", place, steps)
                rates[name].append(tokens_per_second(timed[1:]))
                losses[name].append([step.loss for step in timed])
                audits[name].append(_audits_passed(place / "run"))
                shutil.rmtree(place)
                click.echo(
                    f"{repetition}/{repetitions}  {NAMES[name]:<45}{rates[name][-1]:>10,.0f} "
                    f"tokens/s, {audits[name][-1]} audits"
                )
    document = {
        **result_head(PACKAGES), "load_average": os.getloadavg(), "preset": preset,
        "steps": steps, "repetitions": repetitions,
        "cells": steps * PRESETS[preset].microbatches_per_step * SWARM.stages,
        "rows": {
            name: {
                "name": NAMES[name], "tokens_per_second_median": median(rates[name]),
                "tokens_per_second_all": rates[name], "audits_passed": audits[name],
                "over_none": median(
                    rate / without for rate, without in zip(rates[name], rates["off"], strict=True)
                ),
            }
            for name in SETTINGS
        },
        "loss_disagreement": loss_disagreement(losses),
    }  # fmt: skip
    write_result(out, document)
    click.echo(f"\n{overhead_markdown(document)}\n\nwritten to {out}")
    if disagreement := document["loss_disagreement"]:
        click.echo(f"benchmark: the losses disagree: {disagreement}", err=True)
        sys.exit(1)


def _audits_passed(run_dir: Path) -> int:
    with open_for_reading(RunFolder.open(run_dir).database) as connection:
        return sum(standing.passed for standing in read_standings(connection))


def overhead_markdown(document: Mapping[str, Any]) -> str:
    """Throughput with audits over that without."""
    machine = document["machine"]
    rows = [
        (
            row["name"], f"{median(row['audits_passed']):.0f} of {document['cells']}",
            f"{row['tokens_per_second_median']:,.0f}", f"{row['over_none']:.2f}",
            f"{min(row['tokens_per_second_all']):,.0f} to {max(row['tokens_per_second_all']):,.0f}",
        )
        for row in document["rows"].values()
    ]  # fmt: skip
    head = (
        f"Medians of {document['repetitions']} interleaved repetitions of {document['steps']} "
        f"steps, {document['measured_at'][:10]}, {machine['cpu_count']} cores "
        f"({machine['processor']}), load average {document['load_average'][0]:.1f}. Preset "
        f"`{document['preset']}`, {SWARM.name}, over loopback."
    )
    columns = ("audited", "audits passed", "tokens/s", "over no audits", "range of tokens/s")
    return "\n".join([head, "", *markdown_table(columns, "lrrrr", rows)])


if __name__ == "__main__":
    main()
