"""Measures one mix of machines: builds its network, checks it, and runs the contenders in turn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks.wan.contenders.field import COORDINATOR, TRAINER, Field
from benchmarks.wan.contenders.running import CONTENDERS
from benchmarks.wan.fleet import assign, sizes_of
from benchmarks.wan.links.check import LinkCheck, check_links
from benchmarks.wan.links.check import render as render_checks
from benchmarks.wan.links.network import Network, wide_area_network
from benchmarks.wan.links.traffic import Recorder
from benchmarks.wan.mixes import Link, Mix, Training
from benchmarks.wan.proportions import REFERENCE, proportions_of, reference_proportions
from benchmarks.wan.report import mix_document, result_row
from benchmarks.wan.templates import Templates
from swarm_shared.base.errors import SwarmError

CHECKS = 3
"""Maximum number of link checks before a mix is abandoned."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Settings of the measurement, the same for every mix."""

    contenders: tuple[str, ...]
    steps: int
    warmup: int
    cooldown: int
    repetitions: int
    check: bool


def measure_mix(mix: Mix, server: Link, plan: Plan, work: Path) -> dict[str, Any]:
    """Measure one mix; `server` is the coordinator's link."""
    with open_field(mix, server, plan, work) as (field, checks):
        rows = _take_turns(field, plan, work)
    counts = field.network.forwarder_counts()
    document = mix_document(mix, field.members, field.sizes, checks, rows, counts)
    if mix.training != Training():
        document["training"] = training_document(mix, field)
    return document


@contextmanager
def open_field(
    mix: Mix, server: Link, plan: Plan, work: Path
) -> Iterator[tuple[Field, list[LinkCheck]]]:
    """Yield the mix's network with the results of its link checks; remove it afterwards."""
    templates = Templates(work / "templates", plan.steps, mix.training)
    manifest = templates.manifest()
    sizes = sizes_of(manifest)
    members = assign(mix, sizes.work_flops)
    links = {member.name: member.peer.link for member in members}
    links[COORDINATOR] = server
    links[TRAINER] = max((peer.link for peer in mix.peers), key=lambda link: link.up_mbit)
    click.echo(f"\n{mix.name}: {len(members)} machines")
    with wide_area_network(links, work) as network:
        checks = _checked(network) if plan.check else []
        ordered = tuple(sorted(members, key=lambda one: (one.stage, one.name)))
        yield Field(network, ordered, templates, sizes, plan.steps), checks


def training_document(mix: Mix, field: Field) -> dict[str, Any]:
    """Return what the mix trains, and its proportions beside those of the reference."""
    training = mix.training
    slowest = min(peer.link.up_bytes_per_second for peer in mix.peers)
    own = proportions_of(field.sizes, training.microbatch_seconds, slowest)
    return {
        **training.model_dump(),
        # As JSON has it, so that it equals what `--add` reads.
        "model": field.templates.manifest().model.model_dump(mode="json"),
        "proportions": asdict(own),
        "reference": {"preset": REFERENCE, **asdict(reference_proportions())},
    }


def _checked(network: Network) -> list[LinkCheck]:
    """Return the measured links; repeat the check on a deviation, because a momentary load delays
    a ping by more than the tolerance."""
    wrong: list[str] = []
    for _ in range(CHECKS):
        checks = check_links(network)
        click.echo(render_checks(checks))
        wrong = [text for one in checks for text in one.complaints()]
        if not wrong:
            return checks
        click.echo(f"links deviate: {'; '.join(wrong)}")
    raise SwarmError(
        f"the emulated links deviate, {CHECKS} times in a row: {'; '.join(wrong)}. Is something "
        "else running on this machine?"
    )


def _take_turns(field: Field, plan: Plan, work: Path) -> dict[str, list[dict[str, Any]]]:
    rows: dict[str, list[dict[str, Any]]] = {}
    for name in plan.contenders:
        if (reason := CONTENDERS[name].why_not(field)) is None:
            rows[name] = []
        else:
            click.echo(f"{CONTENDERS[name].title}: omitted, {reason}")
    for repetition in range(1, plan.repetitions + 1):
        for name, runs in rows.items():
            place = work / f"{name}-{repetition}"
            place.mkdir(parents=True)
            with Recorder(field.network) as recorder:
                outcome = CONTENDERS[name].run(field, place)
            field.network.end_programs()
            row = result_row(outcome, plan.warmup, plan.cooldown, recorder.samples)
            runs.append(row)
            shutil.rmtree(place)
            click.echo(
                f"{repetition}/{plan.repetitions}  {CONTENDERS[name].title:<42}"
                f"{row['tokens_per_second']:>8,.0f} tokens/s  loss {row['losses'][-1]:.4f}"
            )
    return rows
