"""Peers on the path of microbatches: the rules that ship, without the time that anything takes.

Trainers, senders and receivers follow the production rules (`swarm_shared.volunteer_rules`): when
a leased microbatch starts (`lease_queue`); choice of the receiver, retries, hedges and masks
(`delivery`); what is accumulated and receipted (`stage_account`). A receiver refuses when its queue
is full. An edge opens at once, and a request to a lost peer fails when the members show the loss.

A subclass of `PipelinePeer` models computing and links, and carries messages to the coordinator:
that of the simulator's fine level, and that of the coordinator's benchmark.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar, Generic

from swarm_coordinator.simulator.event_heap import Action
from swarm_coordinator.simulator.stage_holder import LoadedStage, ReceiptT
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import Lease, LeaseResult, Mask, PeerRecord, RefusalReason
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import StageSizes
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.compute_order import Part
from swarm_shared.volunteer_rules.delivery import (
    Abandoned,
    AskMask,
    CancelRequest,
    Completed,
    Dispatcher,
    OpenEdge,
    Transmit,
)
from swarm_shared.volunteer_rules.lease_queue import LeaseQueue, StartedMicrobatch, handed_back
from swarm_shared.volunteer_rules.stage_account import Computation

PART_OF_WORK = 1 / 3
"""A forward, the gradients of inputs and those of weights are as much work: the products of the
same matrices."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One microbatch with its accumulate mask."""

    step: Step
    index: MicrobatchIndex
    accumulate: tuple[StageIndex, ...]
    is_copy: bool


@dataclass(frozen=True, slots=True)
class Answer(Generic[ReceiptT]):
    """The result of one request: receipts, or why there is no gradient."""

    refusal: RefusalReason | None
    receipts: tuple[ReceiptT, ...] = ()
    service_seconds: float = 0.0
    total_seconds: float = 0.0
    uplink_seconds: float = 0.0
    owing: tuple[PeerId, ...] = ()
    """The peers that have yet to count it."""


@dataclass(frozen=True, slots=True)
class Members:
    """A roster as senders use it."""

    present: Container[PeerId] = ()
    serving: Mapping[StageIndex, Mapping[PeerId, float]] = field(default_factory=dict)
    """By stage, the peers that accept work, with their rates in microbatches per second."""

    @classmethod
    def of(cls, roster: Iterable[PeerRecord]) -> Members:
        records = tuple(roster)
        serving: dict[StageIndex, dict[PeerId, float]] = {}
        for record in records:
            if record.accepts_work:
                rates = serving.setdefault(record.stage, {})
                rates[record.peer] = record.microbatches_per_second
        return cls({record.peer for record in records}, serving)


class Downstream(Generic[ReceiptT]):
    """A peer's deliveries to one stage: carries out the dispatcher's decisions."""

    def __init__(self, peer: PipelinePeer[ReceiptT], stage: StageIndex) -> None:
        self.stage, self.peer = stage, peer
        depth = peer.manifest.stage_count - stage
        self._dispatcher = Dispatcher(stage, peer.routing(), depth)
        self._deliveries: dict[int, tuple[Microbatch, Callable[[Answer[ReceiptT]], None]]] = {}
        self._targets: dict[int, Request[ReceiptT]] = {}
        """Requests in flight, as their receivers have them."""
        self._ticks_at = math.inf

    def send(self, microbatch: Microbatch, done: Callable[[Answer[ReceiptT]], None]) -> int:
        """Deliver to any peer of the stage; return the delivery's number."""
        number = self._dispatcher.submit(
            microbatch.step, microbatch.index, microbatch.accumulate, self.peer.now,
            is_copy=microbatch.is_copy,
        )  # fmt: skip
        self._deliveries[number] = (microbatch, done)
        self._carry_out()
        return number

    @property
    def hedged(self) -> int:
        return self._dispatcher.hedged

    def withdraw(self, delivery: int) -> None:
        self._deliveries.pop(delivery, None)
        self._dispatcher.withdraw(delivery, self.peer.now)
        self._carry_out()

    def learn(self, members: Members) -> None:
        serving = members.serving.get(self.stage, {})
        self._dispatcher.roster_changed(serving, members.present, self.peer.now)
        self._carry_out()

    def oldest_step_is(self, step: Step) -> None:
        self._dispatcher.oldest_step_is(step, self.peer.now)
        self._carry_out()

    def answered(self, request: int, answer: Answer[ReceiptT]) -> None:
        self._targets.pop(request, None)
        if answer.refusal is None:
            self._dispatcher.answered(
                request, answer.service_seconds, answer.total_seconds, answer.uplink_seconds,
                self.peer.now,
            )  # fmt: skip
        else:
            self._dispatcher.refused(request, answer.refusal, "", self.peer.now)
        self._carry_out(answer)

    def masked(self, query: int, missing: tuple[StageIndex, ...]) -> None:
        self._dispatcher.masked(query, missing, self.peer.now)
        self._carry_out()

    def _carry_out(self, answer: Answer[ReceiptT] | None = None) -> None:
        """Carry out all decisions; `answer` is the one that has just arrived."""
        dispatcher = self._dispatcher
        failed: Answer[ReceiptT] = Answer(RefusalReason.FAILED)
        while actions := dispatcher.take_actions():
            for action in actions:
                match action:
                    case Transmit(request, delivery, peer, accumulate, is_copy):
                        sent, _ = self._deliveries[delivery]
                        microbatch = Microbatch(sent.step, sent.index, accumulate, is_copy)
                        self._transmit(request, peer, microbatch)
                    case Completed(delivery):
                        self._deliveries.pop(delivery)[1](answer or failed)
                    case OpenEdge(peer):
                        credits = self.peer.manifest.limits.edge_credits
                        dispatcher.opened(peer, credits, self.peer.now)
                    case CancelRequest(request):
                        self._cancel(request)
                    case AskMask(query, _, step, index):
                        self.peer.ask_mask(step, index, partial(self.masked, query))
                    case Abandoned(delivery):
                        self._deliveries.pop(delivery)[1](failed)
        wakes_at = dispatcher.wakes_at()
        if wakes_at is not None and wakes_at < self._ticks_at:
            self._ticks_at = wakes_at
            self.peer.later(wakes_at - self.peer.now, lambda: self._tick(wakes_at))

    def _tick(self, at: float) -> None:
        if at == self._ticks_at:  # else an earlier one was scheduled after it
            self._ticks_at = math.inf
            self._dispatcher.tick(self.peer.now)
            self._carry_out()

    def _transmit(self, number: int, peer: PeerId, microbatch: Microbatch) -> None:
        receiver = self.peer.find(peer)
        if receiver is not None:  # else it is lost: the members will show it
            request = self._targets[number] = Request(receiver, self, number, microbatch)
            size = self.peer.sizes[self.stage].input_bytes
            self.peer.transfer(receiver, size, request.begin)

    def _cancel(self, number: int) -> None:
        request = self._targets.pop(number, None)
        if request is not None:
            self.peer.transfer(request.peer, 0, request.cancel)


class Request(Generic[ReceiptT]):
    """One request at its receiver: forward, on to the next stage, backward, answer."""

    def __init__(
        self,
        peer: PipelinePeer[ReceiptT],
        sender: Downstream[ReceiptT],
        number: int,
        microbatch: Microbatch,
    ) -> None:
        self.peer, self.microbatch = peer, microbatch
        self.ended = False
        self._sender, self._number = sender, number
        self._began_at: float | None = None
        self._delivery: int | None = None

    @property
    def step(self) -> Step:
        return self.microbatch.step

    @property
    def index(self) -> MicrobatchIndex:
        return self.microbatch.index

    def begin(self) -> None:
        """The request has arrived."""
        peer, microbatch = self.peer, self.microbatch
        if self.ended or not peer.is_up:
            return
        if peer.stage != self._sender.stage or not peer.account.works_on(microbatch.step):
            self._reply(Answer(RefusalReason.WRONG_STEP), 0)
        elif peer.in_flight >= peer.manifest.limits.stage_queue:
            self._reply(Answer(RefusalReason.BUSY), 0)
        else:
            peer.in_flight += 1
            self._began_at = peer.now
            computation = peer.account.begin(
                microbatch.step, microbatch.index, microbatch.accumulate
            )
            peer.compute(Part.FORWARD, self, lambda: self._forwarded(computation))

    def cancel(self) -> None:
        """The sender does not want it any more; what was counted stays counted."""
        if not self.ended:
            self._end()
            if self._delivery is not None and self.peer.next is not None:
                self.peer.next.withdraw(self._delivery)

    def _end(self) -> None:
        self.ended = True
        if self._began_at is not None:
            self.peer.in_flight -= 1

    def _forwarded(self, computation: Computation) -> None:
        if self.peer.next is None:
            # The last stage goes on at once: loss and backward belong to the same request.
            self._backward(computation, Answer(None))
        else:
            self._delivery = self.peer.next.send(
                self.microbatch, lambda answer: self._came_back(computation, answer)
            )

    def _came_back(self, computation: Computation, answer: Answer[ReceiptT]) -> None:
        if answer.refusal is None:
            self._backward(computation, answer)
        elif self.peer.account.works_on(computation.step):
            self._reply(Answer(RefusalReason.FAILED), 0)
        else:
            self._reply(Answer(RefusalReason.WRONG_STEP), 0)

    def _backward(self, computation: Computation, answer: Answer[ReceiptT]) -> None:
        self.peer.compute(Part.INPUT_GRADIENT, self, lambda: self._computed(computation, answer))

    def _computed(self, computation: Computation, answer: Answer[ReceiptT]) -> None:
        """Answer with the gradient of the input; the weights' gradients are computed later."""
        peer, began_at = self.peer, self._began_at or 0.0
        own = peer.account.receipt(computation.step, computation.microbatch)
        receipts, owing = answer.receipts, answer.owing
        if own is not None:
            receipts = (*receipts, own)
        elif computation.accumulate:
            owing = (*owing, peer.peer_id)
            peer.owe(computation)
        answer = Answer(
            None, receipts, peer.microbatch_seconds, peer.now - began_at, peer.uplink_seconds(),
            owing,
        )  # fmt: skip
        self._reply(answer, peer.sizes[peer.stage].input_gradient_bytes)

    def _reply(self, answer: Answer[ReceiptT], size: int) -> None:
        self._end()
        sender = self._sender

        def arrive() -> None:
            if sender.peer.is_up:
                sender.answered(self._number, answer)

        self.peer.transfer(sender.peer, size, arrive)


@dataclass(frozen=True, slots=True)
class WeightGradients:
    """The rest of a microbatch whose answer has been sent."""

    computation: Computation
    ended: ClassVar[bool] = False

    @property
    def step(self) -> Step:
        return self.computation.step

    @property
    def index(self) -> MicrobatchIndex:
        return self.computation.microbatch


class PipelinePeer(ABC, Generic[ReceiptT]):
    """One volunteer while it holds its stage: trainer, sender and receiver."""

    def __init__(
        self,
        peer_id: PeerId,
        manifest: Manifest,
        sizes: Sequence[StageSizes],
        loaded: LoadedStage[ReceiptT],
        members: Members,
        microbatch_seconds: float,
    ) -> None:
        self.peer_id, self.manifest, self.sizes = peer_id, manifest, sizes
        self.loaded, self.account = loaded, loaded.account
        self.stage = loaded.account.stage
        self.microbatch_seconds = microbatch_seconds
        """Seconds of work that a microbatch is for it."""
        self.in_flight = 0
        """Requests that it has accepted and not answered."""
        self.owed = 0
        """Microbatches that it has answered and not counted."""
        self.leases = LeaseQueue()
        self._members = members
        self.downstreams: dict[StageIndex, Downstream[ReceiptT]] = {}
        """Those that it has needed."""
        self._masks: dict[int, Callable[[tuple[StageIndex, ...]], None]] = {}

    # ---- what a subclass models

    @property
    @abstractmethod
    def now(self) -> float: ...
    @property
    @abstractmethod
    def is_up(self) -> bool: ...
    @abstractmethod
    def later(self, seconds: float, action: Action) -> None:
        """Do it after some seconds, unless it holds its stage no longer by then."""

    @abstractmethod
    def find(self, peer: PeerId) -> PipelinePeer[ReceiptT] | None: ...
    @abstractmethod
    def routing(self) -> StageRouting:
        """Make its routing table for one stage."""

    @abstractmethod
    def compute(
        self, part: Part, request: Request[ReceiptT] | WeightGradients, done: Action
    ) -> None:
        """Do a part of a microbatch's work, unless the request has ended before it is begun."""

    @abstractmethod
    def transfer(self, receiver: PipelinePeer[ReceiptT], size: int, arrive: Action) -> None:
        """Send some bytes to another peer, or to itself."""

    @abstractmethod
    def uplink_seconds(self) -> float:
        """Return what it reports as the seconds of its uplink per microbatch."""

    @abstractmethod
    def resolve(self, result: LeaseResult, receipts: tuple[ReceiptT, ...] = ()) -> None:
        """Send the coordinator a lease's result, whose receipts are passed apart from it."""

    @abstractmethod
    def report_receipts(self) -> None:
        """Send the coordinator the receipts that it has not reported."""

    @abstractmethod
    def request_mask(self, step: Step, microbatch: MicrobatchIndex) -> int:
        """Send the coordinator a `MaskRequest`; return its number."""

    def owe(self, computation: Computation) -> None:
        """Compute the weights' gradients of an answered microbatch when nothing else waits, and
        count it."""
        self.owed += 1
        self.compute(
            Part.WEIGHT_GRADIENTS, WeightGradients(computation), lambda: self._paid(computation)
        )

    def _paid(self, computation: Computation) -> None:
        self.owed -= 1
        self.count(computation)
        if not self.owed:
            self.report_receipts()

    def count(self, computation: Computation) -> ReceiptT | None:
        """Add a computed microbatch; return its receipt, if there is one."""
        return self.loaded.count(computation)

    # ---- sending

    @property
    def next(self) -> Downstream[ReceiptT] | None:
        """Its deliveries to the stage behind its own, if there is one."""
        behind = StageIndex(self.stage + 1)
        return self._to(behind) if behind < self.manifest.stage_count else None

    def _to(self, stage: StageIndex) -> Downstream[ReceiptT]:
        downstream = self.downstreams.get(stage)
        if downstream is None:
            downstream = self.downstreams[stage] = Downstream(self, stage)
            downstream.oldest_step_is(self.account.step)
            downstream.learn(self._members)
        return downstream

    def learn(self, members: Members) -> None:
        self._members = members
        for downstream in self.downstreams.values():
            downstream.learn(members)

    def step_changed(self) -> None:
        for downstream in self.downstreams.values():
            downstream.oldest_step_is(self.account.step)
        self._start_leased()

    # ---- leases

    def lease(self, lease: Lease) -> None:
        for result in self.leases.take(lease):
            self.resolve(result)
        self._start_leased()

    def _start_leased(self) -> None:
        for started in self.leases.start(self.account.step, self.now):
            leased = started.leased
            microbatch = Microbatch(
                started.lease.step, leased.microbatch, leased.accumulate, leased.is_copy
            )
            self._to(StageIndex(0)).send(microbatch, partial(self._ended, started))

    def _ended(self, started: StartedMicrobatch, answer: Answer[ReceiptT]) -> None:
        lease, leased, ok = started.lease, started.leased, answer.refusal is None
        self.leases.finished(started, self.now, ok=ok)
        result = handed_back(lease, leased, "" if ok else "failed")
        result = result.model_copy(update={"ok": ok, "owing": answer.owing})
        self.resolve(result, answer.receipts)
        self._start_leased()

    # ---- masks

    def ask_mask(
        self, step: Step, microbatch: MicrobatchIndex,
        answer: Callable[[tuple[StageIndex, ...]], None],
    ) -> None:  # fmt: skip
        self._masks[self.request_mask(step, microbatch)] = answer

    def masked(self, message: Mask) -> None:
        answer = self._masks.pop(message.request, None)
        if answer is not None:
            answer(message.accumulate)
