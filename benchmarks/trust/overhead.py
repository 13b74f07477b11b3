"""What verified work costs in throughput: `make bench-trust`.

Real runs of two stages with two volunteers each, with audits and checks of sums off, at 2 % of the
cells, and at the share of owners on probation: over loopback, and as root over emulated cable.
Repetitions are interleaved, so that a slowdown of the machine affects all of them; results are
medians. All runs must have the same losses, because audits never change a value. Tokens over
seconds of the steps after the first. Nothing else should run on the machine meanwhile.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.outcome import (
    conclude,
    out_option,
    refuse_other_losses,
    result_head,
    work_folder,
    write_result,
)
from benchmarks.run_data import (
    PLAIN_BORDERS,
    TimedStep,
    loss_disagreement,
    preset_sizes,
    timed_steps,
)
from benchmarks.throughput.__main__ import tokens_per_second
from benchmarks.trust.overhead_page import overhead_markdown
from benchmarks.wan.links.network import why_no_network, wide_area_network
from benchmarks.wan.mixes import read_mixes
from kits.network_lab import LabError
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.records import read_standings
from swarm_shared.run.model_config import PRESETS

PACKAGES = ("torch", "numpy", "libp2p", "hivemind", "swarmtrain")

STAGES = 2
PEERS_PER_STAGE = 2
MICROBATCHES = 64
"""Of a step, which then takes 2 s over loopback and 8 s over cable: a check of sums costs two round
trips a step, however long that is."""
LOOPBACK, CABLE = "loopback", "cable"
"""Names of the lines; CABLE is a link of `benchmarks/wan/mixes.toml`."""

SETTINGS: Mapping[str, Mapping[str, object]] = {
    "off": {"trust.audit_share": 0.0, "trust.probation_cells": 0, "trust.check_sums": False},
    "2 %": {"trust.audit_share": 0.02, "trust.probation_cells": 0},
    "probation": {"trust.audit_share": 0.02, "trust.probation_cells": 1_000_000},
}
"""Settings of each row; on probation a quarter of the cells is audited."""

NAMES = {
    "off": "no audits, sums unchecked",
    "2 %": "2 % of the cells, as of established owners",
    "probation": "a quarter of the cells, as on probation",
}


@click.command()
@click.option("--steps", default=5, show_default=True, type=click.IntRange(3), help="Per run.")
@click.option("--repetitions", default=3, show_default=True, type=click.IntRange(1))
@click.option("--preset", default="tiny", show_default=True, type=click.Choice(list(PRESETS)),
              help="Over loopback; cable lines carry `tiny`.")  # fmt: skip
@click.option("--line", "lines", multiple=True, type=click.Choice([LOOPBACK, CABLE]),
              help="Repeatable; default: all.")  # fmt: skip
@out_option("trust-overhead.json")
def main(steps: int, repetitions: int, preset: str, lines: tuple[str, ...], out: Path) -> None:
    """Measure tokens/s with and without verified work."""
    found: dict[str, Any] = {}
    document = {
        **result_head(PACKAGES), "load_average": os.getloadavg(), "steps": steps,
        "repetitions": repetitions, "stages": STAGES,
        "peers_per_stage": PEERS_PER_STAGE, "lines": found,
    }  # fmt: skip
    with work_folder("trust", LabError) as work:
        for line in lines or (LOOPBACK, CABLE):
            reason = why_no_network() if line == CABLE else None
            if reason is not None:
                click.echo(f"{line}: omitted, {reason}")
                continue
            found[line] = measure(
                line, preset if line == LOOPBACK else "tiny", steps, repetitions, work / line
            )
            write_result(out, document)
    conclude(out, document, overhead_markdown)
    refuse_other_losses([one["loss_disagreement"] for one in found.values()])


def measure(line: str, preset: str, steps: int, repetitions: int, work: Path) -> dict[str, Any]:
    """Interleaved repetitions of all settings over one kind of line."""
    work.mkdir()
    rates: dict[str, list[float]] = {name: [] for name in SETTINGS}
    audits: dict[str, list[int]] = {name: [] for name in SETTINGS}
    losses: dict[str, list[list[float]]] = {name: [] for name in SETTINGS}
    for name, settings in SETTINGS.items():
        initialise_run(work / f"template {name}", preset, stages=STAGES, overrides={
            "training.steps": steps, "training.evaluation_microbatches": 0,
            "run.name": "benchmark", "network.listen_host": "0.0.0.0",
            "rebalancing.rule": "none",
            "limits.starting_peers_per_stage": PEERS_PER_STAGE,
            **PLAIN_BORDERS, **preset_sizes(preset),
            "training.microbatches_per_step": MICROBATCHES, **settings,
        })  # fmt: skip
    with machines(line, work) as prefixes:
        for repetition in range(1, repetitions + 1):
            for name in SETTINGS:
                place = work / f"{name} {repetition}"
                shutil.copytree(work / f"template {name}", place)
                timed = train(place, prefixes)
                rates[name].append(tokens_per_second(timed[1:]))
                losses[name].append([step.loss for step in timed])
                audits[name].append(_audits_passed(place))
                shutil.rmtree(place)
                click.echo(
                    f"{line} {repetition}/{repetitions}  {NAMES[name]:<45}"
                    f"{rates[name][-1]:>10,.0f} tokens/s, {audits[name][-1]} audits"
                )
    return {
        "preset": preset, "cells": steps * MICROBATCHES * STAGES,
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


@contextmanager
def machines(line: str, work: Path) -> Iterator[Sequence[tuple[str, ...]]]:
    """Yield the command prefixes of the coordinator's machine and of each volunteer's."""
    names = [f"peer-{number}" for number in range(STAGES * PEERS_PER_STAGE)]
    if line == LOOPBACK:
        yield [()] * (1 + len(names))
        return
    file = read_mixes()
    links = {"coordinator": file.link("server"), **dict.fromkeys(names, file.link(CABLE))}
    with wide_area_network(links, work) as network:
        yield [network.hosts[name].prefix for name in links]


def train(run_dir: Path, prefixes: Sequence[tuple[str, ...]]) -> Sequence[TimedStep]:
    """Train a run to its end; volunteers take the stages in turn."""
    with Subprocesses() as children:
        swarm = LocalSwarm(run_dir, children)
        swarm.prefix = prefixes[0]
        invite = swarm.start_coordinator()
        for number, prefix in enumerate(prefixes[1:]):
            swarm.prefix = prefix
            swarm.start_volunteer(invite, stage=number % STAGES)
        finished = swarm.watch()
        swarm.wait_for_exit()
    return timed_steps(finished)


def _audits_passed(run_dir: Path) -> int:
    with open_for_reading(RunFolder.open(run_dir).database) as connection:
        return sum(standing.passed for standing in read_standings(connection))


if __name__ == "__main__":
    main()
