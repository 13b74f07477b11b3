"""Reads where the time of a run's steps went, for traces: what the core has recorded of each step.

Of all applied steps, also those that a rollback has removed: they took their time too. A step is
read once the times of its parts are recorded, or can no longer be: all members of a step have to
apply it first.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from swarm_coordinator.core.events import StepPart
from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.records import float_or_nan
from swarm_coordinator.tracking.journal_reader import Batch, Position, read_batch


@dataclass(frozen=True, slots=True)
class StepEvent:
    """A line of the run's event log: joins, losses, failed attempts, rollbacks, second leases."""

    written_at: float
    """Unix seconds."""
    text: str
    peer: str | None


@dataclass(frozen=True, slots=True)
class StepTrace:
    """One applied step."""

    step: int
    attempt: int
    """Of all steps of the run, and all repetitions of this one, no other has this number."""
    earlier: int
    """How often the step was applied before, and given up by a rollback."""
    decided_at: float
    """Unix seconds: when the decision to apply it became durable."""
    seconds: float
    """The duration that the run counts: from the previous step until the decision."""
    loss: float
    learning_rate: float
    global_norm: float
    tokens: int
    peers: int
    """Number of peers whose work counted."""
    stages: int
    parts: tuple[StepPart, ...]
    """Empty if the coordinator ended before the last member had applied the step."""
    events: tuple[StepEvent, ...]
    """What was noted since the previous step; the oldest first."""


def read_traces(location: DatabaseLocation, after: Position, steps: int) -> Batch[StepTrace]:
    """Read the steps after a position. `steps` is the number of steps of the whole run.

    StorageError if the database cannot be read, or does not contain the position.
    """
    return read_batch(location, after, steps, _steps, _pending)


def _pending(connection: Connection) -> int | None:
    """Find the newest step if its members may still be applying it."""
    row = connection.execute(
        "SELECT j.sequence FROM journal j WHERE j.kind = 'step' "
        "AND j.row_id = (SELECT max(id) FROM applied_steps) "
        "AND NOT EXISTS (SELECT 1 FROM step_times t WHERE t.applied_step = j.row_id) "
        "AND NOT EXISTS (SELECT 1 FROM journal later WHERE later.sequence > j.sequence "
        "AND later.kind IN ('start', 'rollback', 'finish'))"
    ).fetchone()
    return None if row is None else int(row[0])


def _steps(connection: Connection, between: tuple[int, int]) -> dict[int, StepTrace]:
    rows = connection.execute(
        "SELECT j.sequence, a.id, a.step, a.attempt, a.written_at, a.seconds, a.loss, "
        "a.learning_rate, a.global_norm, a.tokens, t.parts, "
        f"{_NOTED_UNTIL}, "
        "(SELECT count(DISTINCT s.peer) FROM shares s WHERE s.applied_step = a.id), "
        "(SELECT count(DISTINCT s.stage) FROM shares s WHERE s.applied_step = a.id), "
        "(SELECT count(*) FROM applied_steps b WHERE b.step = a.step AND b.id < a.id) "
        "FROM journal j JOIN applied_steps a ON a.id = j.row_id "
        "LEFT JOIN step_times t ON t.applied_step = a.id "
        "WHERE j.kind = 'step' AND j.sequence > ? AND j.sequence <= ? ORDER BY j.sequence",
        between,
    ).fetchall()
    if not rows:
        return {}
    since = _noted_until_before(connection, rows[0][1])
    notes = _notes(connection, since, rows[-1][11])
    found: dict[int, StepTrace] = {}
    for row in rows:
        (sequence, _, step, attempt, written_at, seconds, loss, learning_rate, norm, tokens,
         parts, until, peers, stages, earlier) = row  # fmt: skip
        found[sequence] = StepTrace(
            step=step,
            attempt=attempt,
            earlier=earlier,
            decided_at=written_at,
            seconds=seconds,
            loss=float_or_nan(loss),
            learning_rate=learning_rate,
            global_norm=float_or_nan(norm),
            tokens=tokens,
            peers=peers,
            stages=stages,
            parts=() if parts is None else tuple(StepPart(*part) for part in json.loads(parts)),
            events=tuple(note for note in notes if since < note.written_at <= until),
        )
        since = until
    return found


_NOTED_UNTIL = "coalesce(t.written_at, a.written_at)"
"""Until when notes belong to a step. A time at which something of the step was written, and not one
that is computed: what was noted before it is in the database together with it."""


def _noted_until_before(connection: Connection, row_id: int) -> float:
    """Until when notes belong to the step before this row; 0 if it is the first."""
    row = connection.execute(
        f"SELECT {_NOTED_UNTIL} FROM applied_steps a "
        "LEFT JOIN step_times t ON t.applied_step = a.id "
        "WHERE a.id < ? ORDER BY a.id DESC LIMIT 1",
        (row_id,),
    ).fetchone()
    return 0.0 if row is None else float(row[0])


def _notes(connection: Connection, since: float, until: float) -> list[StepEvent]:
    rows = connection.execute(
        "SELECT n.written_at, n.text, p.peer FROM notes n LEFT JOIN peers p ON p.id = n.peer "
        "WHERE n.written_at > ? AND n.written_at <= ? ORDER BY n.id",
        (since, until),
    )
    return [StepEvent(*row) for row in rows]
