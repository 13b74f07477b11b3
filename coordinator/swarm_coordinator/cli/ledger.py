"""`swarm-coordinator ledger export`: the run's public ledger as a file that can be verified."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
from pydantic import ValidationError

from swarm_coordinator.cli.arguments import RUN_DIR
from swarm_coordinator.core.events import VerdictRecord
from swarm_coordinator.durability.run_files import database_location, load_identity, load_manifest
from swarm_coordinator.run_dir.folder import RunFolder, read_bytes
from swarm_coordinator.storage.admission_rows import read_bindings
from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.database import database_exists, open_for_reading
from swarm_coordinator.storage.records import read_verdicts
from swarm_shared.base.atomic_file import atomic_file
from swarm_shared.base.clock import wall
from swarm_shared.base.errors import ProtocolError, StorageError, UsageError
from swarm_shared.base.json_messages import first_error
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.credit.ledger import write_ledger
from swarm_shared.credit.ledger_lines import StepLine
from swarm_shared.identity.signed_manifest import MAX_MANIFEST_BYTES, run_id_of
from swarm_shared.trust.evidence import (
    SumVerdict,
    Verdict,
    check_sum_verdict,
    check_verdict,
)

STEPS_AT_ONCE = 500
"""Steps read in one query, to bound memory."""


@click.group("ledger")
def ledger_command() -> None:
    """Publish who has contributed what, in a form that anyone can verify."""


@ledger_command.command("export")
@RUN_DIR
@click.argument("file", type=click.Path(path_type=Path, dir_okay=False))
def export_ledger_command(run_dir: Path, file: Path) -> None:
    """Write the signed ledger of the run in RUN_DIR to FILE; its coordinator may keep running.

    `swarm-client verify-ledger FILE` recomputes every number in it, and every verdict from the
    signed receipts and statements in it.
    """
    folder = RunFolder.open(run_dir)
    manifest = load_manifest(folder)
    envelope = read_bytes(folder.manifest, MAX_MANIFEST_BYTES)
    location = database_location(folder)
    if not database_exists(location):
        raise UsageError(f"the run in {run_dir} has not been started yet, so its ledger is empty")
    lines = 0
    with open_for_reading(location) as connection:
        begins = connection.execute(
            "SELECT min(step) FROM applied_steps WHERE superseded_by IS NULL"
        ).fetchone()[0]
        if begins not in (None, 1):
            raise StorageError(
                f"the database knows no steps before {begins} (it is newer than the run), and a "
                "ledger that begins there could not be verified"
            )
        rows = connection.execute(
            "SELECT p.peer, p.name, t.team FROM peers p LEFT JOIN teams t ON t.peer = p.id"
        ).fetchall()
        names = {PeerId(peer): (name, team or None) for peer, name, team in rows}
        counted = _counted(connection)
        bindings = {d: bound for d, bound in read_bindings(connection).items() if d in counted}
        verdicts, left_out = provable_verdicts(run_id_of(manifest), read_verdicts(connection))
        written = write_ledger(
            load_identity(folder), envelope, _steps(connection), names, wall(), bindings, verdicts
        )
        with atomic_file(file) as out:
            for line in written:
                out.write(line)
                lines += 1
    click.echo(f"{lines} lines in {file}; verify them with: swarm-client verify-ledger FILE")
    for sentence in left_out:
        click.echo(sentence)


def provable_verdicts(
    run: RunId, records: tuple[VerdictRecord, ...]
) -> tuple[list[Verdict | SumVerdict], list[str]]:
    """The verdicts that follow from their evidence, and a sentence about each of the others.

    The coordinator keeps a bounded number of receipts, so that one may be missing.
    """
    found: list[Verdict | SumVerdict] = []
    left_out: list[str] = []
    for one in records:
        try:
            found.append(_provable(run, one))
        except (ProtocolError, ValidationError) as error:
            reason = first_error(error) if isinstance(error, ValidationError) else str(error)
            left_out.append(
                f"the verdict against {one.peer} in step {one.step} is left out, and the credit "
                f"that it voids counts in this ledger, because its evidence is incomplete: {reason}"
            )
    return found, left_out


def _provable(run: RunId, one: VerdictRecord) -> Verdict | SumVerdict:
    """The verdict as the ledger carries it; ProtocolError if it does not follow from its
    evidence."""
    if one.evidence is None or one.microbatch is None:
        of_sums = SumVerdict.model_validate(one, from_attributes=True)
        check_sum_verdict(run, of_sums)
        return of_sums
    verdict = Verdict.model_validate(one, from_attributes=True)
    check_verdict(run, verdict)
    return verdict


def _counted(connection: Connection) -> set[PeerId]:
    """The peers that have counted in a step of the run's history."""
    rows = connection.execute(
        "SELECT DISTINCT p.peer FROM shares s JOIN applied_steps a ON a.id = s.applied_step "
        "JOIN peers p ON p.id = s.peer WHERE a.superseded_by IS NULL"
    )
    return {PeerId(peer) for (peer,) in rows}


def _steps(connection: Connection) -> Iterator[StepLine]:
    """Yield the applied steps in order, read in parts."""
    after = 0
    while rows := connection.execute(
        "SELECT id, step, written_at FROM applied_steps WHERE superseded_by IS NULL AND step > ? "
        "ORDER BY step LIMIT ?",
        (after, STEPS_AT_ONCE),
    ).fetchall():
        for row, step, written_at in rows:
            shares = connection.execute(
                "SELECT p.peer, s.stage, s.microbatches "
                "FROM shares s JOIN peers p ON p.id = s.peer WHERE s.applied_step = ? "
                "ORDER BY s.stage, p.peer",
                (row,),
            ).fetchall()
            yield StepLine(
                step=step, applied_at=written_at, shares=tuple((p, s, m) for p, s, m in shares)
            )
        after = rows[-1][1]
