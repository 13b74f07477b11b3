"""Reads metrics from a run's database beside the coordinator: each time only what is new.

The journal (`storage.journal`) has steps, evaluations and rollbacks in the order in which they
became durable, so its newest entry that was read is the whole position of a reader. The digest of
that entry shows whether the database still has the history that was read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import BaseModel, ConfigDict

from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.database import database_exists, open_for_reading
from swarm_coordinator.storage.records import float_or_nan
from swarm_shared.base.errors import StorageError

ENTRIES_PER_READ = 500
"""Journal entries of one read; it bounds memory, and how long Ctrl-C takes in a long backlog."""


class Position(BaseModel):
    """The journal entry up to which a run was read; `sequence` 0 is the journal's beginning."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Metrics:
    """Numbers that belong to one step, by name."""

    step: int
    written_at: float
    """Unix seconds."""
    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Rollback:
    """The steps after `version` were lost; they are computed again."""

    version: int
    written_at: float
    """Unix seconds."""
    reason: str


@dataclass(frozen=True, slots=True)
class MetricsBatch:
    """What one read found; the oldest record first."""

    records: tuple[Metrics | Rollback, ...]
    position: Position
    complete: bool
    """Whether the database had nothing newer."""
    finished: bool
    """Whether the run has reached its end."""


def read_metrics(location: DatabaseLocation, after: Position, steps: int) -> MetricsBatch:
    """Read the records after a position. `steps` is the number of steps of the whole run.

    Steps and evaluations that a rollback has removed by now are left out. StorageError if the
    database cannot be read, or does not contain the position.
    """
    if not database_exists(location):
        return MetricsBatch((), after, complete=True, finished=False)
    with open_for_reading(location) as connection:
        _check(connection, after)
        entries = connection.execute(
            "SELECT sequence, digest FROM journal WHERE sequence > ? ORDER BY sequence LIMIT ?",
            (after.sequence, ENTRIES_PER_READ),
        ).fetchall()
        sequence, digest = entries[-1] if entries else (after.sequence, after.digest)
        between = (after.sequence, sequence)
        records: dict[int, Metrics | Rollback] = {
            **_steps(connection, between),
            **_evaluations(connection, between),
            **_rollbacks(connection, between),
        }
        finished = connection.execute(
            "SELECT 1 FROM finishes WHERE superseded_by IS NULL AND version >= ?", (steps,)
        ).fetchone()
    return MetricsBatch(
        records=tuple(records[entry] for entry in sorted(records)),
        position=Position(sequence=sequence, digest=digest),
        complete=len(entries) < ENTRIES_PER_READ,
        finished=finished is not None,
    )


def _check(connection: Connection, after: Position) -> None:
    found = connection.execute(
        "SELECT digest FROM journal WHERE sequence = ?", (after.sequence,)
    ).fetchone()
    if found is None or found[0] != after.digest:
        raise StorageError(
            "the run's database was restored or made anew since this was written, and has another "
            "history; name another place with --output"
        )


def _steps(connection: Connection, between: tuple[int, int]) -> dict[int, Metrics]:
    rows = connection.execute(
        "SELECT j.sequence, a.step, a.written_at, a.loss, a.learning_rate, a.tokens, a.seconds, "
        "(SELECT count(DISTINCT s.peer) FROM shares s WHERE s.applied_step = a.id) "
        "FROM journal j JOIN applied_steps a ON a.id = j.row_id "
        "WHERE j.kind = 'step' AND j.sequence > ? AND j.sequence <= ? AND a.superseded_by IS NULL",
        between,
    )
    return {
        sequence: Metrics(
            step,
            written_at,
            {
                "loss": float_or_nan(loss),
                "learning_rate": learning_rate,
                "tokens": tokens,
                "seconds": seconds,
                "peers": peers,
            },
        )
        for sequence, step, written_at, loss, learning_rate, tokens, seconds, peers in rows
    }


def _evaluations(connection: Connection, between: tuple[int, int]) -> dict[int, Metrics]:
    rows = connection.execute(
        "SELECT j.sequence, e.version, e.written_at, e.heldout_loss "
        "FROM journal j JOIN evaluations e ON e.id = j.row_id WHERE j.kind = 'evaluation' "
        "AND j.sequence > ? AND j.sequence <= ? AND e.superseded_by IS NULL",
        between,
    )
    return {
        sequence: Metrics(version, written_at, {"heldout_loss": float_or_nan(loss)})
        for sequence, version, written_at, loss in rows
    }


def _rollbacks(connection: Connection, between: tuple[int, int]) -> dict[int, Rollback]:
    rows = connection.execute(
        "SELECT j.sequence, r.version, r.written_at, r.reason "
        "FROM journal j JOIN rollbacks r ON r.id = j.row_id "
        "WHERE j.kind = 'rollback' AND j.sequence > ? AND j.sequence <= ?",
        between,
    )
    return {
        sequence: Rollback(version, written_at, reason)
        for sequence, version, written_at, reason in rows
    }
