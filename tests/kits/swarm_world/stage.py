"""One tenure of a simulated volunteer: a worker, and the rules around it, as the daemon wires them.

The account (`stage_account`), the step close (`step_close`) and the dispatcher to the next stage
are the ones that ship; this module carries their messages and waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kits.swarm_world.checks import check_receipt
from kits.swarm_world.downstream import Answer, Downstream, Parcel
from kits.swarm_world.facts import (
    TOKENS,
    Params,
    Violation,
    heldout_loss,
    own_squared,
    sha_of,
    tied_squared,
    train_loss,
)
from kits.swarm_world.network import Edge, Gradient, RoundFailure
from kits.swarm_world.worker import SimWorker
from swarm_shared.base.types import MicrobatchIndex, RunId, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import (
    Apply,
    NotFinite,
    RefusalReason,
    SaveSnapshot,
    SnapshotReady,
)
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes
from swarm_shared.volunteer_rules import step_close
from swarm_shared.volunteer_rules.stage_account import Counted, StageAccount
from swarm_shared.volunteer_rules.stage_tenure import Load

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer

MOST_QUEUED = 8
"""Microbatches that one peer holds at once."""


class Stage:
    """A stage in a worker of its own, from the worker's start to its end."""

    def __init__(self, peer: SimPeer, load: Load) -> None:
        self.peer, self.load = peer, load
        self.index = load.assignment.stage
        self.is_last = self.index == peer.world.options.stages - 1
        self.worker = SimWorker(peer, self.index)
        self.tasks: dict[Serving, None] = {}
        self.next: Downstream | None = None
        self.close: step_close.StepClose[Receipt] | None = None
        """Set while the stage is held and served."""
        self.held_up: dict[step_close.WorkNumber, step_close.Work] = {}
        """Work that begins when averaging no longer stands still."""
        self.last_apply: Apply | None = None
        self._groups: dict[step_close.WorkNumber, object] = {}
        self._carrying_out = False
        self.loaded(())

    # ---- the tenure

    def loaded(self, params: Params) -> None:
        """The worker has the state; nothing is counted yet."""
        self.worker.load(params)
        self.account = StageAccount(
            self.index, Version(len(params)), self.peer.world.options.staleness, self._sign
        )

    def install(self) -> None:
        self.close = step_close.StepClose(self.account)
        if not self.is_last:
            self.next = Downstream(self.peer, StageIndex(self.index + 1))

    def stop_serving(self) -> None:
        """End all that depends on the present state; the worker may live on."""
        for key in self._groups.values():
            self.peer.world.all_reduces.leave(self.peer.id, key)
        self._groups.clear()
        self.held_up.clear()
        self.close = None
        for task in list(self.tasks):
            task.refuse(RefusalReason.FAILED)
        if self.next is not None:
            self.next.close()
            self.next = None

    def end(self) -> None:
        self.worker.alive = False
        self.stop_serving()

    def _sign(self, counted: Counted) -> Receipt:
        receipt = Receipt(
            run=RunId("run"), generation=self.peer.generation, step=counted.step,
            microbatch=counted.microbatch, stage=self.index, peer=self.peer.id, samples=2,
            tokens=counted.tokens, loss_sum=counted.loss_sum,
        )  # fmt: skip
        check_receipt(self, receipt)
        return receipt

    # ---- the step close

    def order(self, message: step_close.CloseOrder) -> None:
        if self.close is not None:
            self.close.order(message)
            self.carry_out()

    def session_lost(self) -> None:
        if self.close is not None:
            self.close.session_lost()
            self.carry_out()

    def carry_out(self) -> None:
        """Carry out all that has been decided; to be called after every report."""
        if self._carrying_out:
            return
        self._carrying_out = True
        while self.close is not None and (actions := self.close.take_actions()):
            for action in actions:
                match action:
                    case step_close.CancelWork(work):
                        self._cancel(work)
                    case step_close.Send(message):
                        self.peer.send(message)
                        self.peer.reported(self, message)
                    case step_close.StepApplied():
                        self.peer.step_applied()
                    case step_close.Rejoin():
                        self.peer.attach_again()
                    case step_close.SwitchToPrepared():
                        self.peer.switch()
                    case step_close.DropPrepared():
                        self.peer.drop_outdated()
                    case _ if self.peer.wedged:
                        self.held_up[action.work] = action
                    case _:
                        self._begin(self.close, action)
        self._carrying_out = False

    def go_on(self) -> None:
        """Averaging stands still no longer."""
        held_up, self.held_up = self.held_up, {}
        for work in held_up.values():
            if self.close is not None:
                self._begin(self.close, work)

    def _cancel(self, work: step_close.WorkNumber) -> None:
        self.held_up.pop(work, None)
        if work in self._groups:
            self.peer.world.all_reduces.leave(self.peer.id, self._groups.pop(work))

    def _report(self, of: step_close.StepClose[Receipt], report: Callable[[], None]) -> None:
        """A result, unless the stage has been given up since."""
        if self.close is of:
            report()
            self.carry_out()

    def _begin(self, close: step_close.StepClose[Receipt], work: step_close.Work) -> None:
        """Begin a piece of work in the lane's worker."""
        prepared = isinstance(
            work,
            step_close.PrepareRound
            | step_close.Reduce
            | step_close.ComputeNorm
            | step_close.ApplyStep,
        ) and (work.lane is step_close.Lane.PREPARED)
        stage = self.peer.prepared if prepared else self
        if stage is None:
            raise Violation(f"{self.peer.id} has nothing prepared for {work}")
        worker, number = stage.worker, work.work

        def ask(seconds: float, act: Callable[[], Callable[[], None]]) -> None:
            """`act` works in the worker and returns how to report it."""
            worker.request(seconds, act, lambda report: self._report(close, report))

        def prepare(step: Step) -> Callable[[], None]:
            microbatches, finite = worker.prepare(step)
            return partial(close.round_prepared, number, microbatches, finite=finite)

        def uncommit(step: Step, microbatches: tuple[MicrobatchIndex, ...]) -> Callable[[], None]:
            return partial(close.uncommitted, number, done=worker.remove(step, microbatches))

        def empty(step: Step) -> Callable[[], None]:
            worker.empty(step)
            return partial(close.emptied, number)

        def norm(step: Step) -> Callable[[], None]:
            tied = tied_squared(step) if "tied" in worker.averages else 0.0
            return partial(
                close.norm_computed, number, own_squared=own_squared(step, worker.stage),
                tied_squared=tied, finite=True,
            )  # fmt: skip

        match work:
            case step_close.PrepareRound():
                ask(0.04 * self.peer.world.rng.random(), partial(prepare, work.step))
            case step_close.Uncommit():
                ask(0.02, partial(uncommit, work.step, work.microbatches))
            case step_close.EmptyAccumulator():
                ask(0.01, partial(empty, work.step))
            case step_close.ComputeNorm():
                ask(0.01, partial(norm, work.step))
            case step_close.Reduce():
                self._reduce(close, stage, work)
            case step_close.ApplyStep():
                ask(0.02, partial(stage.apply, close, number, work.order))
            case step_close.SaveState():
                ask(0.05, partial(self._save, close, number, work.request))

    def _reduce(
        self, close: step_close.StepClose[Receipt], stage: Stage, work: step_close.Reduce
    ) -> None:
        worker, number, part = stage.worker, work.work, work.reduction.part
        if worker.copy[0] != work.step:
            raise Violation(f"{self.peer.id} averages step {work.step} with {worker.copy}")
        worker.averaged = (work.step, work.attempt)
        # The stage is part of the key: two stages that exchange peers have the same members.
        where = "tied" if part == "tied" else worker.stage
        key = (work.step, work.attempt, where, work.reduction.members)
        self._groups[number] = key

        def done(result: Gradient | RoundFailure) -> None:
            if self._groups.pop(number, None) is None:
                return
            if isinstance(result, RoundFailure):
                report = partial(
                    close.averaging_failed, number, "a member was lost", result.culprit,
                    carrier_failed=result.carrier_failed,
                )  # fmt: skip
            else:
                worker.averages[part] = result
                report = partial(close.averaged, number)
            self._report(close, report)

        self.peer.world.all_reduces.join(
            self.peer, key, work.reduction.members, worker.copy[1], done
        )

    def apply(
        self, close: step_close.StepClose[Receipt], number: step_close.WorkNumber, order: Apply
    ) -> Callable[[], None]:
        if self.peer.cannot_apply:
            self.peer.cannot_apply = False
            return partial(close.failed, number, "its parameters would not be finite")
        digest, norm = self.worker.apply(order)
        self.last_apply = order
        return partial(close.applied, number, digest=digest, norm=norm)

    def _save(
        self,
        close: step_close.StepClose[Receipt],
        number: step_close.WorkNumber,
        request: SaveSnapshot,
    ) -> Callable[[], None]:
        version, stage, peer = request.version, request.stage, self.peer
        elsewhere = (version, stage) != (self.worker.version, self.index)
        if elsewhere or peer.world.now < peer.unsaving_until:
            return partial(close.failed, number, "elsewhere by now, or no space")
        item, sha = f"snapshot/{version}/{stage}", sha_of(self.worker.params, stage)
        peer.snapshots[item] = (sha, self.worker.params)
        size = stage_sizes(peer.world.manifest)[stage].state_bytes
        answer = SnapshotReady(version=version, stage=stage, item=item, bytes=size, sha256=sha)
        return partial(close.saved, number, answer)


class Serving:
    """One request at its receiver, as in `swarm_client.pipeline.stage_server`."""

    def __init__(self, stage: Stage, edge: Edge, request: int, parcel: Parcel) -> None:
        self._stage, self._edge, self._request, self._parcel = stage, edge, request, parcel
        self._below: Answer = Answer(None)
        self._delivery: int | None = None
        self._ended = False
        self._arrived_at = stage.peer.world.now
        edge.tasks.setdefault(request, []).append(self)
        stage.tasks[self] = None
        if parcel.mode == "train":
            self._computation = stage.account.begin(
                parcel.step, parcel.microbatch, parcel.accumulate
            )
        if stage.is_last:
            self._compute()
        else:
            self._request_worker(lambda: False, self._forwarded)

    def _request_worker(self, work: Callable[[], bool], done: Callable[[bool], None]) -> None:
        worker = self._stage.worker
        worker.request(0.01 + 0.05 * worker.peer.world.rng.random(), work, done)

    def _compute(self) -> None:
        """Compute the gradient, or the loss of an evaluation."""
        parcel, worker = self._parcel, self._stage.worker
        if parcel.mode == "evaluate":
            self._request_worker(lambda: False, self._evaluated)
        elif worker.peer.gives_nan:
            worker.peer.gives_nan = False
            sender = self._edge.sender.peer.id
            worker.peer.send(
                NotFinite(step=parcel.step, microbatch=parcel.microbatch, sender=sender)
            )
            self.refuse(RefusalReason.FAILED)
        else:
            accumulate = self._computation.accumulate
            self._request_worker(
                lambda: worker.accumulate(parcel.step, parcel.microbatch, accumulate),
                self._computed,
            )

    def _forwarded(self, _added: bool) -> None:
        if not self._ended and self._stage.next is not None:
            delivery = self._stage.next.send(self._parcel, self._returned)
            self._delivery = None if self._ended else delivery

    def _returned(self, answer: Answer) -> None:
        self._delivery, self._below = None, answer
        if self._ended:
            return
        if answer.ok:
            self._compute()
        else:
            self.refuse(RefusalReason.FAILED)

    def _computed(self, added: bool) -> None:
        if self._ended:
            return
        parcel, stage = self._parcel, self._stage
        if added and stage.index not in parcel.accumulate:
            raise Violation(f"{stage.peer.id} of stage {stage.index} has added {parcel}")
        loss = train_loss(parcel.step, parcel.microbatch) if stage.is_last else None
        receipt = stage.account.finish(self._computation, added=added, tokens=TOKENS, loss_sum=loss)
        receipts = self._below.receipts
        self._reply(
            Answer(
                None, receipts if receipt is None else (*receipts, receipt),
                service_seconds=0.05 * stage.peer.slowness,
                total_seconds=stage.peer.world.now - self._arrived_at,
            )
        )  # fmt: skip

    def _evaluated(self, _added: bool) -> None:
        stage, loss_sum = self._stage, self._below.loss_sum
        if stage.is_last:
            loss_sum = heldout_loss(stage.worker.version, self._parcel.microbatch)
        self._reply(Answer(None, (), loss_sum, service_seconds=0.05))

    def refuse(self, reason: RefusalReason) -> None:
        if not has_parameters_for(self._stage, self._parcel):
            reason = RefusalReason.WRONG_STEP
        self._reply(Answer(reason))

    def _reply(self, answer: Answer) -> None:
        if not self._ended:
            self.cancel()
            edge, request = self._edge, self._request
            edge.back("answer", answer, lambda: edge.sender.answered(edge, request, answer))

    def cancel(self) -> None:
        """Give up what has not ended; what the worker has begun it goes on with."""
        if not self._ended:
            self._ended = True
            del self._stage.tasks[self]
            tasks = self._edge.tasks[self._request]
            tasks.remove(self)
            if not tasks:
                del self._edge.tasks[self._request]
            if self._delivery is not None and self._stage.next is not None:
                self._stage.next.withdraw(self._delivery)


def has_parameters_for(stage: Stage, parcel: Parcel) -> bool:
    if parcel.mode == "evaluate":
        return stage.account.evaluates(parcel.step)
    return stage.account.works_on(parcel.step)
