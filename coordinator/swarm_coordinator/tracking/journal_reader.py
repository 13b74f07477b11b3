"""Reads a run's records in the order of its journal: each time only what is new.

The journal (`storage.journal`) has steps, evaluations and rollbacks in the order in which they
became durable, so its newest entry that was read is the whole position of a reader. The digest of
that entry shows whether the database still has the history that was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from pydantic import BaseModel, ConfigDict

from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.database import database_exists, open_for_reading
from swarm_shared.base.errors import StorageError

ENTRIES_PER_READ = 500
"""Journal entries of one read; it bounds memory, and how long Ctrl-C takes in a long backlog."""

Record = TypeVar("Record")


class Position(BaseModel):
    """The journal entry up to which a run was read; `sequence` 0 is the journal's beginning."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sequence: int = 0
    digest: str = ""


@dataclass(frozen=True, slots=True)
class Batch(Generic[Record]):
    """What one read found; the oldest record first."""

    records: tuple[Record, ...]
    position: Position
    complete: bool
    """Whether the database had nothing newer."""
    finished: bool
    """Whether the run has reached its end."""


def read_batch(
    location: DatabaseLocation,
    after: Position,
    steps: int,
    read_between: Callable[[Connection, tuple[int, int]], dict[int, Record]],
    read_pending: Callable[[Connection], int | None] = lambda _: None,
) -> Batch[Record]:
    """Read the records after a position. `steps` is the number of steps of the whole run.

    `read_between` reads the records of the entries after the first number, up to the second, by
    entry. `read_pending` finds the entry, if there is one, before which the reader has to stop
    until more is written. StorageError if the database cannot be read, or does not contain the
    position.
    """
    if not database_exists(location):
        return Batch((), after, complete=True, finished=False)
    with open_for_reading(location) as connection:
        _check(connection, after)
        entries = connection.execute(
            "SELECT sequence, digest FROM journal WHERE sequence > ? ORDER BY sequence LIMIT ?",
            (after.sequence, ENTRIES_PER_READ),
        ).fetchall()
        complete = len(entries) < ENTRIES_PER_READ
        pending = read_pending(connection)
        if pending is not None and entries and entries[-1][0] >= pending:
            entries = [entry for entry in entries if entry[0] < pending]
            complete = True
        sequence, digest = entries[-1] if entries else (after.sequence, after.digest)
        records = read_between(connection, (after.sequence, sequence))
        finished = connection.execute(
            "SELECT 1 FROM finishes WHERE superseded_by IS NULL AND version >= ?", (steps,)
        ).fetchone()
    return Batch(
        records=tuple(records[entry] for entry in sorted(records)),
        position=Position(sequence=sequence, digest=digest),
        complete=complete,
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
