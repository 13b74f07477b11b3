"""Runs the tenures of stages (`swarm_shared.volunteer_rules.stage_tenure` decides) and serves the
held one.

One task per tenure: start the worker, bring it to the assigned version, and serve until the
assignment ends or the worker dies.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field

import trio

from swarm_client.auditing.sum_statements import SumSigner
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.membership.membership import CurrentMembership
from swarm_client.pipeline.held_stage import Holding, LoadedStage
from swarm_client.pipeline.pipeline import Pipeline
from swarm_client.pipeline.step_close import StepCloser
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_client.stage.protocol.messages import SetLimits
from swarm_client.volunteer.context import VolunteerContext
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_client.volunteer.reconnect import Attachment
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_client.volunteer.stage_loader import StageLoader, inject_faults
from swarm_shared.base.errors import ProtocolError, SwarmError
from swarm_shared.base.text import memory_text
from swarm_shared.base.types import MAX_MICROBATCHES, StageIndex
from swarm_shared.protocol import AssignStage, Drop, Dropped
from swarm_shared.volunteer_rules import stage_tenure, step_close
from swarm_shared.volunteer_rules.stage_tenure import Load, StageTenures, TenureNumber
from swarm_shared.volunteer_rules.step_close import CloseOrder

MAX_DROPPED = 2 * MAX_MICROBATCHES
"""Most microbatches of all orders to take some out that wait for the worker."""

DROP_COST = 8
"""What each of these orders counts beside its microbatches, in microbatches: it is a task of its
own."""


@dataclass(slots=True, eq=False)
class _RunningTenure:
    """The task of one tenure."""

    load: Load
    """The latest assignment."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    serving: trio.CancelScope = field(default_factory=trio.CancelScope)
    """Scope of the work under the latest assignment; the worker outlives it."""
    worker: StageWorker | None = None
    """The worker of the tenure, while its process lives."""
    loaded: tuple[LoadedStage, trio.Nursery] | None = None
    """The loaded stage and the nursery of what is done for it, while the worker lives."""


@dataclass(slots=True, eq=False)
class StageManager:
    """The stage that an admitted volunteer holds, if any, and the one that it prepares for a
    move."""

    context: VolunteerContext
    membership: CurrentMembership
    attachment: Attachment
    averager: GroupAverager
    snapshots: SnapshotStore
    pipeline: Pipeline
    loader: StageLoader
    _rules: StageTenures = field(default_factory=StageTenures, init=False)
    _running: dict[TenureNumber, _RunningTenure] = field(default_factory=dict, init=False)
    _step_closer: StepCloser | None = field(default=None, init=False)
    """The step closer of the stage that is served."""
    _tenure_ended: trio.lowlevel.ParkingLot = field(
        default_factory=trio.lowlevel.ParkingLot, init=False
    )
    _dropping: int = field(default=0, init=False)
    """The sum of what the orders in progress to take microbatches out count, in microbatches."""

    @property
    def loading_stage(self) -> StageIndex | None:
        """The stage that is being loaded while none is held."""
        return self._rules.loading_stage

    def take(self, assignment: AssignStage) -> None:
        """Start on the assignment, beside the held stage or in its place. ProtocolError for a stage
        that the run does not have."""
        count = self.membership.now.manifest.stage_count
        if assignment.stage >= count:
            raise ProtocolError(
                f"the coordinator assigned stage {assignment.stage}, and the run has {count} "
                "stages, counted from 0; this volunteer attaches again"
            )
        self._rules.assigned(assignment)
        self._carry_out()

    def put_close_order(self, message: CloseOrder) -> None:
        """Hand an order of the step close to the held stage; without one it is void."""
        if self._step_closer is not None:
            self._step_closer.put(message)

    def drop_microbatches(self, order: Drop) -> None:
        """Take microbatches out of the step's accumulator, and answer when it is done.
        ProtocolError when too many of these orders wait already."""
        step_closer = self._step_closer
        if step_closer is None or step_closer.holding.stage != order.stage:
            self._dropped(order)
        elif self._dropping + _cost(order) > MAX_DROPPED:
            raise ProtocolError(
                "too many orders of the coordinator to take microbatches out already wait; this "
                "volunteer attaches again"
            )
        else:
            self._dropping += _cost(order)
            step_closer.holding.account.removed(order.step, order.microbatches)
            self.context.nursery.start_soon(self._take_out, step_closer.holding, order)

    async def _take_out(self, holding: Holding, order: Drop) -> None:
        account, worker = holding.account, holding.worker
        try:
            done = False
            with contextlib.suppress(RequestFailed):  # a failed computation has taken out none
                done = await worker.uncommit(order.step, order.microbatches)
            if not done:
                # Before: no receipt outlives its gradient. Again after: a microbatch that was
                # accumulated meanwhile is gone, too, and must not be signed.
                account.emptied(order.step)
                await worker.reset_accumulator(order.step)
                account.emptied(order.step)
        except WorkerDied:
            return  # the tenure ends, and the coordinator clears what this peer had counted
        except RequestFailed as error:
            # The step is over, and its accumulator empty.
            self.context.report(f"step {order.step} is over: {error}")
        finally:
            self._dropping -= _cost(order)
        # Again: a computation that ended before the removal may have found them in the accumulator.
        account.removed(order.step, order.microbatches)
        self._dropped(order)

    def _dropped(self, order: Drop) -> None:
        self.attachment.send(
            Dropped(step=order.step, stage=order.stage, microbatches=order.microbatches)
        )

    def session_lost(self) -> None:
        if self._step_closer is not None:
            self._step_closer.session_lost()
        self._rules.session_lost()
        self._carry_out()

    async def drop(self) -> None:
        """End the held and the prepared stage with their workers."""
        self._rules.drop()
        self._carry_out()
        while not self._rules.all_ended:
            await self._tenure_ended.park()

    def limits_changed(self) -> None:
        """Have all workers keep to what they may use now; a busy worker does so afterwards."""
        for tenure in self._running.values():
            if tenure.worker is not None:
                stage = tenure.load.assignment.stage
                self.context.nursery.start_soon(self._limit, tenure.worker, stage)

    def offer_changed(self) -> None:
        """Have all workers keep to what a stage may take now; hand a stage over that takes more."""
        self.limits_changed()
        if self._step_closer is not None:
            self._check_offer(self._step_closer.holding)

    def _check_offer(self, holding: Holding) -> None:
        missing = self.loader.missing_memory(holding.stage, holding.worker)
        if missing:
            self.context.report(f"stage {holding.stage} is handed over: {missing}")
            self.context.options.shortage.offer_fell()

    async def _limit(self, worker: StageWorker, stage: StageIndex) -> None:
        limits = self.context.options.limits
        request = SetLimits(
            duty_cycle=limits.duty_cycle, threads=limits.threads, vram_bytes=limits.vram_bytes,
            graph_bytes=self.loader.graph_bytes(stage),
            host_graph_bytes=self.loader.host_graph_bytes(stage),
        )  # fmt: skip
        # A dead worker is handled by its tenure; the next one is limited at its start.
        with contextlib.suppress(WorkerDied):
            await worker.limit(request)

    # ---- decisions of the tenures

    def _carry_out(self) -> None:
        for action in self._rules.take_actions():
            self._carry_out_one(action)

    def _carry_out_one(self, action: stage_tenure.Action) -> None:
        match action:
            case stage_tenure.StartTenure():
                if action.replaces_held:
                    inject_faults(FaultPoint.STAGE_MIGRATION, action.load.assignment.version)
                tenure = self._running[action.load.tenure] = _RunningTenure(action.load)
                self.context.nursery.start_soon(self._run_tenure, tenure)
            case stage_tenure.Reload():
                self._hold(None)
                tenure = self._running[action.load.tenure]
                tenure.load = action.load
                tenure.serving.cancel()
            case stage_tenure.EndTenure():
                self._running[action.tenure].scope.cancel()
            case stage_tenure.Install():
                self._hold(None)
                # A worker that has just died is not served; its tenure ends in a moment.
                if (loaded := self._loaded(action.tenure)) is not None:
                    self._install(*loaded, switched=action.switched)
            case stage_tenure.PreparedReady():
                loaded = self._loaded(action.tenure)
                if self._step_closer is not None and loaded is not None:
                    self._step_closer.stage_prepared(loaded[0])
            case stage_tenure.PreparedLost():
                if self._step_closer is not None:
                    self._step_closer.prepared_lost()
            case stage_tenure.ForgetSnapshots():
                self.snapshots.forget()
            case stage_tenure.Send():
                self.attachment.send(action.message)
            case stage_tenure.RejoinAfter():
                self.context.nursery.start_soon(self._rejoin_after, action)

    def _loaded(self, number: TenureNumber) -> tuple[LoadedStage, trio.Nursery] | None:
        tenure = self._running.get(number)
        return None if tenure is None else tenure.loaded

    def _install(self, stage: LoadedStage, nursery: trio.Nursery, *, switched: bool) -> None:
        """Make this the held stage."""
        if switched:
            # Snapshots of the stage that is left stay served: other peers may be fetching them.
            inject_faults(FaultPoint.STAGE_MIGRATION, stage.account.version)
        manifest, number = self.membership.now.manifest, stage.account.stage
        is_last = number == manifest.stage_count - 1
        next_stage = (
            None if is_last else self.pipeline.links.downstream(StageIndex(number + 1), nursery)
        )
        holding = Holding(stage.worker, stage.account, next_stage)
        closer = StepCloser(
            holding, manifest.tokens_per_step, self.averager,
            SumSigner(self.context.identity, self.membership, self.averager), self.snapshots, self,
            nursery,
        )  # fmt: skip
        self._hold(closer)
        nursery.start_soon(self._report_short_memory, holding)
        self._check_offer(holding)
        if switched:
            self.context.report(f"moved to stage {number}")

    async def _report_short_memory(self, holding: Holding) -> None:
        """Wait until the device has too little memory for the stage, and have it handed over."""
        await holding.memory.too_many.wait()
        self.context.report(
            f"this machine has too little memory left for stage {holding.stage}; the stage is "
            "handed over"
        )
        memory = self.membership.now.manifest.stages[holding.stage].memory
        self.context.options.shortage.began(memory, trio.current_time())

    def _hold(self, step_closer: StepCloser | None) -> None:
        self._step_closer = step_closer
        self.pipeline.hold(None if step_closer is None else step_closer.holding)

    async def _rejoin_after(self, lost: stage_tenure.RejoinAfter) -> None:
        self.context.report(f"{lost.reason}; joining again in {lost.seconds:.0f} s")
        await trio.sleep(lost.seconds)
        self.attachment.restart()

    # ---- decisions of the step close (`swarm_client.pipeline.step_close.CloseListener`)

    def close_decided(
        self,
        decision: step_close.Send
        | step_close.StepApplied
        | step_close.Rejoin
        | step_close.SwitchToPrepared
        | step_close.DropPrepared,
    ) -> None:
        """Carry out a decision of the step close."""
        match decision:
            case step_close.Send():
                self.attachment.send(decision.message)
            case step_close.StepApplied():
                self._step_applied(decision)
            case step_close.Rejoin():
                self.attachment.restart()
            case step_close.SwitchToPrepared():
                self._rules.switched()
            case step_close.DropPrepared():
                self._rules.prepared_outdated()
        self._carry_out()

    def _step_applied(self, applied: step_close.StepApplied) -> None:
        context, manifest = self.context, self.membership.now.manifest
        self._rules.step_applied()
        self.pipeline.step_applied()
        context.contribution.add_step(
            applied.step, applied.counted, manifest.tokens_per_microbatch,
            manifest.work_share(applied.stage),
        )  # fmt: skip
        context.report(
            f"step {applied.step} applied: stage {applied.stage}, "
            f"{applied.counted} microbatches here"
        )

    # ---- one tenure

    async def _run_tenure(self, tenure: _RunningTenure) -> None:
        number, died = tenure.load.tenure, None
        try:
            with tenure.scope:
                died = await self._run_worker(tenure)
        except SwarmError as error:
            self.context.report(
                f"stage {tenure.load.assignment.stage} could not be loaded: {error}"
            )
            self._rules.load_failed(number, str(error))
        else:
            if died is None:
                self._rules.ended(number)
            else:
                self._rules.worker_died(number, str(died))
        del self._running[number]
        self._carry_out()
        self._tenure_ended.unpark_all()

    async def _run_worker(self, tenure: _RunningTenure) -> WorkerDied | None:
        """Serve the assigned stage, and again when it is assigned again, until its worker dies."""
        is_fresh = True
        async with self.loader.open_worker(tenure.load.assignment.stage) as worker:
            tenure.worker = worker
            try:
                await self._limit(worker, tenure.load.assignment.stage)
                while True:
                    with trio.CancelScope() as tenure.serving:
                        return await self._serve(worker, tenure, is_fresh=is_fresh)
                    is_fresh = False
            finally:
                tenure.worker = None
        raise AssertionError("unreachable: the worker's context suppresses nothing")

    async def _serve(
        self, worker: StageWorker, tenure: _RunningTenure, *, is_fresh: bool
    ) -> WorkerDied:
        load, report = tenure.load, self.context.report
        description = f"stage {load.assignment.stage} at version {load.assignment.version}"
        if load.assignment.prepare:
            description += " beside the held one"
        report(f"taking {description}")
        try:
            digest = await self.loader.load(worker, load.assignment, is_fresh=is_fresh)
        except WorkerDied as error:
            return error
        async with trio.open_nursery() as nursery:
            stage = self.loader.loaded_stage(worker, load.assignment.version)
            tenure.loaded = stage, nursery
            self._rules.loaded(load, digest)
            self._carry_out()
            report(f"holding {description}")
            if is_fresh:
                report(f"this device computes as class {worker.configured.arithmetic}")
                streamed = worker.configured.streamed_bytes
                if streamed:
                    report(
                        f"{memory_text(streamed)} of the stage's weights lie in the host's memory, "
                        "as the device's is too little"
                    )
            try:
                died = await worker.wait_died()
            finally:
                tenure.loaded = None
                if (
                    self._step_closer is not None
                    and self._step_closer.holding.account is stage.account
                ):
                    self._hold(None)
            nursery.cancel_scope.cancel()
        return died


def _cost(order: Drop) -> int:
    return DROP_COST + len(order.microbatches)
