"""Compares counts with the baseline, exit code 1 on growth: `make bench-counts`."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from benchmarks.counts.comparison import TOLERANCE, compare, document_of
from benchmarks.counts.exchange import exchange_bytes
from benchmarks.counts.messages import message_bytes
from benchmarks.counts.workloads import workload_costs
from benchmarks.machine import describe_machine
from swarm_coordinator.demo.run_summary import table
from swarm_shared.base.errors import SwarmError

BASELINE = Path(__file__).with_name("baseline.json")
PACKAGES = ("libp2p", "pydantic", "trio")
"""Packages whose versions affect the counts."""


@click.command()
@click.option("--accept", is_flag=True, help="Write the current counts as the new baseline.")
@click.option("--quiet", is_flag=True, help="Print differences only.")
@click.option("--baseline", default=BASELINE, type=click.Path(path_type=Path), hidden=True)
def main(accept: bool, quiet: bool, baseline: Path) -> None:
    """Count bytes and instructions, and compare them with the baseline."""
    sizes = {f"message: {name}": size for name, size in message_bytes().items()}
    sizes |= {f"exchange: {name}": size for name, size in exchange_bytes().items()}
    now = document_of(sizes, workload_costs(), describe_machine(PACKAGES))
    if not quiet:
        click.echo(render(now))
    if accept:
        baseline.write_text(json.dumps(now, indent=2) + "\n")
        click.echo(f"written to {baseline}; commit it with the change of the counts")
        return
    conclude(now, baseline)


def conclude(now: Mapping[str, Any], baseline: Path) -> None:
    """Print the differences; exit with code 1 when a count grew."""
    try:
        verdict = compare(now, json.loads(baseline.read_text()))
    except SwarmError as error:
        click.echo(f"counts: {error}", err=True)
        sys.exit(error.exit_code)
    for note in verdict.notes:
        click.echo(f"note: {note}")
    if not verdict.worse:
        click.echo(
            f"counts: bytes are as in the baseline, instructions within {TOLERANCE:.0%} of it"
        )
        return
    for sentence in verdict.worse:
        click.echo(f"counts: {sentence}", err=True)
    click.echo(
        "counts: if this is intended, explain it in the commit and write the new baseline: "
        "make bench-counts ARGS=--accept",
        err=True,
    )
    sys.exit(1)


def render(document: Mapping[str, Any]) -> str:
    sizes = [(name, f"{size:,}") for name, size in document["bytes"].items()]
    costs = [
        (name, f"{cost['instructions']:,}", f"{cost['calls']:,}")
        for name, cost in document["instructions"].items()
    ]
    return "\n".join(
        (
            table(("what", "bytes"), sizes, right=(1,)), "",
            table(("work", "instructions", "calls"), costs, right=(1, 2)), "",
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
