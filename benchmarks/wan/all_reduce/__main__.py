"""All-reduce of a stage's gradients over emulated links, with its bound: `make bench-all-reduce`.

Real runs of one stage: a coordinator, and members that hold the same stage and average at the end
of every step, each behind its own link. The time runs from the first member's start to the last
one's end (`timeline.recorder`, inside each of them). The bound is 2(n-1)/n times the float32
gradient over the slower direction of the link, the minimum for an all-reduce of n equal members
(Patarasuk & Yuan 2009, doi 10.1016/j.jpdc.2008.09.002). With different links, slow uplinks may
reduce less, and the bound is that of the best division. Such groups are also measured with equal
shares. Their volunteers have a configured upload rate, because a run of one stage has no other
traffic from which to estimate it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, get_args

import click

from benchmarks.instruments.handicap import EQUAL_SHARES_VARIABLE
from benchmarks.instruments.inside import prefix_of
from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.run_data import PLAIN_BORDERS
from benchmarks.wan.all_reduce.averaging import all_reduce_markdown, bound_seconds, step_seconds
from benchmarks.wan.links.check import check_links, render
from benchmarks.wan.links.network import Network, wide_area_network
from benchmarks.wan.mixes import MIXES, Link, read_mixes
from kits.network_lab import LabError
from swarm_coordinator.demo.local_swarm import LocalSwarm
from swarm_coordinator.demo.subprocesses import Subprocesses
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_shared.run.codec_sizes import AverageCodec
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

PACKAGES = ("torch", "libp2p", "hivemind", "trio", "swarmtrain")
COORDINATOR = "coordinator"
RECORDER = "benchmarks.wan.timeline.recorder"
STEPS = 7
WARMUP = 2
"""Leading steps that are not measured: the first all-reduce opens connections and estimates link
rates."""

SETTINGS = {
    **PLAIN_BORDERS,
    "run.name": "all-reduce", "training.steps": STEPS, "training.evaluation_microbatches": 0,
    "training.microbatches_per_step": 24, "training.sequences_per_microbatch": 1,
    "checkpoint.every_steps": STEPS, "network.listen_host": "0.0.0.0",
    "limits.round_stall_seconds": 60.0,
    "model.hidden_size": 192, "model.intermediate_size": 512, "model.layers": 6,
    "model.sequence_length": 32,
}  # fmt: skip
"""A run with about ten megabytes of gradients and little computing. It has more microbatches than
members: a member without any has zero gradients, which `exact` encodes in no bytes."""


@click.command()
@click.option("--link", "links", multiple=True, default=("fibre", "cable", "dsl", "fibre+dsl"),
              help="Kinds of links; members alternate between kinds joined by +.")  # fmt: skip
@click.option("--members", "sizes", multiple=True, default=(2, 4), type=click.IntRange(2, 8))
@click.option("--codec", "codecs", multiple=True, default=("none", "exact", "int8"),
              type=click.Choice(get_args(AverageCodec)))  # fmt: skip
@out_option("all-reduce.json")
def main(
    links: Sequence[str], sizes: Sequence[int], codecs: Sequence[AverageCodec], out: Path
) -> None:
    """Measure an all-reduce and compare it with its bound."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    load_before = os.getloadavg()[0]
    file = read_mixes(MIXES)
    rows: list[dict[str, Any]] = []
    with work_folder("all-reduce", LabError) as work:
        for name in links:
            kinds = [file.link(kind) for kind in name.split("+")]
            unlike = len(kinds) > 1
            for members in sizes:
                if unlike and members < 3:
                    continue  # two members send one vector each under any division
                lines = [kinds[n % len(kinds)] for n in range(members)]
                hosts = {f"peer-{n}": line for n, line in enumerate(lines, start=1)}
                place = work / f"{name}-{members}"
                with wide_area_network(
                    {**hosts, COORDINATOR: file.link("server")}, place
                ) as network:
                    click.echo(f"\n{name}, {members} members\n{render(check_links(network))}")
                    for codec, equal in product(codecs, (False, True) if unlike else (False,)):
                        row = _measure(network, lines, codec, equal, place / "measured")
                        rows.append({"link": name, **row})
                        click.echo(f"{codec}, {row['sums']}: {row['seconds_median']:.2f} s")
    document = {**result_head(PACKAGES), "load_before": load_before, "steps": STEPS - WARMUP,
                "settings": SETTINGS, "rows": rows}  # fmt: skip
    conclude(out, document, all_reduce_markdown)


def _measure(
    network: Network, lines: Sequence[Link], codec: AverageCodec, equal: bool, place: Path
) -> dict[str, Any]:
    members = len(lines)
    records = place / "records"
    records.mkdir(parents=True)
    manifest = initialise_run(
        place / "run", "tiny", stages=1, overrides={
            **SETTINGS, "codecs.average": codec, "limits.starting_peers_per_stage": members,
        },
    )  # fmt: skip
    recorder = prefix_of(RECORDER, records)
    with Subprocesses() as children:
        local = LocalSwarm(place / "run", children)
        if equal:
            local.environment[EQUAL_SHARES_VARIABLE] = "1"
        local.prefix = network.hosts[COORDINATOR].prefix
        invite = local.start_coordinator()
        for n, line in enumerate(lines, start=1):
            local.prefix = (*network.hosts[f"peer-{n}"].prefix, *recorder)
            if len(set(lines)) > 1:
                _limit_upload(local.home(f"volunteer-{n}"), line)
            local.start_volunteer(invite, stage=0)
        local.watch()
        local.wait_for_exit()
    network.end_programs()
    events = [json.loads(one.read_text()) for one in records.glob("*.json")]
    shutil.rmtree(place)
    [stage] = stage_sizes(manifest)
    seconds = [step_seconds(events, step, members) for step in range(WARMUP + 1, STEPS + 1)]
    bound = bound_seconds(stage.gradient_bytes, lines)
    return {
        "members": members,
        "codec": codec,
        "sums": "equally much" if equal else "what its line takes",
        "gradient_bytes": stage.gradient_bytes,
        "seconds": seconds,
        "seconds_median": statistics.median(seconds),
        "bound_seconds": bound,
        "of_bound": bound / statistics.median(seconds),
    }


def _limit_upload(home: Path, line: Link) -> None:
    home.mkdir(parents=True)
    limit = f"upload_bytes_per_second = {round(line.up_bytes_per_second)}\n"
    (home / "preferences.toml").write_text(limit)


if __name__ == "__main__":
    main()
