"""Audit of a run's database: whether its rows are as they were written.

Owns the invariants beyond those of the database itself: the journal is complete and every record in
it has its digest, steps follow each other without a gap, generations only grow, the rows that count
are those that the journal leads to, every microbatch of a step counts once in every stage, and
owners have signed the bindings of their devices. Never writes. SQLite's own check is in
`storage.sqlite`, the check of the run folder in `durability.integrity_check`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

from swarm_coordinator.admission.device_owners import named_owner
from swarm_coordinator.core.events import (
    CheckpointRecord,
    EvaluationRecord,
    RolledBack,
    RunFinished,
)
from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.database import check_pages, open_for_reading
from swarm_coordinator.storage.journal import JournalRecord, digest
from swarm_coordinator.storage.records import (
    float_or_nan,
    read_generation,
    read_step,
    read_stored_stages,
)
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import PeerId, Version
from swarm_shared.run.manifest import Manifest

MAX_FINDINGS = 20
"""Maximum number of findings reported for one database."""

_TABLES = {
    "step": "applied_steps", "rollback": "rollbacks", "checkpoint": "checkpoints",
    "evaluation": "evaluations", "finish": "finishes",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StepShape:
    """Stages and microbatches of every step, from the manifest."""

    stages: int
    microbatches: int

    @classmethod
    def of(cls, manifest: Manifest) -> StepShape:
        return cls(manifest.stage_count, manifest.training.microbatches_per_step)


@dataclass(slots=True)
class _Replay:
    """State of the run while the journal is replayed."""

    version: int = 0
    live: dict[int, int] = field(default_factory=dict)
    """Rows of the steps that count, by step."""
    generation: int = 0
    any_applied: bool = False


def database_problems(
    location: DatabaseLocation, shape: StepShape | None, newest: int | None = None
) -> list[str]:
    """Return what SQLite's own check finds wrong or, if that is nothing, what the audit does."""
    problems = check_pages(location, thorough=newest is None)
    if not problems:
        with open_for_reading(location) as connection:
            problems = check_database(connection, shape, newest)
    return problems


def check_database(
    connection: Connection, shape: StepShape | None = None, newest: int | None = None
) -> list[str]:
    """Return a sentence for each violated invariant.

    `newest` limits the number of journal entries that are read, for a start that must not take
    minutes.
    """
    findings = list(islice(_findings(connection, shape, newest), MAX_FINDINGS + 1))
    findings[MAX_FINDINGS:] = ["and more"] * (len(findings) > MAX_FINDINGS)
    return findings


def _findings(connection: Connection, shape: StepShape | None, newest: int | None) -> Iterator[str]:
    yield from _check_gaps(connection)
    yield from _check_journal(connection, newest)
    if newest is None:
        yield from _check_nothing_unjournaled(connection)
        yield from _check_owners(connection)
    if shape is not None:
        yield from _check_shares(connection, shape, newest)


def _check_gaps(connection: Connection) -> Iterator[str]:
    """Check that the steps that count have no gap, from the first or from where the run resumed."""
    first, last, count = connection.execute(
        "SELECT min(step), max(step), count(DISTINCT step) FROM applied_steps "
        "WHERE superseded_by IS NULL"
    ).fetchone()
    if not count:
        return
    if last - first + 1 != count:
        missing = last - first + 1 - count
        yield f"table applied_steps: {missing} step(s) between {first} and {last} are missing"
    if first != 1:
        resumed = connection.execute(
            "SELECT 1 FROM rollbacks WHERE version = ?", (first - 1,)
        ).fetchone()
        if resumed is None:
            yield f"table applied_steps: the steps before {first} are missing"


def _check_journal(connection: Connection, newest: int | None) -> Iterator[str]:
    first, last, count = connection.execute(
        "SELECT min(sequence), max(sequence), count(*) FROM journal"
    ).fetchone()
    if not count or first != 0:
        yield "table journal: its beginning is missing"
        return
    if last + 1 != count:
        yield f"table journal: {last + 1 - count} entries before {last} are missing"
        return
    begin = 0 if newest is None else max(0, last - newest)
    rows = iter(
        connection.execute(
            "SELECT sequence, kind, row_id, generation, digest FROM journal "
            "WHERE sequence >= ? ORDER BY sequence",
            (begin,),
        ).fetchall()
    )
    _, _, _, generation, previous_digest = next(rows)
    replay = _Replay(generation=generation)
    replay.any_applied = begin > 0
    for sequence, kind, row_id, generation, stored_digest in rows:
        record = None if kind == "start" else read_decision(connection, kind, row_id)
        where = f"table journal: entry {sequence} ({kind})"
        if record is None and kind != "start":
            yield f"table {_TABLES.get(kind, kind)}: row {row_id} is missing"
        elif stored_digest != digest(previous_digest, kind, row_id, generation, record):
            table = _TABLES.get(kind, "generations")
            yield f"table {table}: row {row_id} is not what was written (its digest differs)"
        if generation < replay.generation:
            yield f"{where} is of generation {generation}, after one of {replay.generation}"
        if kind == "start" and generation == replay.generation:
            yield f"{where}: generation {generation} was given twice"
        replay.generation = max(replay.generation, generation)
        previous_digest = stored_digest
        if begin == 0 and record is not None:
            yield from _replay_record(replay, kind, row_id, record, where)
    if begin == 0:
        yield from _check_outcome(connection, replay)


def _replay_record(
    replay: _Replay, kind: str, row_id: int, record: JournalRecord, where: str
) -> Iterator[str]:
    if isinstance(record, RolledBack):
        # A run whose database was lost begins with a checkpoint and a rollback to it.
        if record.version > replay.version and replay.any_applied:
            yield f"{where} goes back to {record.version}, and the run was at {replay.version}"
        replay.version = record.version
        replay.live = {step: row for step, row in replay.live.items() if step <= record.version}
        replay.any_applied = True
    elif isinstance(record, (CheckpointRecord, EvaluationRecord, RunFinished)):
        if record.version > replay.version and replay.any_applied:
            yield f"{where} is of version {record.version}, and the run was at {replay.version}"
    else:
        if record.step != replay.version + 1:
            yield f"{where} is step {record.step}, and the run was at {replay.version}"
        replay.version = record.step
        replay.live[record.step] = row_id
        replay.any_applied = True


def _check_outcome(connection: Connection, replay: _Replay) -> Iterator[str]:
    """Check that the rows that count are those that the journal leads to."""
    rows = connection.execute(
        "SELECT step, id FROM applied_steps WHERE superseded_by IS NULL AND id IN "
        "(SELECT row_id FROM journal WHERE kind = 'step')"
    ).fetchall()
    counting = dict(rows)
    for step in sorted(counting.keys() - replay.live.keys()):
        yield f"table applied_steps: step {step} counts, and a roll-back took it out"
    for step in sorted(replay.live.keys() - counting.keys()):
        yield f"table applied_steps: step {step} does not count, and no roll-back took it out"
    for step in sorted(replay.live.keys() & counting.keys()):
        if replay.live[step] != counting[step]:
            yield f"table applied_steps: step {step} counts as it was before a roll-back"
    highest = read_generation(connection)
    if highest != replay.generation:
        yield f"table generations: the last is {highest}, the journal's is {replay.generation}"


def _check_nothing_unjournaled(connection: Connection) -> Iterator[str]:
    """Check that every record is in the journal."""
    for kind, table in _TABLES.items():
        for (row,) in connection.execute(
            f"SELECT id FROM {table} WHERE id NOT IN "
            f"(SELECT row_id FROM journal WHERE kind = '{kind}') ORDER BY id"
        ).fetchall():
            yield f"table {table}: row {row} has an unknown origin (it is not in the journal)"


def _check_owners(connection: Connection) -> Iterator[str]:
    """Check that every owner row follows from a signed binding."""
    for peer, owner, binding in connection.execute(
        "SELECT p.peer, o.owner, o.binding FROM owners o JOIN peers p ON p.id = o.peer "
        "ORDER BY o.peer"
    ).fetchall():
        try:
            named = named_owner(PeerId(peer), binding or None) or ""
        except SwarmError as error:
            yield f"table owners: {error}"
            continue
        if named != owner:
            bound = f"{named or 'no owner'}, and the row names {owner or 'no owner'}"
            yield f"table owners: {peer} is bound to {bound}"


def _check_shares(connection: Connection, shape: StepShape, newest: int | None) -> Iterator[str]:
    """Check that every microbatch of a step counts once in every stage."""
    since = 0
    if newest is not None:
        since = connection.execute("SELECT coalesce(max(step), 0) FROM applied_steps").fetchone()[0]
        since -= newest
    counted: dict[int, Counter[int]] = {}
    for step, stage, microbatches in connection.execute(
        "SELECT a.step, s.stage, sum(s.microbatches) FROM applied_steps a "
        "JOIN shares s ON s.applied_step = a.id "
        "WHERE a.superseded_by IS NULL AND a.step > ? GROUP BY a.step, s.stage",
        (since,),
    ):
        counted.setdefault(step, Counter())[stage] = int(microbatches)
    for step, stages in sorted(counted.items()):
        for stage in range(shape.stages):
            if stages[stage] != shape.microbatches:
                yield (
                    f"table shares: step {step} counts {stages[stage]} microbatches in stage "
                    f"{stage}, and every step has {shape.microbatches}"
                )


def read_decision(connection: Connection, kind: str, row_id: int) -> JournalRecord | None:
    """Read the record that a journal entry refers to; None when its row is missing."""
    if kind == "step":
        return read_step(connection, row_id)
    columns = {
        "rollback": "version, reason", "checkpoint": "version", "finish": "version",
        "evaluation": "version, heldout_loss, tokens, sample",
    }.get(kind)  # fmt: skip
    if columns is None:
        return None
    row = connection.execute(
        f"SELECT {columns} FROM {_TABLES[kind]} WHERE id = ?", (row_id,)
    ).fetchone()
    if row is None:
        return None
    match kind:
        case "rollback":
            return RolledBack(Version(row[0]), row[1])
        case "evaluation":
            return EvaluationRecord(Version(row[0]), float_or_nan(row[1]), row[2], row[3])
        case "finish":
            return RunFinished(Version(row[0]))
    return CheckpointRecord(Version(row[0]), read_stored_stages(connection, row_id))
