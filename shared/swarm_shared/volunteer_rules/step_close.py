"""A volunteer's side of a step close: reconcile, average, report, apply.

Orders of the coordinator and results of work in, decisions out. Close, Apply and SaveSnapshot are
carried out one after another; AbortRound takes effect at once. A close makes the accumulator hold
exactly the coordinator's commit set, has the gradient averaged with the named groups on a copy, and
reports. With staleness the next step is computed meanwhile; only the step that is applied next
closes.

A peer that moves has its next stage prepared beside the held one. A close that names both stages
averages both at the same time, each in a lane of its own: to the new stage the peer has added
nothing. The Apply of that attempt makes the new stage the held one
(docs/decisions/0014-rebalancing.md).

Invariants:

1. At most one order is carried out at a time, and each lane has at most one piece of work. Each
   piece has a number: the result of cancelled work is ignored.
2. Nothing is reported for an attempt that was aborted, and nothing about orders of a session that
   is lost.
3. `ok` is reported only when every lane is averaged, and the copy of the held stage's accumulator
   contained exactly the committed microbatches.
4. A committed microbatch is never removed. An attempt that fails or is aborted changes the
   accumulator only by the removal of what was not committed, or empties it: when a removal fails,
   or the sum is not finite.
5. The account drops a receipt before the removal of its gradient is asked for: a removal that is
   cancelled leaves no receipt without a gradient.
6. An Apply is carried out only for the step and the attempt that are averaged here, in the stage
   that the attempt names. Any other makes the volunteer attach again, except the one carried out
   last, which is answered again.
7. After `session_lost` the step is open again. What is averaged in the held stage stays averaged: a
   coordinator that has decided the step sends its Apply again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Generic, NewType

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import MicrobatchIndex, PeerId, Step, Version
from swarm_shared.protocol import (
    AbortRound,
    Applied,
    Apply,
    Close,
    Reduction,
    RoundReport,
    SaveSnapshot,
    SnapshotFailed,
    SnapshotReady,
)
from swarm_shared.volunteer_rules.stage_account import ReceiptT, StageAccount

CloseOrder = Close | AbortRound | Apply | SaveSnapshot

MAX_QUEUED_ORDERS = 256
"""Maximum number of orders that wait to be carried out; each takes a moment."""

MAX_REASON_CHARACTERS = 500
"""Characters of a failure's reason in a report; longer ones are cut."""

WorkNumber = NewType("WorkNumber", int)
"""Identifies one piece of work; never reused by the same object."""


class Lane(Enum):
    """Which of the two loaded stages a piece of work is done in."""

    HELD = auto()
    PREPARED = auto()


# ---- decisions: work, each answered once with its number unless it is cancelled


@dataclass(frozen=True, slots=True)
class PrepareRound:
    """Copy the step's accumulator for averaging. Answer: `round_prepared`."""

    work: WorkNumber
    lane: Lane
    step: Step


@dataclass(frozen=True, slots=True)
class Uncommit:
    """Remove microbatches from the held stage's accumulator. Answer: `uncommitted`."""

    work: WorkNumber
    step: Step
    microbatches: tuple[MicrobatchIndex, ...]


@dataclass(frozen=True, slots=True)
class EmptyAccumulator:
    """Empty the held stage's accumulator of the step. Answer: `emptied`."""

    work: WorkNumber
    step: Step


@dataclass(frozen=True, slots=True)
class Reduce:
    """Average one part of the copy with its group. Answer: `averaged` or `averaging_failed`."""

    work: WorkNumber
    lane: Lane
    step: Step
    attempt: int
    reduction: Reduction


@dataclass(frozen=True, slots=True)
class ComputeNorm:
    """Compute the squared norms of the averaged gradient. Answer: `norm_computed`."""

    work: WorkNumber
    lane: Lane
    step: Step


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Apply the averaged gradient to the stage. Answer: `applied`."""

    work: WorkNumber
    lane: Lane
    order: Apply


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write a snapshot of the held stage. Answer: `saved`."""

    work: WorkNumber
    request: SaveSnapshot


Work = PrepareRound | Uncommit | EmptyAccumulator | Reduce | ComputeNorm | ApplyStep | SaveState
"""Any of these may instead be answered by `failed`."""


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Stop the work; a result that arrives nevertheless is ignored."""

    work: WorkNumber


# ---- decisions: everything else


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator."""

    message: RoundReport | Applied | SnapshotReady | SnapshotFailed


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The step is applied in the lane's stage; this peer counted so many microbatches of it, all of
    them in the stage that was held when they were computed."""

    lane: Lane
    step: Step
    counted: int


@dataclass(frozen=True, slots=True)
class Rejoin:
    """The run has applied a step that this peer cannot apply: end the session and attach again."""


@dataclass(frozen=True, slots=True)
class SwitchToPrepared:
    """The prepared stage is the held one from now on, with a StepClose of its own; this one is
    over."""


@dataclass(frozen=True, slots=True)
class DropPrepared:
    """A step was applied without the prepared stage, if there is one: it is outdated."""


Action = Work | CancelWork | Send | StepApplied | Rejoin | SwitchToPrepared | DropPrepared


# ---- state


class _Outcome(Enum):
    RUNNING = auto()
    AVERAGED = auto()
    FAILED = auto()


@dataclass(slots=True, eq=False)
class _Attempt:
    """The latest attempt to close, until it is aborted or applied."""

    close: Close
    outcome: _Outcome = _Outcome.RUNNING
    own_squared: float = 0.0
    tied_squared: float = 0.0
    switches: bool = False
    """Whether its Apply makes the prepared stage the held one."""

    def is_of(self, order: Apply | AbortRound) -> bool:
        return (self.close.step, self.close.attempt) == (order.step, order.attempt)


@dataclass(slots=True, eq=False)
class _Reducing:
    """One lane of the running attempt."""

    lane: Lane
    attempt: _Attempt
    reductions: deque[Reduction]
    """Parts that are not averaged yet."""
    failure: RoundReport | None = None
    """Report to send once the accumulator is empty."""


@dataclass(frozen=True, slots=True)
class _Order:
    session: int
    message: Close | Apply | SaveSnapshot


@dataclass(frozen=True, slots=True)
class _Running:
    """An Apply or SaveSnapshot that is carried out."""

    work: ApplyStep | SaveState
    session: int


class StepClose(Generic[ReceiptT]):
    """Closes the steps of one held stage, from its installation to its end."""

    def __init__(self, account: StageAccount[ReceiptT]) -> None: ...

    @property
    def averaged_attempt(self) -> int | None:
        """The attempt of the next step whose averaged gradient the held stage has; hellos report
        it."""

    def take_actions(self) -> list[Action]:
        """Return the decisions made since the previous call, in order."""

    # ---- the coordinator

    def order(self, message: CloseOrder) -> None:
        """Accept an order. ProtocolError when MAX_QUEUED_ORDERS wait already."""

    def session_lost(self) -> None:
        """End the running attempt, whose report cannot be sent, and forget the prepared stage: a
        coordinator that returns has no record of the move."""

    # ---- the stage beside the held one

    def stage_prepared(self, account: StageAccount[ReceiptT]) -> None:
        """A stage for a move is loaded; `account` is its own."""

    def prepared_lost(self) -> None:
        """The prepared stage is gone. An attempt that needs it fails; an Apply that needs it cannot
        be carried out."""

    # ---- results

    def round_prepared(
        self, work: WorkNumber, microbatches: tuple[MicrobatchIndex, ...], *, finite: bool
    ) -> None:
        """The accumulator is copied; it contained `microbatches`."""

    def uncommitted(self, work: WorkNumber, *, done: bool) -> None:
        """The microbatches are removed, or (not `done`) none of them is."""

    def emptied(self, work: WorkNumber) -> None:
        """The accumulator of the step is empty."""

    def averaged(self, work: WorkNumber) -> None:
        """One part is averaged."""

    def averaging_failed(
        self, work: WorkNumber, reason: str, culprit: PeerId | None, *, carrier_failed: bool
    ) -> None:
        """The average of one part has failed for all its members; its input is unchanged."""

    def norm_computed(
        self, work: WorkNumber, *, own_squared: float, tied_squared: float, finite: bool
    ) -> None:
        """The norms of all parts of a lane."""

    def applied(self, work: WorkNumber, *, digest: str, norm: float) -> None:
        """The step is applied, and the accumulator of the step is empty."""

    def saved(self, work: WorkNumber, answer: SnapshotReady | SnapshotFailed) -> None:
        """The snapshot is written, or could not be."""

    def failed(self, work: WorkNumber, reason: str) -> None:
        """The work could not be done; nothing has changed. A held stage whose worker has died gives
        no result at all: its tenure ends, and this object with it."""
