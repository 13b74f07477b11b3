"""A simulated volunteer as trainer and stage server: driving, retrying, counting once."""

from __future__ import annotations

from collections.abc import Callable

from kits.swarm_world.checks import check_served
from kits.swarm_world.facts import TOKENS, heldout_loss, train_loss
from kits.swarm_world.peer_base import Answer, Holding, Parcel, PeerBase
from swarm_coordinator.core.events import LeaseResolved, SessionNumber
from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Lease, LeasedMicrobatch, MaskRequest, NotFinite, PeerRecord

LATE_SECONDS = 1.0
"""Seconds before a hedged request; shorter than in the real client, because hedging is under
test."""

MAXIMUM_HEDGES = 2


class Race:
    """One microbatch and the peers it was sent to, as in `swarm_client.pipeline.hedging`.

    No request is cancelled: a late answer has been counted, which is the harder case.
    """

    def __init__(
        self,
        sender: Computing,
        stage: int,
        parcel: Parcel,
        wanted: Callable[[], bool],
        done: Callable[[Answer], None],
    ) -> None:
        self.sender, self.stage, self.parcel = sender, stage, parcel
        self.wanted, self.done = wanted, done
        self.settled = False
        self.running = self.hedges = 0
        self.at: dict[PeerId, float] = {}

    def settle(self, answer: Answer) -> None:
        if not self.settled:
            self.settled = True
            self.done(answer)

    def lose(self) -> None:
        self.running -= 1
        if self.running == 0:
            self.settle(Answer("failed"))

    def oversee(self) -> None:
        if self.settled:
            return
        if not self.wanted():
            self.settle(Answer("failed"))
            return
        now, world = self.sender.world.now, self.sender.world
        late = self.at and now - max(self.at.values()) > LATE_SECONDS
        if late and self.hedges < MAXIMUM_HEDGES and self.others():
            self.hedges += 1
            world.hedges += 1
            if self.parcel.mode == "train":
                self.sender.ask_mask(self.parcel, self.masked)
            else:
                self.run(frozenset())
        self.sender.later(0.25, self.oversee)

    def masked(self, stages: frozenset[int] | None) -> None:
        if stages is not None and not self.settled:
            self.run(frozenset(s for s in stages if s >= self.stage))

    def others(self) -> list[PeerRecord]:
        roster = self.sender.roster
        members = [r for r in (roster.peers if roster else ()) if r.stage == self.stage]
        usable = [r for r in members if r.accepts_work] or members
        return [r for r in usable if r.peer not in self.at]

    def run(self, accumulate: frozenset[int]) -> None:
        """Run one request to its end."""
        sender, parcel, failures = self.sender, self.parcel, 0
        self.running += 1

        def attempt() -> None:
            if self.settled or not self.wanted() or failures >= 5:
                self.lose()
                return
            usable = self.others()
            if not usable:
                sender.later(0.3, attempt)
                return
            target = sender.world.rng.choice(usable).peer
            request = Parcel(parcel.mode, parcel.step, parcel.microbatch, accumulate)
            self.at[target] = sender.world.now
            sender.world.request(sender, target, self.stage, request, lambda a: answered(a, target))

        def answered(answer: Answer, target: PeerId) -> None:
            nonlocal failures
            self.at.pop(target, None)
            if answer.state == "ok":
                self.running -= 1
                self.settle(answer)
            elif answer.state in ("busy", "wrong_step"):
                sender.later(0.1, attempt)
            else:
                failures += 1
                if not self.wanted() or parcel.mode == "evaluate":
                    sender.later(0.1, attempt)
                else:
                    sender.ask_mask(parcel, masked)

        def masked(stages: frozenset[int] | None) -> None:
            nonlocal accumulate
            if stages is None:
                self.lose()
                return
            accumulate = frozenset(s for s in stages if s >= self.stage)
            attempt()

        attempt()


class Computing(PeerBase):
    # ---- the trainer

    def _drive_more(self) -> None:
        if self.stalled:
            return
        while self.waiting and self.driving < self.window:
            lease, leased = self.waiting.pop(0)
            idle = self.leaving or self.paused
            if idle or self.holding is None or not self.holding.works_on(lease.step):
                self._resolve(lease, leased.microbatch, Answer("failed"))
                continue
            self.driving += 1
            self._drive(lease, leased)

    def _drive(self, lease: Lease, leased: LeasedMicrobatch) -> None:
        def done(answer: Answer) -> None:
            self.driving -= 1
            self._resolve(lease, leased.microbatch, answer)
            self._drive_more()

        parcel = Parcel(lease.mode, lease.step, leased.microbatch, frozenset(leased.accumulate))
        self._send_on(0, parcel, done)

    def _resolve(self, lease: Lease, microbatch: MicrobatchIndex, answer: Answer) -> None:
        if self.link is None:
            return
        ok = answer.state == "ok"
        evaluated = ok and lease.mode == "evaluate"
        self.deliver(
            LeaseResolved(
                SessionNumber(self.link.number), self.id, lease.step, microbatch, lease.lease, ok,
                "" if ok else answer.state, answer.receipts,
                answer.loss if evaluated else None, TOKENS if evaluated else 0,
            )
        )  # fmt: skip

    # ---- stage to stage

    def _send_on(self, stage: int, parcel: Parcel, done: Callable[[Answer], None]) -> None:
        """Send a microbatch to a peer of `stage`, with masks on retries, and hedge a slow
        request."""
        holding = self.holding

        def wanted() -> bool:
            return holding is not None and self.holding is holding and holding.works_on(parcel.step)

        race = Race(self, stage, parcel, wanted, done)
        race.run(parcel.accumulate)
        race.oversee()

    def ask_mask(self, parcel: Parcel, answer: Callable[[frozenset[int] | None], None]) -> None:
        if self.link is None or not self.attached:
            answer(None)
            return
        self._masks_asked += 1
        self.masks[self._masks_asked] = answer
        self.send(
            MaskRequest(
                request=self._masks_asked, step=Step(parcel.step),
                microbatch=MicrobatchIndex(parcel.microbatch),
            )
        )  # fmt: skip

    def serve(
        self, sender: PeerBase, stage: int, parcel: Parcel, reply: Callable[[Answer], None]
    ) -> None:
        holding, world = self.holding, self.world
        if holding is None or holding.stage != stage or not holding.works_on(parcel.step):
            reply(Answer("wrong_step"))
            return
        if self.paused or holding.in_flight >= 8 or world.rng.random() < world.options.busy:
            reply(Answer("busy"))
            return
        if self.refuses(sender.id):
            world.turned_away += 1
            reply(Answer("dead"))
            return
        check_served(world, self, sender)
        holding.in_flight += 1
        entry = (sender, reply)
        self.serving.append(entry)
        last = stage == world.options.stages - 1
        if self.gives_nan and parcel.mode == "train":
            self.gives_nan = False
            self.send(NotFinite(step=Step(parcel.step), microbatch=parcel.microbatch))
            holding.in_flight -= 1
            self.serving.remove(entry)
            reply(Answer("failed"))
            return
        count = (
            parcel.mode == "train"
            and stage in parcel.accumulate
            and parcel.microbatch not in holding.of(parcel.step)
            and (holding.closing is None or holding.closing.step != parcel.step)
        )

        def finish(answer: Answer) -> None:
            holding.in_flight -= 1
            if entry in self.serving:
                self.serving.remove(entry)
                reply(answer)

        def backward(answer: Answer) -> None:
            if answer.state != "ok" or self.holding is not holding:
                finish(Answer("failed"))
                return
            current = holding.works_on(parcel.step)
            if count and current and parcel.microbatch not in holding.of(parcel.step):
                self._accumulate(holding, parcel, last)
            own = holding.of(parcel.step).get(parcel.microbatch) if current else None
            receipts = answer.receipts if own is None else (*answer.receipts, own)
            finish(Answer("ok", receipts, answer.loss))

        def forward() -> None:
            if self.holding is not holding:
                finish(Answer("failed"))
            elif not last:
                self._send_on(stage + 1, parcel, lambda a: self._computed(lambda: backward(a)))
            elif parcel.mode == "evaluate":
                finish(Answer("ok", (), heldout_loss(holding.version, parcel.microbatch)))
            else:
                backward(Answer("ok"))

        self._computed(forward)

    def _computed(self, action: Callable[[], None]) -> None:
        """After a computation, if it completes."""
        seconds = self.slowness * (0.01 + 0.05 * self.world.rng.random())
        self.later(seconds, lambda: self.stuck or action())

    def _accumulate(self, holding: Holding, parcel: Parcel, last: bool) -> None:
        loss = train_loss(parcel.step, parcel.microbatch) if last else None
        receipt = Receipt(
            run=RunId("run"), generation=Generation(self.generation), step=Step(parcel.step),
            microbatch=MicrobatchIndex(parcel.microbatch), stage=StageIndex(holding.stage),
            peer=self.id, samples=2, tokens=TOKENS, loss_sum=loss,
        )  # fmt: skip
        holding.of(parcel.step)[parcel.microbatch] = receipt
        holding.unreported.append(receipt)
