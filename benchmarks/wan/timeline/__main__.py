"""Breakdown of step time over emulated links: `make bench-wan-timeline`, as root.

Runs the swarm of bench-wan in each selected configuration with a recorder inside every volunteer
(`recorder`), then divides each machine's steps into parts (`account`).
"""

from __future__ import annotations

import json
import os
import signal
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from benchmarks.instruments.inside import prefix_of
from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.wan.contenders.field import Field
from benchmarks.wan.contenders.running import swarm
from benchmarks.wan.fleet import Member
from benchmarks.wan.measure import Plan, open_field
from benchmarks.wan.mixes import MIXES, read_mixes
from benchmarks.wan.templates import CHANGES, PRESET
from benchmarks.wan.timeline.account import Event, by_stage, machine_account, travels
from benchmarks.wan.timeline.page import timeline_markdown
from kits.network_lab import LabError
from swarm_shared.base.errors import SwarmError
from swarm_shared.run.codec_sizes import ActivationCodec

PACKAGES = ("torch", "libp2p", "hivemind", "trio", "swarmtrain")
RECORDER = "benchmarks.wan.timeline.recorder"
WARMUP, COOLDOWN = 2, 1
"""Steps at both ends that are not measured, as in bench-wan."""

WAYS: dict[str, tuple[str, ActivationCodec, int]] = {
    "float32": ("float32", "none", 0),
    "int8": ("int8", "int8", 0),
    "late-float32": ("float32, staleness 1", "none", 1),
    "late-int8": ("int8, staleness 1", "int8", 1),
}


@click.command()
@click.option("--mix", "mixes", multiple=True, default=("cable",), show_default=True)
@click.option(
    "--way",
    "ways",
    multiple=True,
    type=click.Choice(list(WAYS)),
    help="Configurations; repeatable; default: all.",
)
@click.option("--steps", default=6, show_default=True, type=click.IntRange(WARMUP + COOLDOWN + 1))
@out_option("wan-timeline.json")
def main(mixes: tuple[str, ...], ways: tuple[str, ...], steps: int, out: Path) -> None:
    """Account for every second of a step at every machine."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load_before = os.getloadavg()[0]
    plan = Plan((), steps, WARMUP, COOLDOWN, 1, check=True)
    file = read_mixes(MIXES)
    found: dict[str, Any] = {}
    with work_folder("timeline", LabError) as work:
        for name in mixes:
            place = work / name
            server = file.link("server")
            with open_field(file.mix(name), server, plan, place) as (field, _):
                found[name] = {
                    way: _profile(field, place / way, WAYS[way]) for way in ways or tuple(WAYS)
                }
    document = {
        **result_head(PACKAGES), "load_before": load_before, "preset": PRESET, "changes": CHANGES,
        "steps": steps, "warmup_steps": WARMUP, "cooldown_steps": COOLDOWN, "mixes": found,
        "trainings": {name: file.mix(name).training.model_dump() for name in mixes},
    }  # fmt: skip
    conclude(out, document, timeline_markdown)


def _profile(field: Field, place: Path, way: tuple[str, ActivationCodec, int]) -> dict[str, Any]:
    title, codec, staleness = way
    records = place / "records"
    records.mkdir(parents=True)
    outcome = swarm(
        field, place, codec=codec, staleness=staleness,
        volunteer_prefix=prefix_of(RECORDER, records),
    )  # fmt: skip
    field.network.end_programs()
    machines = [
        [Event(*event) for event in json.loads(path.read_text())]
        for path in sorted(records.glob("*.json"))
    ]
    machines = [events for events in machines if any(e.what == "apply" for e in events)]
    if len(machines) != len(field.members):
        raise SwarmError(f"{len(field.members)} volunteers left {len(machines)} records")
    last = len(outcome.steps) - COOLDOWN
    measured = range(WARMUP + 1, last + 1)
    timed = outcome.steps
    click.echo(f"{title}: {sum(one.seconds for one in timed[WARMUP:last]):.1f} s measured")
    return {
        "title": title,
        "step_seconds": (timed[last - 1].ended_at - timed[WARMUP - 1].ended_at) / len(measured),
        "stages": [
            by_stage(
                [
                    machine_account(events, measured)
                    for events in machines
                    if _stage(events) == stage
                ]
            )
            for stage in range(field.stages)
        ],
        "borders": [
            {
                **{
                    way: sorted(seconds)
                    for way, seconds in asdict(travels(machines, stage, measured)).items()
                },
                "least_seconds": _least(field, stage, codec),
            }
            for stage in range(field.stages - 1)
        ],
    }


def _stage(events: list[Event]) -> int:
    return next(e.stage for e in events if e.what == "apply")


def _least(field: Field, stage: int, codec: ActivationCodec) -> list[float]:
    """Return the link's own seconds for an activation over this boundary and a gradient back."""
    there = [one for one in field.members if one.stage == stage]
    beyond = [one for one in field.members if one.stage == stage + 1]
    return [
        min(_crossing(field, a, b, codec) for a in sources for b in targets)
        for sources, targets in ((there, beyond), (beyond, there))
    ]


def _crossing(field: Field, source: Member, target: Member, codec: ActivationCodec) -> float:
    up, down = source.peer.link, target.peer.link
    size = field.sizes.border_bytes / (4 if codec == "int8" else 1)
    rate = min(up.up_bytes_per_second, down.down_bytes_per_second)
    return size / rate + (up.rtt_ms + down.rtt_ms) / 2 / 1000


if __name__ == "__main__":
    main()
