"""Carries out the step closes of one held stage (`swarm_shared.volunteer_rules.step_close`
decides)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import trio

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.pipeline.held_stage import Holding, LoadedStage
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import Step
from swarm_shared.protocol import (
    AbortRound,
    Apply,
    Close,
    Reduction,
    SaveSnapshot,
    SnapshotReady,
    SumCheck,
    SumsChecked,
)
from swarm_shared.volunteer_rules.step_close import (
    ApplyStep,
    CancelWork,
    CloseOrder,
    ComputeNorm,
    DropPrepared,
    EmptyAccumulator,
    Lane,
    PrepareRound,
    Reduce,
    Rejoin,
    SaveState,
    Send,
    StateSums,
    StepApplied,
    SwitchToPrepared,
    Uncommit,
    Work,
    WorkNumber,
)


class Averager(Protocol):
    """Carries out one reduction over the named group."""

    async def reduce(
        self, worker: StageWorker, step: Step, attempt: int, reduction: Reduction
    ) -> None:
        """Fill this part of the worker's result segment, or raise RoundFailed."""

    def attempt_over(self, step: Step, attempt: int) -> None:
        """The attempt is aborted or applied: there will be no check of its sums."""


class SumStatements(Protocol):
    """Signs what the reductions of an averaged attempt got and gave."""

    async def state(
        self, check: SumCheck, close: Close, held: StageWorker, prepared: StageWorker | None
    ) -> SumsChecked:
        """Sign the digests of all reductions of the averaged attempt. SwarmError where one is
        lost."""


class Snapshots(Protocol):
    """Writes snapshots of stages."""

    async def save(self, holding: Holding, request: SaveSnapshot) -> SnapshotReady:
        """Write the state of the held stage to a file that peers can download."""


class CloseListener(Protocol):
    """The stage manager, which carries out all decisions but the work."""

    def close_decided(
        self, decision: Send | StepApplied | Rejoin | SwitchToPrepared | DropPrepared
    ) -> None:
        """Carry out a decision of the step close."""


@dataclass(slots=True, eq=False)
class StepCloser:
    """Carries out what the rules of the step close decide, in `nursery`, which lives as long as the
    held stage is served."""

    holding: Holding
    step_tokens: int
    averager: Averager
    sums: SumStatements
    snapshots: Snapshots
    listener: CloseListener
    nursery: trio.Nursery
    _workers: dict[Lane, StageWorker] = field(default_factory=dict, init=False)
    _running: dict[WorkNumber, trio.CancelScope] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._workers[Lane.HELD] = self.holding.worker

    def put(self, message: CloseOrder) -> None:
        """Accept an order. ProtocolError when too many wait already."""
        if isinstance(message, AbortRound | Apply):
            self.averager.attempt_over(message.step, message.attempt)
        self.holding.close.order(message)
        self._carry_out()

    def session_lost(self) -> None:
        """Cancel what was done for the session that has ended."""
        self.holding.close.session_lost()
        self._carry_out()

    def stage_prepared(self, stage: LoadedStage) -> None:
        """Let this volunteer move to `stage`, which is loaded, with the Apply of a close."""
        self._workers[Lane.PREPARED] = stage.worker
        self.holding.close.stage_prepared(stage.account)
        self._carry_out()

    def prepared_lost(self) -> None:
        """Forget the prepared stage, whose worker has died or whose assignment is over."""
        self.holding.close.prepared_lost()
        self._carry_out()

    def _carry_out(self) -> None:
        for action in self.holding.close.take_actions():
            match action:
                case CancelWork():
                    self._running.pop(action.work).cancel()
                case Send() | StepApplied() | Rejoin() | SwitchToPrepared() | DropPrepared():
                    self.listener.close_decided(action)
                case _:
                    worker, scope = self._workers[action.lane], trio.CancelScope()
                    self._running[action.work] = scope
                    self.nursery.start_soon(self._work, action, worker, scope)

    async def _work(self, work: Work, worker: StageWorker, scope: trio.CancelScope) -> None:
        with scope:
            await trio.lowlevel.checkpoint_if_cancelled()
            try:
                await self._perform(work, worker)
            except RoundFailed as error:
                self.holding.close.averaging_failed(
                    work.work, f"all-reduce: {error}", error.culprit,
                    carrier_failed=error.failure is RoundFailure.CARRIER,
                    aborted_by=error.aborted_by,
                )  # fmt: skip
            except SwarmError as error:
                died = isinstance(error, WorkerDied) and worker is self.holding.worker
                if died and not isinstance(work, SaveState):
                    return  # its tenure waits for the same death, and reports it
                self.holding.close.failed(work.work, str(error))
        if not scope.cancelled_caught:
            self._running.pop(work.work, None)
            self._carry_out()

    async def _perform(self, work: Work, worker: StageWorker) -> None:
        """Do the work and give its result to the rules."""
        rules, number = self.holding.close, work.work
        match work:
            case PrepareRound():
                prepared = await worker.prepare_round(work.step)
                rules.round_prepared(number, prepared.microbatches, finite=prepared.finite)
            case Uncommit():
                done = await worker.uncommit(work.step, work.microbatches)
                rules.uncommitted(number, done=done)
            case EmptyAccumulator():
                await worker.reset_accumulator(work.step)
                rules.emptied(number)
            case Reduce():
                if work.lane is Lane.HELD and work.reduction.part == "own":
                    faults.inject_outage(FaultPoint.ALL_REDUCE, work.step)
                await self.averager.reduce(worker, work.step, work.attempt, work.reduction)
                rules.averaged(number)
            case ComputeNorm():
                if work.lane is Lane.HELD:
                    faults.inject_outage(FaultPoint.NORM, work.step)
                norm = await worker.norm(work.step, self.step_tokens)
                rules.norm_computed(
                    number, own_squared=norm.own_squared, tied_squared=norm.tied_squared,
                    finite=norm.finite,
                )  # fmt: skip
            case StateSums():
                next_worker = self._workers.get(Lane.PREPARED)
                answer = await self.sums.state(work.order, work.close, worker, next_worker)
                rules.answered(number, answer)
            case ApplyStep():
                order = work.order
                if work.lane is Lane.HELD:
                    faults.inject_outage(FaultPoint.APPLY, order.step)
                done_apply = await worker.apply(
                    order.step, self.step_tokens, order.global_norm, order.learning_rate
                )
                rules.applied(number, digest=done_apply.digest, norm=done_apply.norm)
            case SaveState():
                rules.answered(number, await self.snapshots.save(self.holding, work.request))
