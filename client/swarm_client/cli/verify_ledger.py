"""`swarm-client verify-ledger`: recompute every number of a run's ledger."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from swarm_client.cli.options import json_option, print_json
from swarm_shared.base.errors import StorageError
from swarm_shared.base.text import printable
from swarm_shared.base.types import PeerId
from swarm_shared.credit.contributions import OwnerSums
from swarm_shared.credit.ledger import MAX_LINE_BYTES, VerifiedLedger, verify_ledger
from swarm_shared.trust.evidence import Judgement, Verdict
from swarm_shared.trust.votes import Finding


@click.command("verify-ledger")
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--organiser",
    metavar="PEER",
    help="Organiser's peer ID from your invite; by default the one in the ledger is trusted.",
)
@json_option
def verify_ledger_command(file: Path, organiser: str | None, as_json: bool) -> None:
    """Recompute every number and verdict of the ledger in FILE and name the first wrong line.

    `swarm-coordinator ledger export` writes a ledger. Verification proves that the numbers follow
    from the steps and verdicts, that each verdict follows from what the audited peer and its
    auditors have signed, that each step counts every microbatch exactly once in every stage, that
    the owner of each row has signed for each device in it, and that the organiser has signed these
    lines. It does not prove that a volunteer did the work that the organiser credits.
    """
    found = verify_ledger(_lines(file), None if organiser is None else PeerId(organiser))
    if as_json:
        print_json(_document(found))
        return
    click.echo(
        f"every number is correct: {found.steps} steps of {found.name!r}, run {found.run[:12]}, "
        f"signed by {found.organiser}; verdicts that follow from their evidence: "
        f"{len(found.verdicts)}, about averages: {len(found.sum_verdicts)}"
    )
    for verdict, judgement in found.verdicts:
        click.echo(f"  {_sentence(verdict, judgement)}")
    for lie in found.sum_verdicts:
        click.echo(
            f"  …{lie.peer[-8:]} lied about an average of step {lie.step} in stage {lie.stage}, by "
            f"{len(lie.statements)} signed statement(s); credit of steps {lie.void_after + 1} to "
            f"{lie.step} is void"
        )
    for person in found.people:
        name = "" if person.name is None else f"{printable(person.name)} "
        lately = person.credit_per_day(found.as_of)
        devices = f", of {len(person.devices)} devices" if len(person.devices) > 1 else ""
        click.echo(
            f"  {name}(…{person.owner[-8:]}): {person.credit:.1f} credit, "
            f"{lately:.1f} a day recently, {person.tokens} tokens{devices}"
        )


def _sentence(verdict: Verdict, judgement: Judgement) -> str:
    """A verdict, and the votes that it follows from."""
    against = sum(vote.finding is not Finding.AGREES for vote in judgement.votes)
    agree = 1 + len(judgement.votes) - against
    role = "the audited peer" if verdict.peer == judgement.receipt.peer else "an auditor"
    return (
        f"…{verdict.peer[-8:]}, {role}, lost the audit of microbatch {verdict.microbatch} of step "
        f"{verdict.step} in stage {verdict.stage}: of {verdict.evidence.entitled} owners {against} "
        f"contradict the receipt and {agree} agree; credit of steps {verdict.void_after + 1} to "
        f"{verdict.step} is void"
    )


def _document(found: VerifiedLedger) -> dict[str, Any]:
    return {
        "run": found.run,
        "organiser": found.organiser,
        "as_of": found.as_of,
        "steps": found.steps,
        "verdicts": [
            verdict.model_dump(exclude={"evidence"}) | {"outcome": judgement.outcome.value}
            for verdict, judgement in found.verdicts
        ],
        "sum_verdicts": [one.model_dump(exclude={"statements"}) for one in found.sum_verdicts],
        "totals": [total.model_dump(exclude={"line"}) for total in found.totals],
        "people": [_row(person, found.as_of) for person in found.people],
    }


def _row(person: OwnerSums, as_of: float) -> dict[str, object]:
    return {
        "peer": person.owner,
        "name": person.name,
        "team": person.team,
        "devices": person.devices,
        "microbatches": person.microbatches,
        "tokens": person.tokens,
        "credit": person.credit,
        "credit_per_day": person.credit_per_day(as_of),
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
