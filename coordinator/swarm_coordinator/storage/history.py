"""What a run has done so far, read from its database, beside a running coordinator or without one.

Owns the reading for people and for other programs (`history --json`, the demo's summary). Never
writes. Superseded rows, those that a rollback took out, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from swarm_coordinator.core.events import Restored
from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.contributions import StageContribution, read_contributions
from swarm_coordinator.storage.device_owner_rows import read_owners
from swarm_coordinator.storage.location import DatabaseLocation, open_for_reading
from swarm_coordinator.storage.records import float_or_nan, read_restored
from swarm_shared.base.types import PeerId, Step

HISTORY_FORMAT = 1

_STEP_COLUMNS = "step, loss, tokens, seconds, written_at"
_SELECT_NOTES = (
    "SELECT n.text, p.peer, n.written_at FROM notes n LEFT JOIN peers p ON p.id = n.peer"
)


@dataclass(frozen=True, slots=True)
class HistoryStep:
    step: Step
    loss: float
    tokens: int
    seconds: float
    written_at: float
    """Unix seconds."""


@dataclass(frozen=True, slots=True)
class LinkTotal:
    """Bytes over one link, as the reporting peer counted them over all its starts."""

    reporter: PeerId
    remote: PeerId
    protocol: str
    sent: int
    received: int


@dataclass(frozen=True, slots=True)
class KnownPeer:
    peer: PeerId
    name: str | None
    first_seen: float
    last_seen: float


@dataclass(frozen=True, slots=True)
class HistoryNote:
    text: str
    peer: PeerId | None
    written_at: float


@dataclass(frozen=True, slots=True)
class History:
    restored: Restored
    steps: tuple[HistoryStep, ...]
    contributions: tuple[StageContribution, ...]
    links: tuple[LinkTotal, ...]
    peers: tuple[KnownPeer, ...]
    notes: tuple[HistoryNote, ...]

    @property
    def heldout_loss(self) -> float | None:
        return self.restored.heldout_loss


def history(place: DatabaseLocation) -> History:
    """Everything the run's database tells. StorageError when there is none or it is damaged."""
    with open_for_reading(place) as connection:
        return History(
            restored=read_restored(connection),
            steps=_steps(connection),
            contributions=read_contributions(connection),
            links=_links(connection),
            peers=tuple(
                KnownPeer(PeerId(row[0]), *row[1:])
                for row in connection.execute(
                    "SELECT peer, name, first_seen, last_seen FROM peers ORDER BY id"
                )
            ),
            notes=_notes(connection),
        )


@dataclass(frozen=True, slots=True)
class RecentHistory:
    """The end of the history, oldest first: what a view shows of a run of any length."""

    steps: tuple[HistoryStep, ...]
    notes: tuple[HistoryNote, ...]


def read_recent(place: DatabaseLocation, most_steps: int, most_notes: int) -> RecentHistory:
    """The newest steps and notes. Reads no more than it returns. StorageError as for `history`."""
    with open_for_reading(place) as connection:
        steps = connection.execute(
            f"SELECT {_STEP_COLUMNS} FROM applied_steps WHERE superseded_by IS NULL "
            "ORDER BY step DESC LIMIT ?",
            (most_steps,),
        ).fetchall()
        notes = connection.execute(
            f"{_SELECT_NOTES} ORDER BY n.id DESC LIMIT ?", (most_notes,)
        ).fetchall()
    return RecentHistory(_step_rows(reversed(steps)), _note_rows(reversed(notes)))


def contributions(
    place: DatabaseLocation,
) -> tuple[tuple[StageContribution, ...], dict[PeerId, PeerId]]:
    """Who counted what in which stage, over the whole run; and whose devices those are."""
    with open_for_reading(place) as connection:
        return read_contributions(connection), read_owners(connection)


def steps_document(steps: tuple[HistoryStep, ...]) -> dict[str, Any]:
    """The form in which `history`, `reference` and `demo` write steps. NaN is null in JSON."""
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
    return _step_rows(
        connection.execute(
            f"SELECT {_STEP_COLUMNS} FROM applied_steps WHERE superseded_by IS NULL ORDER BY step"
        )
    )


def _step_rows(rows: Iterable[tuple[Any, ...]]) -> tuple[HistoryStep, ...]:
    return tuple(
        HistoryStep(Step(step), float_or_nan(loss), tokens, seconds, written_at)
        for step, loss, tokens, seconds, written_at in rows
    )


def _links(connection: Connection) -> tuple[LinkTotal, ...]:
    rows = connection.execute(
        "SELECT p.peer, l.remote, l.protocol, l.sent_before + l.sent, "
        "l.received_before + l.received FROM links l JOIN peers p ON p.id = l.reporter "
        "ORDER BY l.reporter, l.protocol, l.remote"
    )
    return tuple(
        LinkTotal(PeerId(reporter), PeerId(remote), protocol, sent, received)
        for reporter, remote, protocol, sent, received in rows
    )


def _notes(connection: Connection) -> tuple[HistoryNote, ...]:
    return _note_rows(connection.execute(f"{_SELECT_NOTES} ORDER BY n.id"))


def _note_rows(rows: Iterable[tuple[Any, ...]]) -> tuple[HistoryNote, ...]:
    return tuple(
        HistoryNote(text, PeerId(peer) if peer else None, written_at)
        for text, peer, written_at in rows
    )
