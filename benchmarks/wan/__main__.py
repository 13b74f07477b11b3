"""Training over an emulated wide-area network, side by side: `make bench-wan`, as root.

Every contender gets the same model, data, machines and lines; the lines are checked with iperf3 and
ping first; repetitions take turns, so that a machine that slows down slows everybody down. All
machines share this one's cores: they compute at a pace of their own (`swarm_client.worker.pace`),
slow enough that the cores carry all of them. Nothing else should run meanwhile.
"""

from __future__ import annotations

import datetime
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.machine import describe_machine
from benchmarks.wan.check import LinkCheck, check_links
from benchmarks.wan.check import render as render_checks
from benchmarks.wan.contenders import CONTENDERS
from benchmarks.wan.field import COORDINATOR, TRAINER, Field
from benchmarks.wan.fleet import assign, sizes_of
from benchmarks.wan.mixes import MIXES, Mix, MixFile, read_mixes
from benchmarks.wan.network import wide_area_network
from benchmarks.wan.report import mix_document, render, result_row
from benchmarks.wan.traffic import Recorder
from network_lab import LabError
from swarm_coordinator.initialise_run import initialise_run
from swarm_shared.errors import SwarmError
from swarm_shared.manifest import Manifest

RESULT = Path(__file__).parents[1] / "results" / "wan.json"
PACKAGES = ("torch", "libp2p", "hivemind", "trio", "swarmtrain")
STAGES = 4
PRESET = "tiny"
MODEL = {
    "model.layers": 8, "training.sequences_per_microbatch": 4,
    "training.evaluation_microbatches": 0,
}  # fmt: skip
"""Eight layers, so that every one of four machines can hold two chunks (interleaved 1F1B)."""


@click.command()
@click.option("--mix", "mixes", multiple=True, help="Repeatable; default: all.")
@click.option("--only", multiple=True, type=click.Choice(list(CONTENDERS)), help="Repeatable.")
@click.option("--steps", default=5, show_default=True, type=click.IntRange(2), help="Per run.")
@click.option("--warmup", default=2, show_default=True, type=click.IntRange(1))
@click.option("--repetitions", default=3, show_default=True, type=click.IntRange(1))
@click.option("--seconds", default=0.25, show_default=True, type=click.FloatRange(0.01),
              help="An ordinary machine computes a stage's microbatch for so long.")  # fmt: skip
@click.option("--microbatches", default=16, show_default=True, type=click.IntRange(1),
              help="Of a step.")  # fmt: skip
@click.option("--check/--no-check", default=True, help="Measure the lines first.")
@click.option("--file", "mix_file", default=MIXES, type=click.Path(path_type=Path))
@click.option("--out", default=RESULT, show_default=True, type=click.Path(path_type=Path))
def main(
    mixes: tuple[str, ...], only: tuple[str, ...], steps: int, warmup: int, repetitions: int,
    seconds: float, microbatches: int, check: bool, mix_file: Path, out: Path,
) -> None:  # fmt: skip
    """Measure the swarm and its opponents over emulated lines."""
    if warmup >= steps:
        raise click.UsageError("--steps must be more than --warmup, or nothing is measured")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load_before = os.getloadavg()[0]
    chosen = [name for name in CONTENDERS if not only or name in only]
    work = Path(tempfile.mkdtemp(prefix="swarm-bench-wan-"))
    try:
        file = read_mixes(mix_file)
        templates, manifest = make_templates(work, steps, microbatches)
        found = {
            name: measure_mix(
                file, file.mix(name), templates, manifest, work / name, chosen, steps, warmup,
                repetitions, seconds, check=check,
            )
            for name in (mixes or tuple(file.mixes))
        }  # fmt: skip
    except (SwarmError, LabError) as error:
        click.echo(f"benchmark: {error}\n(everything it wrote is in {work})", err=True)
        sys.exit(1)
    shutil.rmtree(work)
    document = {
        "version": 1,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(PACKAGES),
        "load_before": load_before,
        "preset": PRESET, "changes": MODEL, "model": manifest.model.model_dump(),
        "stages": STAGES, "steps": steps, "warmup_steps": warmup, "repetitions": repetitions,
        "microbatches_per_step": microbatches, "microbatch_seconds": seconds,
        "contenders": {name: CONTENDERS[name].title for name in chosen},
        "mixes": found,
    }  # fmt: skip
    click.echo(f"\n{render(document)}")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(document, indent=1) + "\n")
    click.echo(f"\nwritten to {out}")
    if disagreements := [f"{n}: {m['loss_disagreement']}" for n, m in found.items()
                         if m["loss_disagreement"]]:  # fmt: skip
        click.echo(f"benchmark: the losses disagree: {'; '.join(disagreements)}", err=True)
        sys.exit(1)


def make_templates(work: Path, steps: int, microbatches: int) -> tuple[dict[int, Path], Manifest]:
    """Run folders of as many stages as machines, and of twice as many; the former's manifest."""
    templates: dict[int, Path] = {}
    manifests: list[Manifest] = []
    for stages in (STAGES, 2 * STAGES):
        templates[stages] = work / f"template-{stages}"
        changes = {
            **MODEL, "training.microbatches_per_step": microbatches, "training.steps": steps,
            "run.name": "wan", "checkpoint.every_steps": steps,
            "network.listen_host": "0.0.0.0", "rebalancing.rule": "none",
        }  # fmt: skip
        manifests.append(initialise_run(templates[stages], PRESET, stages=stages,
                                        overrides=changes))  # fmt: skip
    return templates, manifests[0]


def measure_mix(
    file: MixFile, mix: Mix, templates: Mapping[int, Path], manifest: Manifest, work: Path,
    chosen: list[str], steps: int, warmup: int, repetitions: int, seconds: float, *, check: bool,
) -> dict[str, Any]:  # fmt: skip
    members = assign(mix, STAGES, [stage.work_flops for stage in manifest.stages], seconds)
    links = {member.name: member.peer.link for member in members}
    links[COORDINATOR] = file.links["server"]
    links[TRAINER] = max((peer.link for peer in mix.peers), key=lambda link: link.up_mbit)
    click.echo(f"\n{mix.name}: {len(members)} machines")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in chosen}
    checks: list[LinkCheck] = []
    with wide_area_network(links, work) as network:
        if check:
            checks = check_links(network)
            click.echo(render_checks(checks))
            if wrong := [text for one in checks for text in one.complaints()]:
                raise SwarmError(f"the emulated network is not as asked: {'; '.join(wrong)}")
        field = Field(
            network, tuple(sorted(members, key=lambda one: (one.stage, one.name))), templates,
            STAGES, steps,
        )  # fmt: skip
        can = {name: CONTENDERS[name].why_not(field) for name in chosen}
        for name in [name for name in chosen if can[name] is not None]:
            click.echo(f"{CONTENDERS[name].title}: not here, {can[name]}")
            del rows[name]
        for repetition in range(1, repetitions + 1):
            for name in rows:
                place = work / f"{name}-{repetition}"
                place.mkdir(parents=True)
                with Recorder(network) as recorder:
                    timed = CONTENDERS[name].run(field, place)
                row = result_row(timed, warmup, recorder.samples)
                rows[name].append(row)
                shutil.rmtree(place)
                click.echo(
                    f"{repetition}/{repetitions}  {CONTENDERS[name].title:<42}"
                    f"{row['tokens_per_second']:>8,.0f} tokens/s  loss {timed[-1].loss:.4f}"
                )
    sizes = sizes_of(manifest, parameter_counts(manifest))
    return mix_document(mix, members, sizes, checks, rows)


def parameter_counts(manifest: Manifest) -> list[int]:
    """Of each stage; counted without taking their memory."""
    from swarm_shared.model.gradients import FlatLayout
    from swarm_shared.model.initialise import build_stage

    return [
        FlatLayout.of(build_stage(manifest, index, "meta")).count
        for index in range(manifest.stage_count)
    ]


if __name__ == "__main__":
    main()
