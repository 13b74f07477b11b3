"""`swarm-coordinator trust`: the standing of owners, and verdicts with their evidence."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress
from pathlib import Path

import click

from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.core.events import StandingRecord, VerdictRecord
from swarm_coordinator.core.trust.arithmetic_classes import Machine, groups
from swarm_coordinator.durability.run_files import database_location, load_manifest, load_settings
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.database import database_exists, open_for_reading
from swarm_coordinator.storage.records import read_agreements, read_standings, read_verdicts
from swarm_shared.base.errors import FrameError, ProtocolError, SignatureError, UsageError
from swarm_shared.base.text import printable
from swarm_shared.base.types import RunId
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.identity.signing import decode_envelope
from swarm_shared.identity.work_statements import AuditStatement, SumStatement
from swarm_shared.trust.evidence import judge
from swarm_shared.trust.votes import Finding


@click.command("trust")
@RUN_DIR
@click.option("--verdict", type=int, metavar="N", help="Show the evidence of verdict N.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON, with evidence.")
def trust_command(run_dir: Path, verdict: int | None, as_json: bool) -> None:
    """Show which owners have passed audits, which machines compute alike, and which owners have
    lost an audit and why.

    The coordinator of the run in RUN_DIR may keep running. The evidence of a lost audit is the
    signed receipt of the audited peer and the signed statements of its auditors: `--verdict` shows
    what each of them says, `--json` prints the envelopes, and `ledger export` publishes them.
    """
    folder = RunFolder.open(run_dir)
    probation = load_settings(folder).trust.probation_cells
    location = database_location(folder)
    if not database_exists(location):
        raise UsageError(f"the run in {run_dir} has not been started yet, so nothing was audited")
    with open_for_reading(location) as connection:
        standings, verdicts = read_standings(connection), read_verdicts(connection)
        classes = groups(read_agreements(connection))
    if as_json:
        document = {
            "probation_cells": probation,
            "owners": [dataclasses.asdict(one) for one in standings],
            "classes": [[machine._asdict() for machine in group] for group in classes],
            "verdicts": [_as_json(one) for one in verdicts],
        }
        click.echo(json.dumps(document, indent=2))
        return
    if verdict is None:
        lines = [
            *_owner_lines(standings, probation), *_class_lines(classes), *_verdict_lines(verdicts)
        ]  # fmt: skip
    elif 1 <= verdict <= len(verdicts):
        lines = _evidence_lines(run_id_of(load_manifest(folder)), verdicts[verdict - 1])
    else:
        raise UsageError(f"there is no verdict {verdict}; this run has {len(verdicts)}")
    for text in lines:
        click.echo(printable(text))


def _as_json(verdict: VerdictRecord) -> dict[str, object]:
    values = {one.name: getattr(verdict, one.name) for one in dataclasses.fields(verdict)}
    del values["claim"]
    evidence = verdict.evidence
    return values | {"evidence": None if evidence is None else evidence.model_dump(mode="json")}


def _owner_lines(standings: tuple[StandingRecord, ...], probation: int) -> list[str]:
    if not standings:
        return ["no audit has ended yet"]
    lines = [f"{'owner':<54} {'audits passed':>13} {'lost':>5} {'made':>6}  standing"]
    ranked = sorted(standings, key=lambda one: (-one.passed, one.owner))
    for one in ranked:
        left = probation - one.passed
        standing = "established" if left <= 0 else f"on probation, {left} more to pass"
        lines.append(
            f"{one.owner:<54} {one.passed:>13} {one.lost:>5} {one.audited_work:>6}  {standing}"
        )
    return lines


def _class_lines(classes: list[list[Machine]]) -> list[str]:
    """Machines of one class have agreed to the bit in enough audited cells."""
    return [
        f"class {number}, stage {group[0].stage}: "
        + ", ".join(f"{machine.peer} ({machine.device})" for machine in group)
        for number, group in enumerate(classes, start=1)
    ]


def _verdict_lines(verdicts: tuple[VerdictRecord, ...]) -> list[str]:
    if not verdicts:
        return ["no audit was lost"]
    return [f"verdict {number}: {_summary(one)}" for number, one in enumerate(verdicts, start=1)]


def _summary(one: VerdictRecord) -> str:
    signed = one.statements if one.evidence is None else one.evidence.statements
    return (
        f"step {one.step}: {one.peer} lost an audit: {one.reason} "
        f"({len(signed)} signed statement(s); credit of steps "
        f"{one.void_after + 1} to {one.step} is void)"
    )


_FINDINGS = {
    Finding.AGREES: "it computed the same",
    Finding.DIFFERS: "it computed something else",
    Finding.WITHHELD: "it did not get the tensors that the receipt has the digests of",
}


def _sum_line(text: str) -> str:
    """A signed statement about an average, in one line."""
    envelope = decode_envelope(text, "a statement about sums")
    with suppress(FrameError, SignatureError):
        sums = SumStatement.open(envelope)
        digests = ", ".join(f"{one.part} in, {one.result} out" for one in sums.checks)
        return f"statement, signed by {sums.peer}: attempt {sums.attempt}, digests {digests}"
    audit = AuditStatement.open(envelope)
    digests = "; ".join(" ".join(part) for part in audit.sums)
    return (
        f"statement, signed by {audit.auditor}: microbatch {audit.microbatch} of {audit.peer}, "
        f"digests {digests}"
    )


def _evidence_lines(run: RunId, one: VerdictRecord) -> list[str]:
    """The signed parts of a verdict, one a line, and what follows from them."""
    lines, evidence = [_summary(one)], one.evidence
    if evidence is None:
        return [*lines, *(f"  {_sum_line(text)}" for text in one.statements)]
    try:
        found = judge(run, evidence)
    except ProtocolError as error:
        return [*lines, f"its evidence is incomplete: {error}"]
    receipt = found.receipt
    loss = "" if receipt.loss_sum is None else f" and the loss {receipt.loss_sum:g}"
    lines.append(
        f"  receipt, signed by {receipt.peer} (owner {found.owner}): microbatch "
        f"{receipt.microbatch} of step {receipt.step} in stage {receipt.stage} has the gradient "
        f"{receipt.transcript.gradient}{loss}"
    )
    for vote in found.votes:
        distance = "" if vote.distance is None else f", relative distance {vote.distance:.2g}"
        lines.append(
            f"  statement, signed by {vote.peer} (owner {vote.owner}): "
            f"{_FINDINGS[vote.finding]}{distance}"
        )
    trusted = f"; trusted: {', '.join(evidence.trusted_owners)}" if evidence.trusted_owners else ""
    lines.append(
        f"  {evidence.entitled} owners could vote, distances up to {evidence.tolerance:g} are "
        f"rounding{trusted}; from this follows: {found.outcome.value}"
    )
    return lines
