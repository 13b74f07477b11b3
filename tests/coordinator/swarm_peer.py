"""A simulated volunteer: the client's side of the protocol, with gradients as sets of names.

A gradient is a Counter of (stage, microbatch) pairs, parameters are the tuple of applied (step,
attempt) pairs; both are checked wherever the real client would compute with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from swarm_facts import (
    TOKENS,
    Violation,
    heldout_loss,
    own_squared,
    sha_of,
    tied_squared,
    train_loss,
)

from swarm_coordinator.events import (
    Event,
    LeaseResolved,
    MessageReceived,
    ReceiptsVerified,
    Session,
)
from swarm_shared.credentials import Receipt
from swarm_shared.errors import CapacityError
from swarm_shared.messages import (
    AbortRound,
    Applied,
    Apply,
    AssignStage,
    Carrier,
    CarrierAddress,
    ClientMessage,
    Close,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeasedMicrobatch,
    Leaving,
    Mask,
    MaskRequest,
    Ready,
    Reduction,
    Refused,
    Roster,
    RoundReport,
    SaveSnapshot,
    SnapshotFailed,
    SnapshotReady,
    StageRequest,
    SyncFailed,
    Welcome,
)
from swarm_shared.placement import most_underserved_stage
from swarm_shared.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step, Version

if TYPE_CHECKING:
    from swarm_world import World

Params = tuple[tuple[int, int], ...]
REQUEST_SECONDS = 4.0
"""A downstream peer that says nothing for so long is given up."""


@dataclass
class Link:
    """One attachment, as both ends see it."""

    number: int
    peer: SimPeer
    open: bool = True
    up_at: float = 0.0
    down_at: float = 0.0


@dataclass
class Round:
    """One all-reduce: complete when all members came, failed for all when one is lost."""

    members: tuple[PeerId, ...]
    arrived: dict[PeerId, tuple[Counter[Any], Callable[[Counter[Any] | RoundFailure], None]]] = (
        field(default_factory=dict)
    )
    failure: RoundFailure | None = None
    done: bool = False


@dataclass(frozen=True)
class RoundFailure:
    culprit: PeerId | None
    carrier_failed: bool = False


@dataclass(frozen=True)
class Parcel:
    mode: str
    step: int
    microbatch: int
    accumulate: frozenset[int]


@dataclass(frozen=True)
class Answer:
    state: str
    """ok, busy, wrong_step, failed, or dead."""
    receipts: tuple[Receipt, ...] = ()
    loss: float = 0.0


@dataclass
class Holding:
    """A stage and everything that goes with it when it is given up."""

    stage: int
    version: int
    params: Params
    held: dict[int, Receipt] = field(default_factory=dict)
    unreported: list[Receipt] = field(default_factory=list)
    closing: Close | None = None
    averaged: tuple[int, Counter[Any], Counter[Any] | None] | None = None
    in_flight: int = 0


class SimPeer:
    def __init__(self, world: World, peer: PeerId) -> None:
        self.world, self.id = world, peer
        self.life = 0
        self.alive = False
        self.leaving = False
        self.gone = False
        self.trainer = True
        self.hung = False
        self.wedged = False
        self.serving: list[tuple[SimPeer, Callable[[Answer], None]]] = []
        self._forget()

    def _forget(self) -> None:
        self.holding: Holding | None = None
        self.link: Link | None = None
        self.attached = False
        self.generation = 0
        self.roster: Roster | None = None
        self.snapshots: dict[str, tuple[str, Params]] = {}
        self.backlog: list[tuple[int, Callable[[], object]]] = []
        self.masks: dict[int, Callable[[frozenset[int] | None], None]] = {}
        self.waiting: list[tuple[Lease, LeasedMicrobatch]] = []
        self.driving = 0
        self.window = 1
        self.assignment: AssignStage | None = None
        self.round: Round | None = None
        self._masks_asked = 0

    # ---- life

    def start(self) -> None:
        self.life += 1
        self.alive, self.hung, self.wedged = True, False, False
        self._forget()
        self.later(self.world.rng.random(), self.attach)
        self.later(1.0, self._beat)
        self.later(0.5, self._report)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """In this process's life; a hung process does it when it wakes."""
        life = self.life
        self.world.later(seconds, lambda: self._act(life, action))

    def _act(self, life: int, action: Callable[[], object]) -> None:
        if not self.alive or life != self.life:
            return
        if self.hung:
            self.backlog.append((life, action))
        else:
            action()

    def kill(self, _seconds: float = 0.0) -> None:
        self.alive = False
        self.world.end_rounds_of(self)
        for sender, reply in self.serving:
            sender.later(self.world.delay(), lambda reply=reply: reply(Answer("dead")))
        self.serving.clear()
        if self.link is not None and self.link.open:
            self.world.cut(self.link)

    def restart(self, seconds: float) -> None:
        self.kill()
        if not self.leaving:
            self.world.later(seconds, lambda: self.alive or self.gone or self.start())

    def cut(self, _seconds: float) -> None:
        if self.link is not None and self.link.open:
            self.world.cut(self.link)

    def hang(self, seconds: float) -> None:
        self.hung = True
        life = self.life

        def wake() -> None:
            self.hung = False
            backlog, self.backlog = self.backlog, []
            for entry in backlog:
                self._act(*entry)

        self.world.later(seconds, lambda: self.alive and life == self.life and wake())

    def wedge(self, seconds: float) -> None:
        """Averaging stands still while the heart beats on."""
        self.wedged = True
        self.later(4 * seconds, lambda: setattr(self, "wedged", False))

    def worker(self, _seconds: float) -> None:
        """The compute process dies: what was held is lost, the daemon attaches anew."""
        self._drop()
        self.cut(0.0)

    def leave(self) -> None:
        self.leaving = True
        for lease, leased in self.waiting:
            self._resolve(lease, leased.microbatch, Answer("failed"))
        self.waiting.clear()
        self.say(Leaving())

    # ---- sessions

    def hello(self) -> tuple[Hello, tuple[Receipt, ...]]:
        holding = self.holding
        carrier = CarrierAddress(peer=f"p2pd-{self.id}", addresses=("a",), binding="b")
        hello = Hello(
            run=RunId("run"), software="0", addresses=("a",), carrier=carrier, device="cpu",
            memory_bytes=1000, trainer=self.trainer,
            stage=None if holding is None else StageIndex(holding.stage),
            version=Version(0 if holding is None else holding.version),
            averaged_attempt=holding.averaged[0] if holding and holding.averaged else None,
        )  # fmt: skip
        return hello, () if holding is None else tuple(holding.held.values())

    def attach(self) -> None:
        if not self.gone:
            self.attached = False
            self.world.attach(self)

    def link_lost(self, link: Link) -> None:
        if link is not self.link:
            return
        self.link, self.attached = None, False
        if self.holding is not None:
            self._cancel_round()
            self.holding.closing = None
        masks, self.masks = self.masks, {}
        for answer in masks.values():
            answer(None)
        if self.leaving:
            self.gone = True
            self.kill()
        if not self.gone:
            self.later(0.2 + 2.0 * self.world.rng.random(), self.attach)

    def say(self, message: ClientMessage) -> None:
        if self.link is not None:
            self.tell(MessageReceived(Session(self.link.number), self.id, message))

    def tell(self, event: Event) -> None:
        if self.link is not None and self.link.open and self.attached:
            self.world.to_coordinator(self.link, event)

    def _beat(self) -> None:
        self.say(Heartbeat(microbatches_per_second=1.0, queued=0))
        self.later(1.0, self._beat)

    def _report(self) -> None:
        holding = self.holding
        if holding is not None and holding.unreported and self.link is not None and self.attached:
            batch, holding.unreported = tuple(holding.unreported), []
            self.tell(ReceiptsVerified(Session(self.link.number), self.id, batch))
        self.later(0.5, self._report)

    # ---- the coordinator's word

    def on_message(self, link: Link, message: object) -> None:
        if link is not self.link or self.gone:
            return
        if isinstance(message, Welcome):
            self._welcome(message)
        elif not self.attached and not isinstance(message, Refused):
            raise Violation(f"{self.id} gets {message} before its welcome")
        elif isinstance(message, Roster):
            self.roster = message
        elif isinstance(message, AssignStage):
            self._assigned(message)
        elif isinstance(message, Lease):
            self.window = message.window
            self.waiting.extend((message, leased) for leased in message.microbatches)
            self._drive_more()
        elif isinstance(message, Mask):
            answer = self.masks.pop(message.request, None)
            if answer is not None:
                answer(frozenset(message.accumulate))
        elif isinstance(message, Close):
            self._close(message)
        elif isinstance(message, AbortRound):
            self._abort(message)
        elif isinstance(message, Apply):
            self._apply(message)
        elif isinstance(message, SaveSnapshot):
            self.later(0.05 * self.world.rng.random(), self._saving(message))
        elif isinstance(message, Goodbye | Refused):
            self.gone = isinstance(message, Refused) or message.finished or self.leaving

    def _welcome(self, message: Welcome) -> None:
        self.attached, self.generation = True, message.generation
        if self.leaving:
            self.say(Leaving())
        if message.keep:
            return
        self._drop()
        if not self.leaving:
            try:
                stage = most_underserved_stage(message.stages, 1000)
            except CapacityError:
                return
            self.later(0.1 * self.world.rng.random(), lambda: self.say(StageRequest(stage=stage)))

    def _drop(self) -> None:
        self._cancel_round()
        self.holding = None
        self.assignment = None
        self.waiting.clear()
        for sender, reply in self.serving:
            sender.later(self.world.delay(), lambda reply=reply: reply(Answer("failed")))
        self.serving.clear()

    def _assigned(self, message: AssignStage) -> None:
        self._drop()
        self.assignment = message
        self.later(0.1 + 2.0 * self.world.rng.random() ** 3, lambda: self._downloaded(message))

    def _downloaded(self, message: AssignStage) -> None:
        if self.assignment is not message:
            return
        stage, version = message.stage, message.version
        params: Params | None = () if message.source == "fresh" else None
        for holder in message.holders:
            found = self.world.download(holder.peer, message.item, version, stage)
            if found is not None and found[0] == message.sha256:
                params = found[1]
        if params is None:
            self.assignment = None
            self.say(SyncFailed(stage=stage, version=version, reason="no holder has it"))
            return
        if len(params) != version:
            raise Violation(f"{self.id} fetched version {version} and got {params}")
        self.assignment = None
        self.holding = Holding(stage, version, params)
        self.say(Ready(stage=stage, version=version, digest=sha_of(params, stage)[:16]))

    def _saving(self, message: SaveSnapshot) -> Callable[[], None]:
        holding = self.holding

        def save() -> None:
            version, stage = message.version, message.stage
            if holding is None or (holding.version, holding.stage) != (version, stage):
                self.say(SnapshotFailed(version=version, stage=stage, reason="elsewhere by now"))
                return
            item, sha = f"snapshot/{version}/{stage}", sha_of(holding.params, stage)
            self.snapshots[item] = (sha, holding.params)
            self.say(SnapshotReady(version=version, stage=stage, item=item, bytes=1, sha256=sha))

        return save

    # ---- close, average, apply

    def _close(self, close: Close) -> None:
        holding = self.holding
        if holding is None or close.step != holding.version + 1:
            self.say(
                RoundReport(
                    step=close.step, attempt=close.attempt, ok=False, reason="not at this step",
                    missing=close.committed,
                )
            )  # fmt: skip
            return
        self._cancel_round()
        holding.closing, holding.averaged = close, None
        if not self.wedged:
            self.later(0.05 * self.world.rng.random(), lambda: self._reconcile(holding, close))

    def _reconcile(self, holding: Holding, close: Close) -> None:
        if self.holding is not holding or holding.closing is not close:
            return
        extra = set(holding.held) - set(close.committed)
        missing = set(close.committed) - set(holding.held)
        if extra and self.world.rng.random() < self.world.options.uncommit_fails:
            holding.held.clear()
            holding.unreported.clear()
            self._failed(close, reset=True, reason="extras cannot be taken out")
            return
        for microbatch in extra:
            del holding.held[microbatch]
        if missing:
            self._failed(
                close, missing=tuple(MicrobatchIndex(m) for m in sorted(missing)), reason="missing"
            )
            return
        self._average(holding, close, Counter((holding.stage, m) for m in holding.held), {}, 0)

    def _failed(self, close: Close, **details: Any) -> None:
        self.say(RoundReport(step=close.step, attempt=close.attempt, ok=False, **details))

    def _average(
        self, holding: Holding, close: Close, own: Counter[Any], results: dict[str, Any], index: int
    ) -> None:
        if self.holding is not holding or holding.closing is not close:
            return
        if index == len(close.reductions):
            holding.averaged = (close.attempt, results["own"], results.get("tied"))
            tied = tied_squared(close.step) if "tied" in results else 0.0
            self.say(
                RoundReport(
                    step=close.step, attempt=close.attempt, ok=True,
                    own_squared=own_squared(close.step, holding.stage), tied_squared=tied,
                )
            )  # fmt: skip
            return
        reduction: Reduction = close.reductions[index]

        def done(result: Counter[Any] | RoundFailure) -> None:
            self.round = None
            if self.holding is not holding or holding.closing is not close:
                return
            if isinstance(result, RoundFailure):
                self._failed(
                    close, reason="a member was lost", culprit=result.culprit,
                    carrier_failed=result.carrier_failed,
                )  # fmt: skip
                return
            results[reduction.part] = result
            self._average(holding, close, own, results, index + 1)

        hivemind = reduction.carrier is Carrier.HIVEMIND
        key = (close.step, close.attempt, reduction.part, reduction.members)
        self.round = self.world.join_round(self, key, reduction.members, hivemind, own, done)

    def _cancel_round(self) -> None:
        if self.round is not None:
            self.round = None
            self.world.end_rounds_of(self)

    def _abort(self, message: AbortRound) -> None:
        holding = self.holding
        if holding is None:
            return
        if holding.closing is not None and holding.closing.attempt == message.attempt:
            self._cancel_round()
            holding.closing = None
        if holding.averaged is not None and holding.averaged[0] == message.attempt:
            holding.averaged = None

    def check_averaged(self, step: int, attempt: int, stage: int) -> None:
        """What this member is about to apply is every microbatch exactly once, and no more."""
        holding, options = self.holding, self.world.options
        if holding is None or holding.averaged is None or holding.averaged[0] != attempt:
            raise Violation(f"{self.id} has not averaged attempt {attempt} of step {step}")
        if (holding.stage, holding.version) != (stage, step - 1):
            raise Violation(f"{self.id} is at {holding.stage}, {holding.version}, not {stage}")
        _, own, tied = holding.averaged
        last, microbatches = options.stages - 1, range(options.microbatches)
        if own != Counter((stage, m) for m in microbatches):
            raise Violation(f"stage {stage} of step {step} sums up {own}")
        has_tied = options.tied and last > 0 and stage in (0, last)
        expected = Counter((s, m) for s in (0, last) for m in microbatches) if has_tied else None
        if tied != expected:
            raise Violation(f"the tied part of step {step} sums up {tied}")

    def _apply(self, message: Apply) -> None:
        holding = self.holding
        if holding is None or holding.version >= message.step:
            return  # it came twice, or this peer has been given something else
        self.check_averaged(message.step, message.attempt, holding.stage)
        if message.attempt in self.world.aborted:
            raise Violation(f"{self.id} applies the aborted attempt {message.attempt}")
        holding.params += ((message.step, message.attempt),)
        holding.version = message.step
        holding.held.clear()
        holding.unreported.clear()
        holding.closing = holding.averaged = None
        self.waiting = [entry for entry in self.waiting if entry[0].step > message.step]
        self.world.check_replicas(self)
        digest = sha_of(holding.params, holding.stage)[:16]
        if not self.wedged:
            self.say(Applied(step=Step(message.step), digest=digest, norm=1.0))

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
        self, sender: SimPeer, stage: int, parcel: Parcel, reply: Callable[[Answer], None]
    ) -> None:
        holding, world = self.holding, self.world
        if holding is None or holding.stage != stage or holding.version + 1 != parcel.step:
            reply(Answer("wrong_step"))
            return
        if holding.in_flight >= 8 or world.rng.random() < world.options.busy:
            reply(Answer("busy"))
            return
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
