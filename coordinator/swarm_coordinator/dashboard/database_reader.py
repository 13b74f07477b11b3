"""Reads the run's database beside the coordinator: at each turn only what is new.

Owns the queries, and what is accumulated over all steps because it would cost too much to make
anew each second. A rollback removes steps from the history, and a verdict voids credit: then
everything is read again. Used by one thread at a time; what it returns is not changed afterwards.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_coordinator.admission.book import AdmissionBook
from swarm_coordinator.dashboard.api_models import ID_END, ContributionRow, Curve, EventRow, Team
from swarm_coordinator.dashboard.curve import CurveBuilder
from swarm_coordinator.status.document import AppliedStepRow
from swarm_coordinator.storage.admission_rows import read_admission
from swarm_coordinator.storage.connection import Connection, DatabaseLocation
from swarm_coordinator.storage.contributions import NOT_VOID
from swarm_coordinator.storage.database import database_exists, open_for_reading
from swarm_shared.base.text import printable
from swarm_shared.credit.contributions import ContributionSums, OwnerSums

STEPS_PER_QUERY = 5_000
"""Steps of one query: a long run is read in parts, which bounds memory."""
EVENTS_KEPT = 500
"""The newest notes kept; the coordinator keeps all of them in its log and database."""


class StepRows:
    """Applied steps as plain numbers: 40 bytes a step, so a million of them take 40 MB.

    Only grows, so its first `count` rows never change.
    """

    def __init__(self) -> None:
        self._numbers = array("d")

    def __len__(self) -> int:
        return len(self._numbers) // 5  # of whole rows

    def append(self, row: AppliedStepRow) -> None:
        loss = math.nan if row.loss is None else row.loss
        self._numbers.extend((row.step, loss, row.tokens, row.seconds, row.written_at))

    def row(self, index: int) -> AppliedStepRow:
        step, loss, tokens, seconds, written_at = self._numbers[5 * index : 5 * index + 5]
        return AppliedStepRow(
            step=int(step),
            loss=None if math.isnan(loss) else loss,
            tokens=int(tokens),
            seconds=seconds,
            written_at=written_at,
        )


@dataclass(frozen=True, slots=True)
class DatabaseView:
    """Everything read of the database, as of one turn."""

    steps: StepRows
    step_count: int
    tokens: int
    seconds: float
    """Duration of all applied steps together."""
    curve: Curve
    contributions: tuple[ContributionRow, ...]
    """The most credit first."""
    teams: tuple[Team, ...]
    """The most credit first."""
    notes: tuple[EventRow, ...]
    """The newest, oldest first, as the database holds them."""
    rollbacks: int
    durations: tuple[int, ...]
    """Steps that took at most each of `STEP_SECONDS`, and all steps at the end."""
    book: AdmissionBook


STEP_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)
"""Bounds of the histogram of step durations, in seconds."""


class DatabaseReader:
    """Keeps what it has read; `refresh` reads what is new."""

    def __init__(self, place: DatabaseLocation, work_shares: Sequence[float]) -> None:
        self._place = place
        self._contributions = ContributionSums(work_shares)
        self._names_until = -1.0
        self._notes: list[EventRow] = []
        self._reset_steps()
        self._rollbacks = 0
        self._verdicts = 0
        """The newest verdict, which may void credit of steps that are read already."""
        self._ranked: tuple[ContributionRow, ...] = ()
        self._ranked_for: tuple[int, int, int, float] | None = None
        self._book = AdmissionBook()
        self._book_rows: tuple[int, ...] = ()

    def _reset_steps(self) -> None:
        self._last_row = 0
        self._steps = StepRows()
        self._tokens = 0
        self._seconds = 0.0
        self._durations = [0] * (len(STEP_SECONDS) + 1)
        self._curve = CurveBuilder()
        self._contributions.clear()

    def refresh(self, now: float) -> DatabaseView:
        """Read what is new. StorageError if the database cannot be read."""
        if database_exists(self._place):
            with open_for_reading(self._place) as connection:
                rollbacks, verdicts = connection.execute(
                    "SELECT (SELECT coalesce(max(id), 0) FROM rollbacks), "
                    "(SELECT coalesce(max(id), 0) FROM verdicts)"
                ).fetchone()
                if (rollbacks, verdicts) != (self._rollbacks, self._verdicts):
                    self._rollbacks, self._verdicts = rollbacks, verdicts
                    self._reset_steps()
                while self._read_steps(connection):
                    pass
                self._read_names(connection)
                self._read_notes(connection)
                self._read_admission(connection)
        contributions = self._rank(now)
        return DatabaseView(
            steps=self._steps,
            step_count=len(self._steps),
            tokens=self._tokens,
            seconds=self._seconds,
            curve=self._curve.curve(),
            contributions=contributions,
            teams=teams_of(contributions),
            notes=tuple(self._notes),
            rollbacks=self._rollbacks,
            durations=tuple(self._durations),
            book=self._book,
        )

    # ---------------------------------------------------------------- steps and shares

    def _read_steps(self, connection: Connection) -> bool:
        """Read the next steps and their shares. Returns whether there may be more."""
        rows = connection.execute(
            "SELECT id, step, loss, tokens, seconds, written_at FROM applied_steps "
            "WHERE id > ? AND superseded_by IS NULL ORDER BY id LIMIT ?",
            (self._last_row, STEPS_PER_QUERY),
        ).fetchall()
        if not rows:
            return False
        written: dict[int, float] = {}
        for row, *values in rows:
            step, loss, tokens, seconds, at = values
            self._enter_step(
                AppliedStepRow(step=step, loss=loss, tokens=tokens, seconds=seconds, written_at=at)
            )
            written[row] = at
        shares = connection.execute(
            "SELECT s.applied_step, p.peer, s.stage, s.microbatches, s.tokens "
            "FROM shares s JOIN peers p ON p.id = s.peer JOIN applied_steps a "
            "ON a.id = s.applied_step LEFT JOIN owners o ON o.peer = p.id "
            f"WHERE s.applied_step > ? AND s.applied_step <= ? AND {NOT_VOID} "
            "ORDER BY s.applied_step, s.stage, s.peer",
            (self._last_row, rows[-1][0]),
        )
        for row, peer, stage, microbatches, tokens in shares:
            if row in written:
                self._contributions.add(
                    peer, stage, microbatches, tokens, step=row, applied_at=written[row]
                )
        self._last_row = rows[-1][0]
        return len(rows) == STEPS_PER_QUERY

    def _enter_step(self, row: AppliedStepRow) -> None:
        self._steps.append(row)
        self._tokens += row.tokens
        self._seconds += row.seconds
        for place, bound in enumerate(STEP_SECONDS):
            self._durations[place] += row.seconds <= bound
        self._durations[-1] += 1
        self._curve.add(row.step, row.loss, row.tokens, row.seconds)

    def _rank(self, now: float) -> tuple[ContributionRow, ...]:
        """Rank the owners, anew only after a new step or name; recent averages are as of then."""
        of = (self._rollbacks, self._verdicts, len(self._steps), self._names_until)
        if of == self._ranked_for:
            return self._ranked
        self._ranked_for = of
        self._ranked = tuple(
            _contribution_row(rank, sums, now)
            for rank, sums in enumerate(self._contributions.ranked(), start=1)
        )
        return self._ranked

    # ---------------------------------------------------------------- names and notes

    def _read_names(self, connection: Connection) -> None:
        # A peer that changes its name has a new `last_seen`. The last time itself is read again:
        # other peers may have the same one.
        for peer, name, team, owner, seen in connection.execute(
            "SELECT p.peer, p.name, t.team, o.owner, p.last_seen FROM peers p "
            "LEFT JOIN teams t ON t.peer = p.id LEFT JOIN owners o ON o.peer = p.id "
            "WHERE p.last_seen >= ? ORDER BY p.last_seen",
            (self._names_until,),
        ):
            self._contributions.describe(peer, name and printable(name), team, owner or None)
            self._names_until = seen

    def _read_notes(self, connection: Connection) -> None:
        last = self._notes[-1].id if self._notes else 0
        rows = connection.execute(
            "SELECT id, written_at, text FROM notes WHERE id > ? ORDER BY id DESC LIMIT ?",
            (last, EVENTS_KEPT),
        ).fetchall()
        self._notes += [EventRow(id=row, written_at=at, text=t) for row, at, t in reversed(rows)]
        del self._notes[:-EVENTS_KEPT]

    # ---------------------------------------------------------------- admission

    def _read_admission(self, connection: Connection) -> None:
        # Of these rows none is deleted, and an end is entered once: a change changes a number. A
        # published token has any number of members, which are not read anew for nothing.
        rows = connection.execute(
            "SELECT (SELECT count(*) FROM members), "
            "(SELECT count(*) + count(revoked_at) FROM tokens), "
            "(SELECT count(*) + count(removed_at) FROM allowances), "
            "(SELECT count(*) + count(lifted_at) FROM bans)"
        ).fetchone()
        if rows != self._book_rows:
            self._book, self._book_rows = read_admission(connection), rows


def _contribution_row(rank: int, sums: OwnerSums, now: float) -> ContributionRow:
    return ContributionRow(
        rank=rank,
        id_end=sums.owner[-ID_END:],
        name=sums.name,
        team=sums.team,
        devices=len(sums.devices),
        stages=sums.stages,
        steps=sums.steps,
        microbatches=sums.microbatches,
        tokens=sums.tokens,
        credit=sums.credit,
        credit_per_day=sums.credit_per_day(now),
    )


def teams_of(contributions: Sequence[ContributionRow]) -> tuple[Team, ...]:
    """Sum the contributions by team. An owner's whole contribution counts for its present team, as
    in other such projects."""
    members: dict[str, list[ContributionRow]] = {}
    for one in contributions:
        if one.team is not None:
            members.setdefault(one.team, []).append(one)
    sums = [(math.fsum(one.credit for one in those), team) for team, those in members.items()]
    sums.sort(key=lambda row: (-row[0], row[1]))
    return tuple(
        Team(
            rank=place,
            team=team,
            members=len(members[team]),
            tokens=sum(one.tokens for one in members[team]),
            credit=credit,
            credit_per_day=math.fsum(one.credit_per_day for one in members[team]),
        )
        for place, (credit, team) in enumerate(sums, start=1)
    )
