"""The history of a run, read from its database, whether a coordinator is running or not.

Owns the queries for people and for other programs (`history --json`, the demo's summary). Never
writes. Rows superseded by a rollback are left out.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Any

from swarm_coordinator.core.events import Restored
from swarm_coordinator.status.document import AppliedStepRow, LinkRow, NoteRow
from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.contributions import (
    NOT_VOID,
    StageContribution,
    read_contributions,
)
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.records import float_or_nan, read_restored
from swarm_shared.base.types import PeerId, Step

HISTORY_FORMAT = 1

_STEP_COLUMNS = "step, loss, tokens, seconds, written_at"


@dataclass(frozen=True, slots=True)
class HistoryStep:
    """One applied step."""

    step: Step
    loss: float
    tokens: int
    seconds: float
    written_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class Reached:
    """A run at one version of its parameters."""

    training_loss: float | None
    """Loss of the step that made the version; None if the database does not have it."""
    heldout_loss: float | None
    """None if the version was not evaluated."""
    peers: int
    """Peers whose work counted in a step up to the version, and is not void."""


@dataclass(frozen=True, slots=True)
class History:
    """Everything that `history` reads."""

    restored: Restored
    steps: tuple[HistoryStep, ...]
    contributions: tuple[StageContribution, ...]
    links: tuple[LinkRow, ...]
    """Bytes over each link, as counted by the reporting peer over all its starts."""
    names: dict[PeerId, str | None]
    """The names of all peers that have been admitted."""
    notes: tuple[NoteRow, ...]
    """Events of the run, the oldest first."""

    @property
    def heldout_loss(self) -> float | None:
        return self.restored.heldout_loss


def history(location: DatabaseLocation) -> History:
    """Read the whole history. StorageError when the database is missing or damaged."""
    with open_for_reading(location) as connection:
        return History(
            restored=read_restored(connection),
            steps=_steps(connection),
            contributions=read_contributions(connection),
            links=_links(connection),
            names=dict(connection.execute("SELECT peer, name FROM peers ORDER BY id").fetchall()),
            notes=_notes(connection, sys.maxsize),
        )


def read_reached(connection: Connection, version: int) -> Reached:
    """Read what the run had reached with the parameters of a version."""
    loss = connection.execute(
        "SELECT loss FROM applied_steps WHERE superseded_by IS NULL AND step = ?", (version,)
    ).fetchone()
    evaluation = connection.execute(
        "SELECT heldout_loss FROM evaluations WHERE superseded_by IS NULL AND version = ? "
        "ORDER BY id DESC LIMIT 1",
        (version,),
    ).fetchone()
    (peers,) = connection.execute(
        "SELECT count(DISTINCT p.id) FROM shares s JOIN applied_steps a ON a.id = s.applied_step "
        "JOIN peers p ON p.id = s.peer LEFT JOIN owners o ON o.peer = p.id "
        f"WHERE a.superseded_by IS NULL AND a.step <= ? AND {NOT_VOID}",
        (version,),
    ).fetchone()
    return Reached(
        training_loss=None if loss is None else float_or_nan(loss[0]),
        heldout_loss=None if evaluation is None else float_or_nan(evaluation[0]),
        peers=peers,
    )


def read_recent(
    connection: Connection, max_steps: int, max_notes: int
) -> tuple[tuple[AppliedStepRow, ...], tuple[NoteRow, ...]]:
    """Read the newest steps and notes, oldest first, and no more."""
    steps = connection.execute(
        f"SELECT {_STEP_COLUMNS} FROM applied_steps WHERE superseded_by IS NULL "
        "ORDER BY step DESC LIMIT ?",
        (max_steps,),
    ).fetchall()
    return (
        tuple(
            AppliedStepRow(step=step, loss=loss, tokens=tokens, seconds=seconds, written_at=at)
            for step, loss, tokens, seconds, at in reversed(steps)
        ),
        _notes(connection, max_notes),
    )


def steps_document(steps: tuple[HistoryStep, ...]) -> dict[str, Any]:
    """Return steps as `history`, `reference` and `demo` write them in JSON; NaN becomes null."""
    return {
        "version": HISTORY_FORMAT,
        "steps": [
            {
                "step": step.step,
                "loss": step.loss if math.isfinite(step.loss) else None,
                "tokens": step.tokens,
                "seconds": step.seconds,
            }
            for step in steps
        ],
    }


def _steps(connection: Connection) -> tuple[HistoryStep, ...]:
    rows = connection.execute(
        f"SELECT {_STEP_COLUMNS} FROM applied_steps WHERE superseded_by IS NULL ORDER BY step"
    )
    return tuple(HistoryStep(step, float_or_nan(loss), *rest) for step, loss, *rest in rows)


def _links(connection: Connection) -> tuple[LinkRow, ...]:
    rows = connection.execute(
        "SELECT p.peer, l.remote, l.protocol, l.sent_before + l.sent, "
        "l.received_before + l.received FROM links l JOIN peers p ON p.id = l.reporter "
        "ORDER BY l.reporter, l.protocol, l.remote"
    )
    return tuple(LinkRow(*row) for row in rows)


def _notes(connection: Connection, most: int) -> tuple[NoteRow, ...]:
    """Return the newest notes, the oldest first."""
    rows = connection.execute(
        "SELECT text, written_at FROM notes ORDER BY id DESC LIMIT ?", (most,)
    ).fetchall()
    return tuple(NoteRow(text=text, written_at=at) for text, at in reversed(rows))
