"""`swarm-client verify-ledger`: recompute every number of a run's ledger."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import click

from swarm_shared.base.errors import StorageError
from swarm_shared.base.text import printable
from swarm_shared.base.types import PeerId
from swarm_shared.credit.ledger import MAX_LINE_BYTES, VerifiedLedger, verify_ledger

JSON_FORMAT = 1


@click.command("verify-ledger")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--organiser",
    metavar="PEER",
    help="Organiser's peer ID from your invite; by default the one in the ledger is trusted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def verify_ledger_command(file: Path, organiser: str | None, as_json: bool) -> None:
    """Recompute every number of the ledger in FILE and name the first wrong line.

    `swarm-coordinator ledger export` writes a ledger. Verification proves that the numbers follow
    from the steps, that each step counts every microbatch exactly once in every stage, that the
    owner of each row has signed for each device in it, and that the organiser has signed these
    lines. It does not prove that a volunteer did the work that the organiser credits.
    """
    found = verify_ledger(_lines(file), None if organiser is None else PeerId(organiser))
    if as_json:
        click.echo(json.dumps(_document(found)))
        return
    click.echo(
        f"every number is correct: {found.steps} steps of {found.name!r}, run {found.run[:12]}, "
        f"signed by {found.organiser}"
    )
    for person in found.people:
        name = "" if person.name is None else f"{printable(person.name)} "
        devices = f", of {len(person.devices)} devices" if len(person.devices) > 1 else ""
        click.echo(
            f"  {name}(…{person.peer[-8:]}): {person.credit:.1f} credit, "
            f"{person.credit_per_day:.1f} a day recently, {person.tokens} tokens{devices}"
        )


def _document(found: VerifiedLedger) -> dict[str, object]:
    return {
        "version": JSON_FORMAT,
        "run": found.run,
        "organiser": found.organiser,
        "as_of": found.as_of,
        "steps": found.steps,
        "totals": [total.model_dump(exclude={"line"}) for total in found.totals],
        "people": [asdict(person) for person in found.people],
    }


def _lines(file: Path) -> Iterator[bytes]:
    """A bounded part of the file at a time: a line longer than any valid one is truncated."""
    try:
        with file.open("rb") as source:
            while line := source.readline(MAX_LINE_BYTES + 1):
                yield line
    except OSError as error:
        raise StorageError(
            f"cannot read {file} ({error.strerror}); check its name and its permissions"
        ) from error
