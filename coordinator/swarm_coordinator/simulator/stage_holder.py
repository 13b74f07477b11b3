"""The stages of a volunteer without a machine: the rules that ship, in simulated time.

`StageHolder` connects `stage_tenure`, `stage_account` and `step_close`
(`swarm_shared.volunteer_rules`) as the daemon does. A subclass models what takes time, and carries
messages: the volunteer of the simulated swarm, and that of the coordinator's benchmark. Loading and
closing always succeed; a worker never dies alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, TypeVar

from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_coordinator.simulator.transcripts import simulated_sums, simulated_transcript
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MemoryOffer, StreamedWork
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
)
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.work_statements import SumStatement
from swarm_shared.protocol import (
    AssignStage,
    ClientMessage,
    Close,
    SnapshotReady,
    StageRequest,
    SumCheck,
    SumsChecked,
    Welcome,
)
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.scheduling.placement.stage_sizes import StageSizes
from swarm_shared.volunteer_rules import stage_tenure, step_close
from swarm_shared.volunteer_rules.accumulated_set import AccumulatedSet
from swarm_shared.volunteer_rules.stage_account import Computation, StageAccount

DIGEST = "d"
"""Digest of every stage's parameters: what is simulated never differs."""
SNAPSHOT_SHA256 = "0" * 64

ReceiptT = TypeVar("ReceiptT")


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The kept inputs of a microbatch; a simulated worker can always compute it again."""

    nbytes: int = 0


INPUTS = _Inputs()


@dataclass(slots=True, eq=False)
class LoadedStage(Generic[ReceiptT]):
    """One stage in one worker, from its loading to its end or its next loading."""

    account: StageAccount[ReceiptT]
    close: step_close.StepClose[ReceiptT]
    receipt: Callable[[Step, MicrobatchIndex], ReceiptT]
    """Returns the receipt of a microbatch that it has counted."""
    transcript: Callable[[Step, MicrobatchIndex], Transcript]
    """Returns the transcript of a microbatch."""
    accumulated: AccumulatedSet[_Inputs] = field(default_factory=lambda: AccumulatedSet(0))

    def count(self, computation: Computation) -> ReceiptT | None:
        """Add a computed microbatch as the worker does; return its receipt, if there is one."""
        account, index = self.account, computation.microbatch
        added = account.works_on(computation.step) and self.accumulated.wants(
            index, computation.accumulate
        )
        if added:
            self.accumulated.add(index, INPUTS)
        transcript = self.transcript(computation.step, index)
        return account.finish(
            computation, added=added, tokens=0, loss_sum=None,
            transcript=transcript if index in self.accumulated else None,
        )  # fmt: skip


def first_request(
    welcome: Welcome, memory: MemoryOffer, work: StreamedWork, up_bytes_per_second: float
) -> StageRequest:
    """Return what a joining volunteer answers to its welcome."""
    try:
        stage = most_underserved_stage(welcome.stages, memory, work, up_bytes_per_second)
    except CapacityError:
        stage = StageIndex(0)  # the coordinator refuses it with the reason
    return StageRequest(stage=stage, up_bytes_per_second=up_bytes_per_second)


class StageHolder(ABC, Generic[ReceiptT]):
    """Orders of the coordinator in; messages, and work that takes time, out."""

    def __init__(
        self, peer: PeerId, run: RunId, manifest: Manifest, sizes: Sequence[StageSizes]
    ) -> None:
        self.peer = peer
        self.held: LoadedStage[ReceiptT] | None = None
        """The stage that it serves."""
        self.prepared: LoadedStage[ReceiptT] | None = None
        """The stage that it has loaded in addition, for a move."""
        self._run, self._manifest, self._sizes = run, manifest, sizes
        self._tenures = stage_tenure.StageTenures()
        self._loading: dict[stage_tenure.TenureNumber, AssignStage] = {}
        self._loaded: dict[stage_tenure.TenureNumber, LoadedStage[ReceiptT]] = {}

    @property
    def stage(self) -> StageIndex | None:
        return None if self.held is None else self.held.account.stage

    @property
    def _last_stage(self) -> StageIndex:
        return StageIndex(self._manifest.stage_count - 1)

    @property
    def loading(self) -> tuple[AssignStage, ...]:
        """The assignments that it is loading."""
        return tuple(self._loading.values())

    # ---- what a subclass models

    @abstractmethod
    def send(self, message: ClientMessage) -> None: ...
    @abstractmethod
    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Do it after some seconds, unless the volunteer is gone by then."""

    @abstractmethod
    def sign(self, receipt: Receipt) -> ReceiptT: ...
    @abstractmethod
    def begin_load(self, assignment: AssignStage) -> float:
        """Return the seconds until the stage is loaded."""

    @abstractmethod
    def work_seconds(self, work: step_close.Work, stage: StageIndex) -> float:
        """Return the duration of any work of a step close; 0: at once."""

    @abstractmethod
    def serves(self, *, switched: bool) -> None:
        """The held stage is at the assigned version (`switched`: by a move), and reported."""

    @abstractmethod
    def rejoin(self) -> None:
        """End the session and attach again."""

    def drawn(self, step: Step, microbatch: MicrobatchIndex) -> SampledTokens | None:
        """The token ids of a microbatch, for a coordinator that compares them."""
        return None

    def transcript(self, stage: StageIndex, step: Step, microbatch: MicrobatchIndex) -> Transcript:
        return simulated_transcript(
            step, microbatch, stage, self._last_stage, drawn=self.drawn(step, microbatch)
        )

    # What follows has no effect on a volunteer that models no more.

    def end_load(self, assignment: AssignStage) -> None:
        """The load of `begin_load` has ended or was given up."""

    def sign_sums(self, statement: SumStatement) -> str:
        """The signed statement; for a coordinator that checks sums."""
        return ""

    def stops(self) -> None:
        """The held stage is about to be given up."""

    def step_applied(self) -> None:
        """A step was applied."""

    def average(
        self, held: LoadedStage[ReceiptT], stage: StageIndex, work: step_close.Reduce
    ) -> None:
        """Begin an average, as if each member averaged for itself."""
        report = partial(held.close.averaged, work.work)
        self.later(self.work_seconds(work, stage), partial(self.finish, held, report))

    # ---- messages

    def assigned(self, message: AssignStage) -> None:
        self._tenures.assigned(message)
        self._carry_out()

    def ordered(self, message: step_close.CloseOrder) -> None:
        if self.held is not None:
            self.held.close.order(message)
            self._carry_out()

    def drop_stages(self) -> None:
        self._tenures.drop()
        self._carry_out()

    # ---- decisions

    def _carry_out(self) -> None:
        """Carry out all that has been decided; to be called after every report."""
        while True:
            if decided := self._tenures.take_actions():
                for action in decided:
                    self._change_tenure(action)
            elif self.held is not None and (orders := self.held.close.take_actions()):
                held = self.held
                for order in orders:
                    self._close(held, order)
            else:
                return

    def _change_tenure(self, action: stage_tenure.Action) -> None:
        match action:
            case stage_tenure.StartTenure(load) | stage_tenure.Reload(load):
                self._unload(load.tenure)
                self._loading[load.tenure] = load.assignment
                self.later(self.begin_load(load.assignment), partial(self._finish_load, load))
            case stage_tenure.EndTenure(tenure):
                self._unload(tenure)
                self._tenures.ended(tenure)
            case stage_tenure.Install(tenure, switched):
                if switched:
                    self.stops()
                    self.prepared = None
                self.held = self._loaded[tenure]
                if switched:
                    self.serves(switched=True)
            case stage_tenure.PreparedReady(tenure):
                self.prepared = self._loaded[tenure]
                if self.held is not None:
                    self.held.close.stage_prepared(self.prepared.account)
            case stage_tenure.PreparedLost():
                self.prepared = None
                if self.held is not None:
                    self.held.close.prepared_lost()
            case stage_tenure.Send(message):
                self.send(message)
            case stage_tenure.ForgetSnapshots() | stage_tenure.RejoinAfter():
                pass  # it keeps no snapshots, and its workers do not die alone

    def _finish_load(self, load: stage_tenure.Load) -> None:
        tenure, assignment = load.tenure, load.assignment
        if self._loading.get(tenure) is not assignment:
            return
        self._unload(tenure)
        receipt = self._receipts(assignment.stage)
        account = StageAccount(
            assignment.stage, assignment.version, self._manifest.training.staleness,
            lambda counted: receipt(counted.step, counted.microbatch),
        )  # fmt: skip
        stage = self._loaded[tenure] = LoadedStage(
            account,
            step_close.StepClose(account),
            receipt,
            partial(self.transcript, assignment.stage),
        )
        self._tenures.loaded(load, DIGEST)
        self._carry_out()
        if self.held is stage:
            self.serves(switched=False)

    def _unload(self, tenure: stage_tenure.TenureNumber) -> None:
        """Release what is loaded or being loaded."""
        assignment, loaded = self._loading.pop(tenure, None), self._loaded.pop(tenure, None)
        if assignment is not None:
            self.end_load(assignment)
        if loaded is not None and loaded is self.held:
            self.stops()
            self.held = None

    def _receipts(self, stage: StageIndex) -> Callable[[Step, MicrobatchIndex], ReceiptT]:
        """Return what signs the stage's receipts."""
        training, tokens = self._manifest.training, self._manifest.tokens_per_microbatch
        run, peer, samples = self._run, self.peer, training.sequences_per_microbatch
        loss_sum = 1.0 if stage == self._last_stage else None

        def receipt(step: Step, microbatch: MicrobatchIndex) -> ReceiptT:
            return self.sign(
                Receipt(
                    run=run, generation=Generation(1), step=step, microbatch=microbatch,
                    stage=stage, peer=peer, samples=samples, tokens=tokens, loss_sum=loss_sum,
                    transcript=self.transcript(stage, step, microbatch),
                )
            )  # fmt: skip

        return receipt

    # ---- the step close

    def _close(self, held: LoadedStage[ReceiptT], action: step_close.Action) -> None:
        match action:
            case step_close.Send(message):
                self.send(message)
            case step_close.StepApplied():
                self._tenures.step_applied()
                self.step_applied()
            case step_close.DropPrepared():
                self._tenures.prepared_outdated()
            case step_close.SwitchToPrepared():
                self._tenures.switched()
            case step_close.Rejoin():
                self.rejoin()
            case step_close.CancelWork():
                pass  # its result will be ignored
            case _:
                self._begin(held, action)

    def _begin(self, held: LoadedStage[ReceiptT], work: step_close.Work) -> None:
        stage = held if work.lane is step_close.Lane.HELD else self.prepared
        if stage is None:
            raise RuntimeError("a step close works in a stage that is not prepared")
        if isinstance(work, step_close.Reduce):
            self.average(held, stage.account.stage, work)
            return
        result = partial(self._work_in, stage, held.close, work)
        seconds = self.work_seconds(work, stage.account.stage)
        if seconds:
            self.later(seconds, partial(self.finish, held, result))
        else:
            result()

    def finish(self, held: LoadedStage[ReceiptT], report: Callable[[], None]) -> None:
        """Report the result of work, unless the stage has ended meanwhile."""
        if self.held is held:
            report()
            self._carry_out()

    def _work_in(
        self, stage: LoadedStage[ReceiptT], close: step_close.StepClose[ReceiptT],
        work: step_close.Work,
    ) -> None:  # fmt: skip
        """Do a piece of work and report it."""
        number, accumulated = work.work, stage.accumulated
        match work:
            case step_close.PrepareRound():
                close.round_prepared(number, accumulated.microbatches(), finite=True)
            case step_close.Uncommit(microbatches=extra):
                accumulated.remove(extra)
                close.uncommitted(number, done=True)
            case step_close.EmptyAccumulator():
                accumulated.clear()
                close.emptied(number)
            case step_close.ComputeNorm():
                close.norm_computed(number, own_squared=1.0, tied_squared=0.0, finite=True)
            case step_close.StateSums(order=asked_sums, close=averaged):
                close.answered(number, self._state_sums(stage, asked_sums, averaged))
            case step_close.ApplyStep():
                accumulated.clear()
                close.applied(number, digest=DIGEST, norm=1.0)
            case step_close.SaveState(request=asked):
                index, version = stage.account.stage, stage.account.version
                if (asked.stage, asked.version) != (index, version):
                    close.failed(number, f"this peer holds stage {index} at version {version}")
                    return
                ready = SnapshotReady(
                    version=version, stage=index, item=f"snapshot/{version}/{index}",
                    bytes=self._sizes[index].state_bytes, sha256=SNAPSHOT_SHA256,
                )  # fmt: skip
                close.answered(number, ready)

    def _state_sums(
        self, stage: LoadedStage[ReceiptT], order: SumCheck, close: Close
    ) -> SumsChecked:
        """The statement of a volunteer that is honest, so that its slices are never asked for."""
        microbatches = self._manifest.training.microbatches_per_step
        statement = SumStatement(
            run=self._run, generation=Generation(1), step=order.step, attempt=order.attempt,
            stage=stage.account.stage, peer=self.peer, seed=order.seed,
            checks=simulated_sums(order, close, microbatches),
        )  # fmt: skip
        return SumsChecked(
            step=order.step, attempt=order.attempt, details=order.details,
            statement=self.sign_sums(statement),
        )  # fmt: skip
