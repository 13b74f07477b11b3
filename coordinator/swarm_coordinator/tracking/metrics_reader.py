"""Reads the metrics of a run: the steps that count, evaluations and rollbacks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.records import float_or_nan
from swarm_coordinator.tracking.journal_reader import Batch, Position, read_batch


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


def read_metrics(
    location: DatabaseLocation, after: Position, steps: int
) -> Batch[Metrics | Rollback]:
    """Read the metrics after a position. `steps` is the number of steps of the whole run.

    Steps and evaluations that a rollback has removed by now are left out. StorageError if the
    database cannot be read, or does not contain the position.
    """
    return read_batch(location, after, steps, _records)


def _records(connection: Connection, between: tuple[int, int]) -> dict[int, Metrics | Rollback]:
    return {
        **_steps(connection, between),
        **_evaluations(connection, between),
        **_rollbacks(connection, between),
    }


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
