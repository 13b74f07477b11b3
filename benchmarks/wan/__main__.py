"""Training over an emulated wide-area network, by contender: `make bench-wan`, as root.

All contenders have the same model, data, machines and links; iperf3 and ping check the links first;
repetitions are interleaved, so that a slowdown of the machine affects all contenders. All emulated
machines share this machine's cores: each computes at its own pace (`benchmarks.instruments.pace`),
slow enough for the cores (see `busy cores` in the table). Nothing else should run meanwhile.
docs/benchmarks.md describes the comparison.
"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import click

from benchmarks.outcome import (
    exit_if,
    now,
    out_option,
    refuse_other_losses,
    result_head,
    work_folder,
    write_result,
)
from benchmarks.wan.contenders.running import CONTENDERS
from benchmarks.wan.kept import added, kept_mixes
from benchmarks.wan.measure import Plan, measure_mix
from benchmarks.wan.mixes import MIXES, Training, read_mixes
from benchmarks.wan.page import wan_markdown
from benchmarks.wan.templates import CHANGES, PRESET, Templates
from kits.network_lab import LabError
from swarm_shared.base.errors import SwarmError

PACKAGES = ("torch", "libp2p", "hivemind", "trio", "swarmtrain")
SERVER = "server"
"""Name of the coordinator's link in the file of mixes."""


@click.command()
@click.option("--mix", "mixes", multiple=True, help="Mixes to measure; repeatable; default: all.")
@click.option("--only", multiple=True, type=click.Choice(list(CONTENDERS)), help="Repeatable.")
@click.option(
    "--steps", default=6, show_default=True, type=click.IntRange(2), help="Steps per run."
)
@click.option("--warmup", default=2, show_default=True, type=click.IntRange(1))
@click.option("--cooldown", default=1, show_default=True, type=click.IntRange(0),
              help="Steps at the end that are not measured.")  # fmt: skip
@click.option("--repetitions", default=3, show_default=True, type=click.IntRange(1))
@click.option("--check/--no-check", default=True, help="Measure the links first.")
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the result's other mixes, if their settings are the same.",
)
@click.option(
    "--add",
    is_flag=True,
    help="Like --keep, and add the repetitions to those of mixes in the result.",
)
@click.option("--file", "mix_file", default=MIXES, type=click.Path(path_type=Path))
@out_option("wan.json")
def main(
    mixes: tuple[str, ...], only: tuple[str, ...], steps: int, warmup: int, cooldown: int,
    repetitions: int, check: bool, keep: bool, add: bool, mix_file: Path, out: Path,
) -> None:  # fmt: skip
    """Measure the swarm and its opponents over emulated links."""
    if warmup + cooldown >= steps:
        raise click.UsageError("--steps must exceed --warmup and --cooldown together")
    # SIGTERM tears everything down like Ctrl-C.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load_before = os.getloadavg()[0]
    chosen = tuple(name for name in CONTENDERS if not only or name in only)
    plan = Plan(chosen, steps, warmup, cooldown, repetitions, check)
    with work_folder("wan", LabError) as work:
        file = read_mixes(mix_file)
        usual = Training()  # a mix with another one says so in its own document
        model = Templates(work / "usual", steps, usual).manifest().model
        server = file.link(SERVER)
        found: dict[str, Any] = {}
        document = {
            **result_head(PACKAGES),
            "load_before": load_before,
            "preset": PRESET, "changes": CHANGES,
            "model": model.model_dump(), "stages": usual.stages,
            "steps": steps, "warmup_steps": warmup, "cooldown_steps": cooldown,
            "repetitions": repetitions, "microbatches_per_step": usual.microbatches_per_step,
            "microbatch_seconds": usual.microbatch_seconds,
            "contenders": {name: CONTENDERS[name].title for name in chosen},
            "mixes": found,
        }  # fmt: skip
        if (keep or add) and out.exists():
            before = json.loads(out.read_text())
            found |= kept_mixes(before, document)
            document["contenders"] = before["contenders"] | document["contenders"]
        missing: list[str] = []
        for name in mixes or tuple(file.mixes):
            try:
                began = {"measured_at": now(), "load_before": os.getloadavg()[0]}
                mix = measure_mix(file.mix(name), server, plan, work / name)
                mix = {**began, **mix}
                found[name] = added(found[name], mix) if add and name in found else mix
            except SwarmError as error:
                missing.append(name)
                click.echo(f"benchmark: {name} is omitted: {error}", err=True)
                continue
            # Write after every mix, so that a failure of the next one loses nothing.
            write_result(out, document)
    click.echo(f"\n{wan_markdown(document)}")
    click.echo(f"\nwritten to {out}")
    refuse_other_losses(
        [
            f"{name}: {mix['loss_disagreement']}"
            for name, mix in found.items()
            if mix["loss_disagreement"]
        ]
    )
    exit_if([f"not measured: {', '.join(missing)}"] if missing else [])


if __name__ == "__main__":
    main()
