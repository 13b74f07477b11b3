"""A volunteer's side of a step close: reconcile, average, report, apply.

Orders of the coordinator and results of work in, decisions out. Close, Apply and SaveSnapshot are
carried out one after another; AbortRound takes effect at once. A close makes the accumulator hold
exactly the coordinator's commit set, has the gradient averaged with the named groups on a copy, and
reports. With staleness the next step is computed meanwhile; only the step that is applied next
closes. Between its report and the Apply a SumCheck may ask for the digests of what it put into the
average and took out (docs/decisions/0036-verified-work.md).

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
7. After `session_lost` the step is open again, unless it is being applied. What is averaged in the
   held stage stays averaged: a coordinator that has decided the step sends its Apply again.
8. Sums are stated only of the attempt that is averaged here, to the session that asked for them;
   a check that cannot be answered fails the attempt, and one of another attempt is ignored.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass
from enum import Enum, auto
from typing import ClassVar, Generic, NewType

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import (
    MAX_SENTENCE_CHARACTERS,
    MicrobatchIndex,
    PeerId,
    StageIndex,
    Step,
    Version,
)
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
    SumCheck,
    SumsChecked,
)
from swarm_shared.volunteer_rules.stage_account import ReceiptT, StageAccount

CloseOrder = Close | SumCheck | AbortRound | Apply | SaveSnapshot

MAX_QUEUED_ORDERS = 64
"""Maximum number of orders that wait to be carried out; each takes a moment, and up to some
megabytes."""

_NEXT_LOST = "the next stage was lost"
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
    lane: ClassVar = Lane.HELD
    step: Step
    microbatches: tuple[MicrobatchIndex, ...]


@dataclass(frozen=True, slots=True)
class EmptyAccumulator:
    """Empty the held stage's accumulator of the step. Answer: `emptied`."""

    work: WorkNumber
    lane: ClassVar = Lane.HELD
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
class StateSums:
    """Sign the digests of the inputs and results of all reductions of the attempt, in both lanes:
    those of the close in its order, then those of `moving`. Answer: `answered`."""

    work: WorkNumber
    lane: ClassVar = Lane.HELD
    order: SumCheck
    close: Close


@dataclass(frozen=True, slots=True)
class ApplyStep:
    """Apply the averaged gradient to the stage. Answer: `applied`."""

    work: WorkNumber
    lane: Lane
    order: Apply


@dataclass(frozen=True, slots=True)
class SaveState:
    """Write a snapshot of the held stage. Answer: `answered`."""

    work: WorkNumber
    lane: ClassVar = Lane.HELD
    request: SaveSnapshot


Work = (
    PrepareRound | Uncommit | EmptyAccumulator | Reduce | ComputeNorm | StateSums | ApplyStep
    | SaveState
)  # fmt: skip
"""Any of these may instead be answered by `failed`."""


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Stop the work; a result that arrives nevertheless is ignored."""

    work: WorkNumber


# ---- decisions: everything else

CloseAnswer = RoundReport | SumsChecked | Applied | SnapshotReady | SnapshotFailed


@dataclass(frozen=True, slots=True)
class Send:
    """Send to the coordinator."""

    message: CloseAnswer


@dataclass(frozen=True, slots=True)
class StepApplied:
    """The step is applied in this stage. The peer counted so many microbatches of it, all of them
    in the stage that was held when they were computed."""

    stage: StageIndex
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
class _Attempt(Generic[ReceiptT]):
    """The latest attempt to close, until it is aborted or applied."""

    close: Close
    target: StageAccount[ReceiptT] | None
    """The prepared stage that the Apply of this attempt makes the held one; None if the peer does
    not move."""
    outcome: _Outcome = _Outcome.RUNNING
    own_squared: float = 0.0
    tied_squared: float = 0.0

    def is_of(self, order: SumCheck | Apply | AbortRound) -> bool:
        return (self.close.step, self.close.attempt) == (order.step, order.attempt)


@dataclass(slots=True, eq=False)
class _LaneProgress(Generic[ReceiptT]):
    """One lane of the running attempt."""

    lane: Lane
    attempt: _Attempt[ReceiptT]
    reductions: deque[Reduction]
    """Parts that are not averaged yet."""
    reset_report: RoundReport | None = None
    """The report to send once the accumulator is emptied, if it has to be."""


@dataclass(frozen=True, slots=True)
class _Order:
    session: int
    message: Close | SumCheck | Apply | SaveSnapshot


@dataclass(frozen=True, slots=True)
class _Execution(Generic[ReceiptT]):
    """A SumCheck, Apply or SaveSnapshot that is being carried out."""

    session: int
    work: StateSums | ApplyStep | SaveState
    account: StageAccount[ReceiptT]
    """The account of the stage in which the order is carried out."""


class StepClose(Generic[ReceiptT]):
    """Closes the steps of one held stage, from its installation to its end."""

    def __init__(self, account: StageAccount[ReceiptT]) -> None:
        self._account = account
        self._prepared: StageAccount[ReceiptT] | None = None
        self._session = 0
        """Number of the session from which orders arrive now."""
        self._orders: deque[_Order] = deque()
        self._attempt: _Attempt[ReceiptT] | None = None
        self._lanes: dict[WorkNumber, _LaneProgress[ReceiptT]] = {}
        """Lanes of the running attempt that are not finished, by their present work."""
        self._execution: _Execution[ReceiptT] | None = None
        self._last_applied: tuple[Apply, Applied] | None = None
        self._numbers = itertools.count(1)
        self._actions: list[Action] = []

    @property
    def averaged_attempt(self) -> int | None:
        """The attempt of the next step whose averaged gradient the held stage has; hellos report
        it."""
        attempt = self._attempt
        if attempt is None or attempt.outcome is not _Outcome.AVERAGED:
            return None
        return attempt.close.attempt

    def take_actions(self) -> list[Action]:
        """Return the decisions made since the previous call, in order."""
        actions, self._actions = self._actions, []
        return actions

    # ---- the coordinator

    def order(self, message: CloseOrder) -> None:
        """Accept an order. ProtocolError when MAX_QUEUED_ORDERS wait already."""
        if isinstance(message, AbortRound):
            self._abort(message)
        elif len(self._orders) >= MAX_QUEUED_ORDERS:
            raise ProtocolError(
                f"{MAX_QUEUED_ORDERS} orders of the coordinator already wait to be carried out; "
                "this volunteer attaches again"
            )
        else:
            self._orders.append(_Order(self._session, message))
        self._carry_out_orders()

    def session_lost(self) -> None:
        """End the running attempt, whose report cannot be sent. The prepared stage is of no use to
        it any more: `prepared_lost` follows, because its tenure ends with the session, too."""
        self._session += 1
        self._cancel_lanes()
        applying = self._applying()
        self._cancel_statement()
        if applying is Lane.PREPARED:
            self._cancel_execution()
        if self._attempt is not None and self._attempt.outcome is _Outcome.AVERAGED:
            self._attempt.target = None
        else:
            self._attempt = None
        if applying is not Lane.HELD:
            self._account.reopen()
        self._carry_out_orders()

    # ---- the stage beside the held one

    def stage_prepared(self, account: StageAccount[ReceiptT]) -> None:
        """Report that a stage for a move is loaded; `account` is that stage's."""
        self._prepared = account

    def prepared_lost(self) -> None:
        """The prepared stage is gone. An attempt that needs it fails; an Apply that needs it cannot
        be carried out."""
        self._prepared = None
        attempt = self._attempt
        if self._applying() is Lane.PREPARED:
            self._cancel_execution()
            self._actions.append(Rejoin())
        elif (
            attempt is not None
            and attempt.target is not None
            and (attempt.outcome is _Outcome.RUNNING or self._states_sums)
        ):
            self._fail(attempt, _failure(attempt.close, _NEXT_LOST))
        self._carry_out_orders()

    # ---- results

    def round_prepared(
        self, work: WorkNumber, microbatches: tuple[MicrobatchIndex, ...], *, finite: bool
    ) -> None:
        """The accumulator is copied; it contained `microbatches`."""
        progress = self._lanes.pop(work, None)
        if progress is None:
            return
        if progress.lane is Lane.HELD:
            self._reconcile(progress, microbatches, finite=finite)
        else:
            self._reduce_next(progress)
        self._carry_out_orders()

    def uncommitted(self, work: WorkNumber, *, done: bool) -> None:
        """The microbatches are removed, or (not `done`) none of them is."""
        progress = self._lanes.pop(work, None)
        if progress is not None and done:
            self._prepare_round(progress)
        elif progress is not None:
            self._empty(progress)

    def emptied(self, work: WorkNumber) -> None:
        """The accumulator of the step is empty."""
        progress = self._lanes.pop(work, None)
        if progress is not None and progress.reset_report is not None:
            self._fail(progress.attempt, progress.reset_report)
            self._carry_out_orders()

    def averaged(self, work: WorkNumber) -> None:
        """One part is averaged."""
        progress = self._lanes.pop(work, None)
        if progress is not None:
            self._reduce_next(progress)

    def averaging_failed(
        self, work: WorkNumber, reason: str, culprit: PeerId | None, *, carrier_failed: bool,
        aborted_by: PeerId | None = None,
    ) -> None:  # fmt: skip
        """The average of one part has failed for all its members; its input is unchanged."""
        progress = self._lanes.pop(work, None)
        if progress is not None:
            report = _failure(progress.attempt.close, reason).model_copy(
                update={
                    "culprit": culprit, "carrier_failed": carrier_failed, "aborted_by": aborted_by,
                }
            )  # fmt: skip
            self._fail(progress.attempt, report)
            self._carry_out_orders()

    def norm_computed(
        self, work: WorkNumber, *, own_squared: float, tied_squared: float, finite: bool
    ) -> None:
        """Report the squared norms of all parts of a lane."""
        progress = self._lanes.pop(work, None)
        if progress is None:
            return
        attempt, held = progress.attempt, progress.lane is Lane.HELD
        if not finite:
            which = "the" if held else "the next stage's"
            reason = f"{which} averaged gradient is not finite"
            self._fail(attempt, _failure(attempt.close, reason, not_finite=held))
        else:
            if held:
                attempt.own_squared, attempt.tied_squared = own_squared, tied_squared
            if not self._lanes:
                self._succeed(attempt)
        self._carry_out_orders()

    def answered(self, work: WorkNumber, answer: SumsChecked | SnapshotReady) -> None:
        """The statement is signed, or the snapshot written."""
        execution = self._finished(work)
        if execution is not None:
            self._send(execution.session, answer)
            self._carry_out_orders()

    def applied(self, work: WorkNumber, *, digest: str, norm: float) -> None:
        """The step is applied, and the accumulator of the step is empty."""
        execution = self._finished(work)
        if execution is None or not isinstance(execution.work, ApplyStep):
            return
        order, account = execution.work.order, execution.account
        answer = Applied(step=order.step, digest=digest, norm=norm)
        counted = self._account.count(order.step)
        account.applied(Version(order.step))
        self._attempt = None
        self._actions.append(StepApplied(account.stage, order.step, counted))
        self._send(execution.session, answer)
        if execution.work.lane is Lane.HELD:
            self._last_applied = order, answer
            self._drop_prepared()
            self._carry_out_orders()
        else:
            self._actions.append(SwitchToPrepared())

    def failed(self, work: WorkNumber, reason: str) -> None:
        """The work could not be done; nothing has changed. A held stage whose worker has died gives
        no result at all: its tenure ends, and this object with it."""
        progress = self._lanes.pop(work, None)
        if progress is not None:
            prefix = "" if progress.lane is Lane.HELD else "of the next stage: "
            self._fail(progress.attempt, _failure(progress.attempt.close, prefix + reason))
        elif (execution := self._finished(work)) is not None:
            self._execution_failed(execution, reason)
        self._carry_out_orders()

    def _execution_failed(self, execution: _Execution[ReceiptT], reason: str) -> None:
        match execution.work:
            case StateSums():
                if self._attempt is not None:
                    self._fail(self._attempt, _failure(self._attempt.close, reason))
            case ApplyStep() as apply:
                self._apply_failed(execution.session, apply, reason)
            case SaveState(request=request):
                why = reason[:MAX_SENTENCE_CHARACTERS]
                failure = SnapshotFailed(version=request.version, stage=request.stage, reason=why)
                self._send(execution.session, failure)

    # ---- orders

    def _carry_out_orders(self) -> None:
        while self._orders and not self._lanes and self._execution is None:
            order = self._orders.popleft()
            message = order.message
            if isinstance(message, Apply):
                self._apply(order.session, message)
            elif isinstance(message, SaveSnapshot):
                work = SaveState(self._number(), message)
                self._execute(_Execution(order.session, work, self._account))
            elif order.session == self._session and isinstance(message, SumCheck):
                self._check_sums(message)
            elif order.session == self._session and isinstance(message, Close):
                # No member joins an attempt of a lost session: averaging would wait until it fails.
                self._close(message)

    def _close(self, close: Close) -> None:
        if close.step != self._account.step:
            reason = f"this peer can close step {self._account.step}"
            self._send(self._session, _failure(close, reason, missing=close.committed))
            return
        target = self._prepared if close.moving else None
        self._attempt = attempt = _Attempt(close, target)
        self._account.settle()
        if close.moving and (target is None or target.step != close.step):
            self._fail(attempt, _failure(close, "no stage is prepared for this move"))
            return
        self._prepare_round(_LaneProgress(Lane.HELD, attempt, deque(close.reductions)))
        if close.moving:
            # At once: the new stage's members do not wait until the old stage is averaged.
            self._prepare_round(_LaneProgress(Lane.PREPARED, attempt, deque(close.moving)))

    def _abort(self, message: AbortRound) -> None:
        """End an attempt, whether it waits, runs or is averaged; the step is open again."""
        aborted = (message.step, message.attempt)
        self._orders = deque(
            order
            for order in self._orders
            if not isinstance(order.message, Close | SumCheck)
            or (order.message.step, order.message.attempt) != aborted
        )
        if self._attempt is not None and self._attempt.is_of(message) and not self._applying():
            self._cancel_lanes()
            self._cancel_statement()
            self._attempt = None
            self._account.reopen()

    def _check_sums(self, order: SumCheck) -> None:
        attempt = self._attempt
        if attempt is None or attempt.outcome is not _Outcome.AVERAGED or not attempt.is_of(order):
            return
        lost = attempt.target is None or attempt.target is not self._prepared
        if attempt.close.moving and lost:
            self._fail(attempt, _failure(attempt.close, _NEXT_LOST))
        else:
            work = StateSums(self._number(), order, attempt.close)
            self._execute(_Execution(self._session, work, self._account))

    def _apply(self, session: int, order: Apply) -> None:
        attempt = self._attempt
        if attempt is not None and attempt.outcome is _Outcome.AVERAGED and attempt.is_of(order):
            lane = Lane.HELD if attempt.target is None else Lane.PREPARED
            account = attempt.target or self._account
            if account in (self._account, self._prepared):
                work = ApplyStep(self._number(), lane, order)
                self._execute(_Execution(session, work, account))
                return
        if self._last_applied is not None and self._last_applied[0] == order:
            self._send(session, self._last_applied[1])
        elif session == self._session:
            self._actions.append(Rejoin())
            self._drop_prepared()

    def _apply_failed(self, session: int, work: ApplyStep, reason: str) -> None:
        if work.lane is Lane.PREPARED:
            # The run counts on this peer in its new stage.
            self._actions.append(Rejoin())
            return
        # The other members apply the step; the stage held here is out of date.
        self._attempt = None
        if session != self._session:
            self._account.reopen()
        order = work.order
        report = RoundReport(
            step=order.step, attempt=order.attempt, ok=False, reset=True,
            reason=reason[:MAX_SENTENCE_CHARACTERS],
        )  # fmt: skip
        self._send(session, report)
        self._drop_prepared()

    def _drop_prepared(self) -> None:
        self._prepared = None
        self._actions.append(DropPrepared())

    # ---- one attempt

    def _prepare_round(self, progress: _LaneProgress[ReceiptT]) -> None:
        work = self._lane_work(progress)
        self._actions.append(PrepareRound(work, progress.lane, progress.attempt.close.step))

    def _reconcile(
        self,
        progress: _LaneProgress[ReceiptT],
        microbatches: tuple[MicrobatchIndex, ...],
        *,
        finite: bool,
    ) -> None:
        """Make the copy contain exactly the committed microbatches, or report why it cannot."""
        attempt, close, account = progress.attempt, progress.attempt.close, self._account
        if extra := tuple(sorted(set(microbatches) - set(close.committed))):
            account.removed(close.step, extra)
            reason = f"{len(extra)} extra microbatches could not be removed"
            progress.reset_report = _failure(close, reason, reset=True)
            self._actions.append(Uncommit(self._lane_work(progress), close.step, extra))
        elif not finite:
            # Each one was finite when it was added; after this no part of the sum is trusted.
            reason = "the sum of its gradients is not finite"
            progress.reset_report = _failure(close, reason, reset=True, not_finite=True)
            self._empty(progress)
        elif missing := tuple(sorted(set(close.committed) - set(microbatches))):
            account.removed(close.step, missing)
            reason = f"{len(missing)} committed microbatches are not held here"
            self._fail(attempt, _failure(close, reason, missing=missing))
        else:
            self._reduce_next(progress)

    def _empty(self, progress: _LaneProgress[ReceiptT]) -> None:
        step = progress.attempt.close.step
        self._account.emptied(step)
        self._actions.append(EmptyAccumulator(self._lane_work(progress), step))

    def _reduce_next(self, progress: _LaneProgress[ReceiptT]) -> None:
        work, close = self._lane_work(progress), progress.attempt.close
        if progress.reductions:
            reduction = progress.reductions.popleft()
            self._actions.append(Reduce(work, progress.lane, close.step, close.attempt, reduction))
        else:
            self._actions.append(ComputeNorm(work, progress.lane, close.step))

    def _succeed(self, attempt: _Attempt[ReceiptT]) -> None:
        attempt.outcome = _Outcome.AVERAGED
        report = RoundReport(
            step=attempt.close.step, attempt=attempt.close.attempt, ok=True,
            own_squared=attempt.own_squared, tied_squared=attempt.tied_squared,
        )  # fmt: skip
        self._send(self._session, report)

    def _fail(self, attempt: _Attempt[ReceiptT], report: RoundReport) -> None:
        self._cancel_lanes()
        self._cancel_statement()
        attempt.outcome = _Outcome.FAILED
        self._send(self._session, report)

    # ---- work

    def _number(self) -> WorkNumber:
        return WorkNumber(next(self._numbers))

    def _lane_work(self, progress: _LaneProgress[ReceiptT]) -> WorkNumber:
        """Number the lane's next piece of work."""
        work = self._number()
        self._lanes[work] = progress
        return work

    def _cancel_lanes(self) -> None:
        self._actions += map(CancelWork, self._lanes)
        self._lanes.clear()

    def _execute(self, execution: _Execution[ReceiptT]) -> None:
        self._execution = execution
        self._actions.append(execution.work)

    def _finished(self, work: WorkNumber) -> _Execution[ReceiptT] | None:
        """The execution that this result ends; None when it was cancelled."""
        execution = self._execution
        if execution is None or execution.work.work != work:
            return None
        self._execution = None
        return execution

    def _applying(self) -> Lane | None:
        """The stage to which a step is being applied."""
        work = self._execution.work if self._execution is not None else None
        return work.lane if isinstance(work, ApplyStep) else None

    @property
    def _states_sums(self) -> bool:
        return self._execution is not None and isinstance(self._execution.work, StateSums)

    def _cancel_statement(self) -> None:
        if self._states_sums:
            self._cancel_execution()

    def _cancel_execution(self) -> None:
        if self._execution is not None:
            self._actions.append(CancelWork(self._execution.work.work))
            self._execution = None

    def _send(self, session: int, message: CloseAnswer) -> None:
        if session == self._session:
            self._actions.append(Send(message))


def _failure(
    close: Close,
    reason: str,
    *,
    missing: tuple[MicrobatchIndex, ...] = (),
    reset: bool = False,
    not_finite: bool = False,
) -> RoundReport:
    return RoundReport(
        step=close.step, attempt=close.attempt, ok=False, reason=reason[:MAX_SENTENCE_CHARACTERS],
        missing=missing, reset=reset, not_finite=not_finite,
    )  # fmt: skip
