"""A simulated volunteer as trainer and stage server: driving, retrying, counting once."""

from __future__ import annotations

from collections.abc import Callable

from swarm_checks import check_served
from swarm_facts import (
    TOKENS,
    heldout_loss,
    train_loss,
)
from swarm_peer_base import Answer, Holding, Parcel, PeerBase

from swarm_coordinator.events import (
    LeaseResolved,
    Session,
)
from swarm_shared.credentials import Receipt
from swarm_shared.messages import (
    Lease,
    LeasedMicrobatch,
    MaskRequest,
)
from swarm_shared.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step


class Computing(PeerBase):
    # ---- the trainer

    def _drive_more(self) -> None:
        while self.waiting and self.driving < self.window:
            lease, leased = self.waiting.pop(0)
            if self.leaving or self.holding is None or lease.step != self.holding.version + 1:
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
        self.tell(
            LeaseResolved(
                Session(self.link.number), self.id, lease.step, microbatch, lease.lease, ok,
                "" if ok else answer.state, answer.receipts,
                answer.loss if evaluated else None, TOKENS if evaluated else 0,
            )
        )  # fmt: skip

    # ---- stage to stage

    def _send_on(self, stage: int, parcel: Parcel, done: Callable[[Answer], None]) -> None:
        """Bring a microbatch to some peer of `stage`, again and again with masks if need be."""
        holding, failures = self.holding, 0
        accumulate = parcel.accumulate

        def wanted() -> bool:
            return (
                holding is not None
                and self.holding is holding
                and holding.version + 1 == parcel.step
            )

        def attempt() -> None:
            if not wanted() or failures >= 5:
                done(Answer("failed"))
                return
            members = [r for r in (self.roster.peers if self.roster else ()) if r.stage == stage]
            usable = [r for r in members if r.accepts_work] or members
            if not usable:
                self.later(0.3, attempt)
                return
            target = self.world.rng.choice(usable).peer
            request = Parcel(parcel.mode, parcel.step, parcel.microbatch, accumulate)
            self.world.request(self, target, stage, request, lambda a: answered(a, target))

        def answered(answer: Answer, target: PeerId) -> None:
            nonlocal failures
            if answer.state == "ok":
                done(answer)
            elif answer.state in ("busy", "wrong_step"):
                self.later(0.1, attempt)
            else:
                failures += 1
                if not wanted() or parcel.mode == "evaluate":
                    self.later(0.1, attempt)
                else:
                    self._ask_mask(parcel, target, masked)

        def masked(stages: frozenset[int] | None) -> None:
            nonlocal accumulate
            if stages is None:
                done(Answer("failed"))
                return
            accumulate = frozenset(s for s in stages if s >= stage)
            attempt()

        attempt()

    def _ask_mask(
        self, parcel: Parcel, suspect: PeerId, answer: Callable[[frozenset[int] | None], None]
    ) -> None:
        if self.link is None or not self.attached:
            answer(None)
            return
        self._masks_asked += 1
        self.masks[self._masks_asked] = answer
        self.say(
            MaskRequest(
                request=self._masks_asked, step=Step(parcel.step),
                microbatch=MicrobatchIndex(parcel.microbatch), suspect=suspect,
            )
        )  # fmt: skip

    def serve(
        self, sender: PeerBase, stage: int, parcel: Parcel, reply: Callable[[Answer], None]
    ) -> None:
        holding, world = self.holding, self.world
        if holding is None or holding.stage != stage or holding.version + 1 != parcel.step:
            reply(Answer("wrong_step"))
            return
        if holding.in_flight >= 8 or world.rng.random() < world.options.busy:
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
        count = (
            parcel.mode == "train"
            and stage in parcel.accumulate
            and parcel.microbatch not in holding.held
            and holding.closing is None
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
            current = holding.version + 1 == parcel.step
            if count and current and parcel.microbatch not in holding.held:
                self._accumulate(holding, parcel, last)
            own = holding.held.get(parcel.microbatch) if current else None
            receipts = answer.receipts if own is None else (*answer.receipts, own)
            finish(Answer("ok", receipts, answer.loss))

        def forward() -> None:
            if self.holding is not holding:
                finish(Answer("failed"))
            elif not last:
                self._send_on(
                    stage + 1, parcel, lambda a: self.later(self._compute(), lambda: backward(a))
                )
            elif parcel.mode == "evaluate":
                finish(Answer("ok", (), heldout_loss(holding.version, parcel.microbatch)))
            else:
                backward(Answer("ok"))

        self.later(self._compute(), forward)

    def _compute(self) -> float:
        return 0.01 + 0.05 * self.world.rng.random()

    def _accumulate(self, holding: Holding, parcel: Parcel, last: bool) -> None:
        loss = train_loss(parcel.step, parcel.microbatch) if last else None
        receipt = Receipt(
            run=RunId("run"), generation=Generation(self.generation), step=Step(parcel.step),
            microbatch=MicrobatchIndex(parcel.microbatch), stage=StageIndex(holding.stage),
            peer=self.id, samples=2, tokens=TOKENS, loss_sum=loss,
        )  # fmt: skip
        holding.held[parcel.microbatch] = receipt
        holding.unreported.append(receipt)
