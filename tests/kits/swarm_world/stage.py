"""One tenure of a simulated volunteer: a worker, and the rules around it, as the daemon wires them.

The account (`stage_account`), the step close (`step_close`) and the dispatcher to the next stage
are the ones that ship; this module carries their messages and waits.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from kits.swarm_world import sums
from kits.swarm_world.checks import check_receipt
from kits.swarm_world.decisions import CarryOut
from kits.swarm_world.downstream import Downstream
from kits.swarm_world.facts import Params, Violation, train_loss
from kits.swarm_world.network import RoundFailure
from kits.swarm_world.sums import Exchange
from kits.swarm_world.worker import SimWorker
from swarm_shared.base.types import RunId, StageIndex, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import RefusalReason, SumsChecked
from swarm_shared.volunteer_rules import step_close
from swarm_shared.volunteer_rules.stage_account import Counted, StageAccount
from swarm_shared.volunteer_rules.stage_tenure import Load

if TYPE_CHECKING:
    from collections.abc import Callable

    from kits.swarm_world.peer import SimPeer
    from kits.swarm_world.server import Owed, Serving

WORK_SECONDS = {
    step_close.Uncommit: 0.02,
    step_close.EmptyAccumulator: 0.01,
    step_close.ComputeNorm: 0.01,
    step_close.StateSums: 0.02,
    step_close.ApplyStep: 0.02,
    step_close.SaveState: 0.05,
}

MOST_COPY_SECONDS = 0.04
"""Longest time that a copy for averaging takes."""


class Stage:
    """A stage in a worker of its own, from the worker's start to its end."""

    def __init__(self, peer: SimPeer, load: Load) -> None:
        self.peer, self.load = peer, load
        self.index = load.assignment.stage
        self.is_last = self.index == peer.world.options.stages - 1
        self.worker = SimWorker(peer, self.index)
        self.tasks: dict[Serving, None] = {}
        self.owed: dict[Owed, None] = {}
        self.next: Downstream | None = None
        self.close: step_close.StepClose[Receipt] | None = None
        """Set while the stage is held and served."""
        self.held_up: dict[step_close.WorkNumber, step_close.Work] = {}
        """Work that begins when averaging no longer stands still."""
        self._groups: dict[step_close.WorkNumber, object] = {}
        self.carry_out = CarryOut(
            lambda: self.close.take_actions() if self.close is not None else [],
            self._carry_out_one,
        )
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
        for owed in list(self.owed):
            owed.give_up()
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
            tokens=counted.tokens, loss_sum=counted.loss_sum, transcript=counted.transcript,
        )  # fmt: skip
        check_receipt(self, receipt)
        return receipt

    def loss(self, step: int, microbatch: int) -> float | None:
        return train_loss(step, microbatch) if self.is_last else None

    # ---- the step close

    def report(self, report: Callable[[step_close.StepClose[Receipt]], None]) -> None:
        """Report to the step close, if the stage is served."""
        if self.close is not None:
            report(self.close)
            self.carry_out()

    def _carry_out_one(self, action: step_close.Action) -> None:
        match action:
            case step_close.CancelWork(work):
                self.held_up.pop(work, None)
                if work in self._groups:
                    self.peer.world.all_reduces.leave(self.peer.id, self._groups.pop(work))
            case step_close.Send(SumsChecked() as message):
                sums.send(self.peer, message)
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
            case _ if self.close is not None:
                self._begin(self.close, action)

    def go_on(self) -> None:
        """Averaging stands still no longer."""
        held_up, self.held_up = self.held_up, {}
        for work in held_up.values():
            if self.close is not None:
                self._begin(self.close, work)

    def _begin(self, close: step_close.StepClose[Receipt], work: step_close.Work) -> None:
        """Begin a piece of work in the lane's worker."""
        stage = self if work.lane is step_close.Lane.HELD else self.peer.prepared
        if stage is None:
            raise Violation(f"{self.peer.id} has nothing prepared for {work}")
        if isinstance(work, step_close.Reduce):
            self._reduce(close, stage.worker, work)
            return
        if isinstance(work, step_close.PrepareRound):
            seconds = MOST_COPY_SECONDS * self.peer.world.rng.random()
        else:
            seconds = WORK_SECONDS[type(work)]
        stage.worker.request(
            seconds,
            lambda: stage.worker.carry_out(close, work),
            lambda report: self._report(close, report),
        )

    def _report(self, of: step_close.StepClose[Receipt], report: Callable[[], None]) -> None:
        """A result, unless the stage has been given up since."""
        if self.close is of:
            report()
            self.carry_out()

    def _reduce(
        self, close: step_close.StepClose[Receipt], worker: SimWorker, work: step_close.Reduce
    ) -> None:
        number, part, members = work.work, work.reduction.part, work.reduction.members
        if worker.copy[0] != work.step:
            raise Violation(f"{self.peer.id} averages step {work.step} with {worker.copy}")
        worker.averaged = (work.step, work.attempt)
        # The stage is part of the key: two stages that exchange peers have the same members.
        where = "tied" if part == "tied" else worker.stage
        key = self._groups[number] = (work.step, work.attempt, where, members)

        def done(result: Exchange | RoundFailure) -> None:
            if self._groups.pop(number, None) is None:
                return
            if isinstance(result, RoundFailure):
                report = partial(
                    close.averaging_failed, number, "a member was lost", result.culprit,
                    carrier_failed=result.carrier_failed, aborted_by=result.aborted_by,
                )  # fmt: skip
            else:
                worker.averages[part], worker.exchanges[part] = result.total, result
                report = partial(close.averaged, number)
            self._report(close, report)

        self.peer.world.all_reduces.join(self.peer, key, members, worker.copy[1], done)
