"""Links behind NAT, on real network stacks: `make bench-net`, as root.

Machines are network namespaces (`tests/kits/network_lab`): the wire costs nothing and has no
delay, so
that the benchmark measures the software at the ends and at the relay. All processes share this
machine's cores; CPU seconds per gigabyte show what a part would reach on a dedicated core.
Repetitions are interleaved; results are medians. Nothing else should run on the machine meanwhile;
`load_before` has the load at the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click

from benchmarks.net.join import PRESET, make_template, seconds_to_first_receipt
from benchmarks.net.links import FRAME_BYTES, SIZE_BYTES, link_lab
from benchmarks.outcome import conclude, out_option, result_head, work_folder
from benchmarks.pages.tables import net_markdown
from kits.network_lab import LabError, Nat, why_not_here

PACKAGES = ("libp2p", "hivemind", "trio", "swarmtrain")

Rows = dict[str, list[dict[str, Any]]]


@click.command()
@click.option("--repetitions", default=5, show_default=True, type=click.IntRange(1))
@click.option(
    "--joins",
    default=3,
    show_default=True,
    type=click.IntRange(0),
    help="Joins per kind of router.",
)
@click.option(
    "--pairs", default=8, show_default=True, type=click.IntRange(1), help="Concurrent links."
)
@click.option(
    "--p2pd/--no-p2pd", default=True, help="Also measure hivemind's daemon through the relay."
)
@out_option("net.json")
def main(repetitions: int, joins: int, pairs: int, p2pd: bool, out: Path) -> None:
    """Measure direct, punched and relayed links, and how long joining takes behind a router."""
    if (reason := why_not_here()) is not None:
        raise click.ClickException(reason)
    load_before = os.getloadavg()[0]
    with work_folder("net", LabError) as work:
        punched, transfers = measure_links(work, repetitions, pairs, with_p2pd=p2pd)
        joined = measure_joins(work, joins)
    document = {**make_document(punched, transfers, joined), "load_before": load_before}
    conclude(out, document, net_markdown)


def measure_links(
    work: Path, repetitions: int, pairs: int, *, with_p2pd: bool
) -> tuple[list[float], Rows]:
    """Return the seconds of each hole punch, and every transfer by name."""
    click.echo(f"building {6 * pairs + 1} machines and connecting them")
    rows: Rows = {}
    with link_lab(work / "links", pairs, with_p2pd=with_p2pd) as (links, punched):
        measurements = links.measurements()
        for repetition in range(1, repetitions + 1):
            for name, measure in measurements.items():
                row = measure()
                rows.setdefault(name, []).append(row)
                rate = row["megabytes_per_second"]
                click.echo(f"{repetition}/{repetitions}  {name:<28}{rate:>8.0f} MB/s")
    return punched, rows


def measure_joins(work: Path, joins: int) -> dict[str, list[float]]:
    template = work / "template"
    if joins:
        make_template(template)
    found: dict[str, list[float]] = {}
    for repetition in range(1, joins + 1):
        for nat in Nat:
            took = seconds_to_first_receipt(template, work / "join", nat)
            found.setdefault(nat.value, []).append(took)
            click.echo(
                f"{repetition}/{joins}  first receipt behind a {nat.value} router {took:.1f} s"
            )
    return found


def make_document(
    punched: Sequence[float], transfers: Rows, joined: Mapping[str, Sequence[float]]
) -> dict[str, Any]:
    links = {
        name: {
            **{key: median(row[key] for row in rows) for key in rows[0]},
            "megabytes_per_second_all": [row["megabytes_per_second"] for row in rows],
        }
        for name, rows in transfers.items()
    }
    rates = {name: link["megabytes_per_second"] for name, link in links.items()}
    return {
        **result_head(PACKAGES),
        "frame_bytes": FRAME_BYTES,
        "bytes_per_transfer": SIZE_BYTES,
        "links": links,
        "ratios": {
            f"{name} / {name.replace('punched', 'direct')}": rates[name]
            / rates[name.replace("punched", "direct")]
            for name in rates
            if name.startswith("punched")
        },
        "punch_seconds": {"median": median(punched), "all": list(punched)},
        "first_receipt_seconds": {
            "preset": PRESET,
            **{nat: {"median": median(all_), "all": list(all_)} for nat, all_ in joined.items()},
        },
    }


if __name__ == "__main__":
    main()
