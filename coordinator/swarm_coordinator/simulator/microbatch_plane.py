"""The fine data plane: every microbatch on its path through queues, credits and links.

Trainers, senders and receivers follow the production rules (`swarm_shared.volunteer_rules`): when
a leased microbatch starts (`lease_queue`); choice of the receiver, retries, hedges and masks
(`delivery`); what is accumulated and receipted (`stage_account`). A receiver computes backwards
before forwards, and refuses when its queue is full. The model is the time: a forward takes a third
of a microbatch's work and a backward the rest, a link carries one payload after the other, an edge
opens at once, and a request to a lost peer fails when the roster shows the loss. An audit takes the
transfer of its inputs and the work of a whole microbatch (`audits`).
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from swarm_coordinator.core.events import (
    AuditAnswered,
    Event,
    LeaseResolved,
    MessageReceived,
    ReceiptsVerified,
)
from swarm_coordinator.simulator.audits import LIE, ROUNDING, lies_in
from swarm_coordinator.simulator.event_heap import Action
from swarm_coordinator.simulator.stage_holder import LoadedStage
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_coordinator.simulator.volunteer import (
    SHARED_UPLINK_FRACTION,
    SimulatedVolunteer,
)
from swarm_shared.base.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
)
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.protocol import (
    Audit,
    Close,
    Heartbeat,
    Lease,
    LeaseResult,
    Mask,
    MaskRequest,
    RefusalReason,
    Roster,
)
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.delivery import (
    Abandoned,
    AskMask,
    CancelRequest,
    Completed,
    Dispatcher,
    OpenEdge,
    Transmit,
)
from swarm_shared.volunteer_rules.heartbeat import HeartbeatDelta, HeartbeatSnapshot
from swarm_shared.volunteer_rules.lease_queue import LeaseQueue, StartedMicrobatch
from swarm_shared.volunteer_rules.stage_account import Computation

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

FORWARD_SHARE = 1 / 3
SMALL_BYTES = 256 * 1024
"""Size up to which a payload does not queue on a link: token ids, receipts and refusals."""


@dataclass(frozen=True, slots=True)
class _Microbatch:
    """One microbatch with its accumulate mask."""

    step: Step
    index: MicrobatchIndex
    accumulate: tuple[StageIndex, ...]


@dataclass(frozen=True, slots=True)
class _Answer:
    """The result of one request: receipts, or why there is no gradient."""

    refusal: RefusalReason | None
    receipts: tuple[Receipt, ...] = ()
    service_seconds: float = 0.0
    total_seconds: float = 0.0
    uplink_seconds: float = 0.0


_FAILED = _Answer(RefusalReason.FAILED)

_Done = Callable[[_Answer], None]
_Missing = Callable[[tuple[StageIndex, ...]], None]


class _Members:
    """A roster as senders use it."""

    def __init__(self, roster: Roster) -> None:
        self.present = {record.peer for record in roster.peers}
        self.serving: dict[StageIndex, dict[PeerId, float]] = {}
        for record in roster.peers:
            if record.accepts_work:
                rates = self.serving.setdefault(record.stage, {})
                rates[record.peer] = record.microbatches_per_second


class _Downstream:
    """A node's deliveries to one stage: carries out the dispatcher's decisions in virtual time."""

    def __init__(self, node: _Node, stage: StageIndex, plane: MicrobatchPlane) -> None:
        self.stage, self.node = stage, node
        self._plane = plane
        self._dispatcher = Dispatcher(stage, plane.routing(), depth=plane.last_stage - stage + 1)
        self._deliveries: dict[int, tuple[_Microbatch, _Done]] = {}
        self._targets: dict[int, _Serving] = {}
        """Requests in flight, as their receivers have them."""
        self._ticks_at = math.inf

    def send(self, microbatch: _Microbatch, done: _Done) -> int:
        """Deliver to any peer of the stage; return the delivery's number."""
        number = self._dispatcher.submit(
            microbatch.step, microbatch.index, microbatch.accumulate, self._plane.now
        )
        self._deliveries[number] = (microbatch, done)
        self._carry_out()
        return number

    @property
    def hedged(self) -> int:
        return self._dispatcher.hedged

    def withdraw(self, delivery: int) -> None:
        self._deliveries.pop(delivery, None)
        self._dispatcher.withdraw(delivery, self._plane.now)
        self._carry_out()

    def learn(self, members: _Members) -> None:
        serving = members.serving.get(self.stage, {})
        self._dispatcher.roster_changed(serving, members.present, self._plane.now)
        self._carry_out()

    def step_is(self, step: Step) -> None:
        self._dispatcher.oldest_step_is(step, self._plane.now)
        self._carry_out()

    def answered(self, request: int, answer: _Answer) -> None:
        now = self._plane.now
        self._targets.pop(request, None)
        if answer.refusal is None:
            self._dispatcher.answered(
                request, answer.service_seconds, answer.total_seconds, answer.uplink_seconds, now
            )
        else:
            self._dispatcher.refused(request, answer.refusal, "", now)
        self._carry_out(answer)

    def _masked(self, query: int, missing: tuple[StageIndex, ...]) -> None:
        self._dispatcher.masked(query, missing, self._plane.now)
        self._carry_out()

    def _carry_out(self, answer: _Answer = _FAILED) -> None:
        """Carry out all decisions; `answer` is the one that has just arrived."""
        plane, dispatcher = self._plane, self._dispatcher
        while actions := dispatcher.take_actions():
            for action in actions:
                match action:
                    case Transmit(request, delivery, peer, accumulate):
                        sent, _ = self._deliveries[delivery]
                        microbatch = _Microbatch(sent.step, sent.index, accumulate)
                        self._transmit(request, peer, microbatch)
                    case Completed(delivery):
                        self._deliveries.pop(delivery)[1](answer)
                    case OpenEdge(peer):
                        dispatcher.opened(peer, plane.edge_credits, plane.now)
                    case CancelRequest(request):
                        self._cancel(request)
                    case AskMask(query, _, step, index):
                        plane.ask_mask(
                            self.node,
                            step,
                            index,
                            lambda m, q=query: self._masked(q, m),  # type: ignore[misc]
                        )
                    case Abandoned(delivery):
                        self._deliveries.pop(delivery)[1](_FAILED)
        wakes_at = dispatcher.wakes_at()
        if wakes_at is not None and wakes_at < self._ticks_at:
            self._ticks_at = wakes_at
            plane.later(self.node, wakes_at - plane.now, lambda: self._tick(wakes_at))

    def _tick(self, at: float) -> None:
        if at == self._ticks_at:  # else an earlier one was scheduled after it
            self._ticks_at = math.inf
            self._dispatcher.tick(self._plane.now)
            self._carry_out()

    def _transmit(self, request: int, peer: PeerId, microbatch: _Microbatch) -> None:
        receiver = self._plane.node(peer)
        if receiver is not None:  # else it is lost: the roster will show it
            serving = self._targets[request] = _Serving(
                self._plane, receiver, self, request, microbatch
            )
            size = self._plane.input_bytes(self.stage)
            self._plane.transfer(self.node, receiver, size, serving.begin)

    def _cancel(self, request: int) -> None:
        serving = self._targets.pop(request, None)
        if serving is not None:
            self._plane.transfer(self.node, serving.node, 0, serving.cancel)


class _Serving:
    """One request at its receiver: forward, on to the next stage, backward, answer."""

    def __init__(
        self,
        plane: MicrobatchPlane,
        node: _Node,
        sender: _Downstream,
        request: int,
        microbatch: _Microbatch,
    ) -> None:
        self.node = node
        self.ended = False
        self._plane, self._sender = plane, sender
        self._request, self._microbatch = request, microbatch
        self._began_at: float | None = None
        self._delivery: int | None = None

    def begin(self) -> None:
        """The request has arrived."""
        node, microbatch = self.node, self._microbatch
        if self.ended or not node.is_up:
            return
        if node.stage != self._sender.stage or not node.account.works_on(microbatch.step):
            self._reply(_Answer(RefusalReason.WRONG_STEP), 0)
        elif node.in_flight >= self._plane.stage_queue:
            self._reply(_Answer(RefusalReason.BUSY), 0)
        else:
            node.in_flight += 1
            self._began_at = self._plane.now
            computation = node.account.begin(
                microbatch.step, microbatch.index, microbatch.accumulate
            )
            node.compute(FORWARD_SHARE, self, lambda: self._forwarded(computation))

    def cancel(self) -> None:
        """The sender does not want it any more; what was counted stays counted."""
        if not self.ended:
            self._end()
            if self._delivery is not None and self.node.next is not None:
                self.node.next.withdraw(self._delivery)

    def _end(self) -> None:
        self.ended = True
        if self._began_at is not None:
            self.node.in_flight -= 1

    def _forwarded(self, computation: Computation) -> None:
        if self.node.next is None:
            # The last stage goes on at once: loss and backward belong to the same request.
            self._backward(computation, ())
        else:
            self._delivery = self.node.next.send(
                self._microbatch, lambda answer: self._came_back(computation, answer)
            )

    def _came_back(self, computation: Computation, answer: _Answer) -> None:
        if answer.refusal is None:
            self._backward(computation, answer.receipts)
        elif self.node.account.works_on(computation.step):
            self._reply(_FAILED, 0)
        else:
            self._reply(_Answer(RefusalReason.WRONG_STEP), 0)

    def _backward(self, computation: Computation, receipts: tuple[Receipt, ...]) -> None:
        self.node.compute(1 - FORWARD_SHARE, self, lambda: self._computed(computation, receipts))

    def _computed(self, computation: Computation, receipts: tuple[Receipt, ...]) -> None:
        node, began_at = self.node, self._began_at or 0.0
        node.computed += 1
        own = node.loaded.count(computation)
        if own is not None:
            receipts = (*receipts, own)
        answer = _Answer(
            None, receipts, node.microbatch_seconds, self._plane.now - began_at,
            node.volunteer.uplink_seconds(node.stage),
        )  # fmt: skip
        self._reply(answer, self._plane.input_gradient_bytes(node.stage))

    def _reply(self, answer: _Answer, size: int) -> None:
        self._end()
        sender = self._sender

        def arrive() -> None:
            if sender.node.is_up:
                sender.answered(self._request, answer)

        self._plane.transfer(self.node, sender.node, size, arrive)


@dataclass(frozen=True, slots=True)
class _Audit:
    """One order to audit, at its auditor."""

    node: _Node
    order: Audit
    ended: ClassVar[bool] = False


@dataclass(slots=True)
class _Compute:
    """One queued computation."""

    seconds: float
    serving: _Serving | _Audit
    done: Action


class _Node:
    """The data plane of one volunteer while it holds its stage."""

    def __init__(
        self, plane: MicrobatchPlane, volunteer: SimulatedVolunteer, loaded: LoadedStage[Receipt]
    ) -> None:
        self.volunteer = volunteer
        self.loaded, self.account = loaded, loaded.account
        self.stage = loaded.account.stage
        self.microbatch_seconds = plane.work(self.stage) / volunteer.hardware.flops_per_second
        self.open = True
        self.in_flight = 0
        self.computed, self.busy_seconds = 0, 0.0
        """Since the last heartbeat."""
        self.heartbeats = HeartbeatDelta(plane.heartbeat_seconds)
        self.leases = LeaseQueue()
        if volunteer.leaving:
            self.leases.leave()
        self.first = _Downstream(self, StageIndex(0), plane)
        self.next: _Downstream | None = None
        if self.stage < plane.last_stage:
            self.next = _Downstream(self, StageIndex(self.stage + 1), plane)
        self.up_free_at = self.down_free_at = 0.0
        self._plane = plane
        self._backwards: deque[_Compute] = deque()
        self._forwards: deque[_Compute] = deque()
        self._busy = False
        self.step_changed()

    @property
    def is_up(self) -> bool:
        return self.open and self.volunteer.alive

    def step_changed(self) -> None:
        for downstream in (self.first, self.next):
            if downstream is not None:
                downstream.step_is(self.account.step)

    def learn(self, members: _Members) -> None:
        for downstream in (self.first, self.next):
            if downstream is not None:
                downstream.learn(members)

    # ---- computing: one thing at a time, backwards first

    def compute(self, share: float, serving: _Serving | _Audit, done: Action) -> None:
        task = _Compute(share * self.microbatch_seconds, serving, done)
        (self._forwards if share == FORWARD_SHARE else self._backwards).append(task)
        self._next()

    def _next(self) -> None:
        while not self._busy and (self._backwards or self._forwards):
            task = (self._backwards or self._forwards).popleft()
            if not task.serving.ended:
                self._busy = True
                self._plane.later(self, task.seconds, lambda task=task: self._finished(task))  # type: ignore[misc]

    def _finished(self, task: _Compute) -> None:
        self._busy = False
        self.busy_seconds += task.seconds
        if not task.serving.ended:
            task.done()
        self._next()


class MicrobatchPlane:
    """Implements `volunteer.DataPlane`."""

    TICK_SECONDS: ClassVar[float] = 0.25
    FOLLOWS_ROSTERS: ClassVar[bool] = True

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._nodes: dict[PeerId, _Node] = {}
        self._roster: Roster | None = None
        self._members: _Members | None = None
        """The newest roster's; all nodes have it by its latency."""
        self._masks: dict[tuple[PeerId, int], _Missing] = {}
        self._asked = 0
        self._rng = random.Random(f"{swarm.seed} routing")
        self.last_stage = len(swarm.works) - 1
        self.edge_credits = swarm.manifest.limits.edge_credits
        self.stage_queue = swarm.manifest.limits.stage_queue
        self.heartbeat_seconds = swarm.heartbeat_seconds
        self.completed = 0
        swarm.event_heap.later(swarm.manifest.limits.receipt_interval_seconds, self._report)

    @property
    def now(self) -> float:
        return self._swarm.event_heap.now

    def routing(self) -> StageRouting:
        """Make the routing table of one sender for one stage."""
        training = self._swarm.manifest.training
        return self._swarm.options.routing(self._rng, training.microbatches_per_step)

    def work(self, stage: StageIndex) -> float:
        return self._swarm.works[stage]

    def node(self, peer: PeerId) -> _Node | None:
        return self._nodes.get(peer)

    def input_bytes(self, stage: StageIndex) -> int:
        return self._swarm.sizes[stage].input_bytes

    def input_gradient_bytes(self, stage: StageIndex) -> int:
        return self._swarm.sizes[stage].input_gradient_bytes

    def later(self, node: _Node, seconds: float, action: Action) -> None:
        """Schedule an action that is dropped when the node has closed."""
        self._swarm.event_heap.later(seconds, lambda: node.is_up and action())

    # ---- serving peers

    def serves(self, volunteer: SimulatedVolunteer) -> None:
        assert volunteer.held is not None
        node = self._nodes[volunteer.peer] = _Node(self, volunteer, volunteer.held)
        if self._members is not None:
            node.learn(self._members)

    def changed(self, volunteer: SimulatedVolunteer) -> None:
        """Ignored: `transfer` reads the sharing of the uplink itself."""

    def step_changed(self, volunteer: SimulatedVolunteer) -> None:
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            node.step_changed()
            self._start_leased(node)

    def stops(self, volunteer: SimulatedVolunteer) -> None:
        node = self._nodes.pop(volunteer.peer, None)
        if node is not None:
            node.open = False

    def leaving(self, volunteer: SimulatedVolunteer) -> None:
        """Return the leased microbatches that it has not started."""
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            self._hand_back(node, node.leases.leave())

    def roster(self, volunteer: SimulatedVolunteer, roster: Roster) -> None:
        if roster is not self._roster or self._members is None:
            self._roster, self._members = roster, _Members(roster)
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            node.learn(self._members)

    def heartbeat(self, volunteer: SimulatedVolunteer, rate: float, up: float) -> Heartbeat:
        node = self._nodes.get(volunteer.peer)
        if node is None:
            return Heartbeat(microbatches_per_second=rate, queued=0, up_bytes_per_second=up)
        present = HeartbeatSnapshot(
            rate, node.in_flight, up, (), (), paused=False, computed=node.computed,
            busy_seconds=node.busy_seconds,
        )  # fmt: skip
        node.computed, node.busy_seconds = 0, 0.0
        return node.heartbeats.heartbeat(present, len(self._nodes))

    # ---- the trainer's side

    def lease(self, volunteer: SimulatedVolunteer, lease: Lease) -> None:
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            self._hand_back(node, node.leases.take(lease))
            self._start_leased(node)

    def _start_leased(self, node: _Node) -> None:
        for started in node.leases.start(node.account.step, self.now):
            step, leased = started.lease.step, started.leased
            microbatch = _Microbatch(step, leased.microbatch, leased.accumulate)
            node.first.send(microbatch, partial(self._ended, node, started))

    def _ended(self, node: _Node, started: StartedMicrobatch, answer: _Answer) -> None:
        lease, leased, ok = started.lease, started.leased, answer.refusal is None
        node.leases.finished(started, self.now, ok=ok)
        self.completed += ok
        volunteer = node.volunteer
        event = LeaseResolved(
            volunteer.session, volunteer.peer, lease.step, leased.microbatch, lease.lease, ok,
            "" if ok else "failed", answer.receipts,
        )  # fmt: skip
        self._to_coordinator(node, event)
        self._start_leased(node)

    def _hand_back(self, node: _Node, results: Iterable[LeaseResult]) -> None:
        volunteer = node.volunteer
        for result in results:
            event = LeaseResolved(
                volunteer.session, volunteer.peer, result.step, result.microbatch, result.lease,
                False, result.reason, (),
            )  # fmt: skip
            self._to_coordinator(node, event)

    def _to_coordinator(self, node: _Node, event: Event) -> None:
        volunteer = node.volunteer
        latency = volunteer.hardware.latency_seconds
        seconds = latency + self._swarm.options.coordinator_latency_seconds
        self.later(node, seconds, lambda: volunteer.deliver(event))

    def _report(self) -> None:
        for node in list(self._nodes.values()):
            batch = node.account.take_unreported()
            if batch:
                volunteer = node.volunteer
                event = ReceiptsVerified(volunteer.session, volunteer.peer, batch)
                self._to_coordinator(node, event)
        self._swarm.event_heap.later(
            self._swarm.manifest.limits.receipt_interval_seconds, self._report
        )

    # ---- masks

    def ask_mask(
        self, node: _Node, step: Step, microbatch: MicrobatchIndex, answer: _Missing
    ) -> None:
        self._asked += 1
        number = self._asked
        self._masks[node.volunteer.peer, number] = answer
        volunteer = node.volunteer
        request = MaskRequest(request=number, step=step, microbatch=microbatch)
        self._to_coordinator(node, MessageReceived(volunteer.session, volunteer.peer, request))

    def mask(self, volunteer: SimulatedVolunteer, message: Mask) -> None:
        answer = self._masks.pop((volunteer.peer, message.request), None)
        if answer is not None and volunteer.peer in self._nodes:
            answer(message.accumulate)

    def closing(self, held: LoadedStage[Receipt], close: Close) -> None:
        """Ignored: `_Serving` has counted what the peer holds."""

    # ---- audits

    def audit(self, volunteer: SimulatedVolunteer, order: Audit) -> None:
        """Fetch the inputs from the audited peer, compute the microbatch again, and answer; asked
        to compare, fetch what the peer claims instead."""
        node, audited = self._nodes.get(volunteer.peer), self._nodes.get(order.peer)
        if (
            node is None or audited is None or order.stage != node.stage
            or not node.account.works_on(order.step)
        ):  # fmt: skip
            self._state(volunteer, order, None)
            return
        audit, share = _Audit(node, order), 1.0
        behind = StageIndex(order.stage + 1)
        size = self.input_bytes(order.stage)
        if order.stage < self.last_stage:
            size += self.input_gradient_bytes(behind)
        if order.claimed is not None:
            size, share = 4 * self._swarm.sizes[order.stage].parameters, 0.0
        statement = self._statement(volunteer, audited.volunteer, order)
        self.transfer(
            audited, node, size,
            lambda: node.compute(
                share, audit, lambda: self._state(volunteer, order, statement)
            ),
        )  # fmt: skip

    def _statement(
        self, auditor: SimulatedVolunteer, audited: SimulatedVolunteer, order: Audit
    ) -> AuditStatement:
        distance = None
        if order.claimed is not None:
            lies = lies_in(audited.peer, audited.hardware, order.step, order.microbatch)
            distance = LIE if lies else ROUNDING
        honest = simulated_transcript(
            order.step, order.microbatch, order.stage, StageIndex(self.last_stage),
            auditor.hardware.arithmetic,
        )  # fmt: skip
        return AuditStatement(
            run=RunId("simulated"), generation=Generation(1), audit=order.audit, step=order.step,
            microbatch=order.microbatch, stage=order.stage, peer=order.peer, auditor=auditor.peer,
            transcript=honest, loss_sum=1.0 if order.stage == self.last_stage else None,
            distance=distance,
        )  # fmt: skip

    def _state(
        self, volunteer: SimulatedVolunteer, order: Audit, statement: AuditStatement | None
    ) -> None:
        answer = AuditAnswered(volunteer.session, volunteer.peer, order.audit, statement, "")
        latency = volunteer.hardware.latency_seconds
        seconds = latency + self._swarm.options.coordinator_latency_seconds
        volunteer.later(seconds, lambda: volunteer.deliver(answer))

    # ---- from peer to peer

    def transfer(self, sender: _Node, receiver: _Node, size: int, arrive: Action) -> None:
        """Send over the sender's uplink and the receiver's downlink, one large payload at a time.

        Small payloads do not queue: the streams of one connection share it fairly.
        """
        now = self.now
        if sender is receiver:
            self._swarm.event_heap.later(0.0, arrive)
            return
        up, down = sender.volunteer.hardware, receiver.volunteer.hardware
        if size <= SMALL_BYTES:
            slower = min(up.up_bytes_per_second, down.down_bytes_per_second)
            latency = up.latency_seconds + down.latency_seconds
            self._swarm.event_heap.later(size / slower + latency, arrive)
            return
        share = SHARED_UPLINK_FRACTION if sender.volunteer.uploads else 1.0
        begins = max(now, sender.up_free_at)
        sender.up_free_at = begins + size / (share * up.up_bytes_per_second)
        received = max(begins, receiver.down_free_at) + size / down.down_bytes_per_second
        receiver.down_free_at = received
        latency = up.latency_seconds + down.latency_seconds
        self._swarm.event_heap.at(max(sender.up_free_at, received) + latency, arrive)
