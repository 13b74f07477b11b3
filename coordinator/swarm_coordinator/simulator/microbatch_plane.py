"""The fine data plane: every microbatch on its path through queues, credits and links.

Senders choose receivers with the production routing, fed with the production formula for
observations. A receiver computes backwards before forwards, refuses when its queue is full, and
counts by the accumulate mask; a sender requests a mask from the coordinator before it retries. The
model is the time: a forward takes a third of a microbatch's work and a backward the rest, a link
carries one payload after the other, and a request to a lost peer fails when the roster shows the
loss.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import ClassVar

from swarm_coordinator.core.events import LeaseResolved, ReceiptsVerified
from swarm_coordinator.simulator.event_heap import Action
from swarm_coordinator.simulator.hop import Answer, Hop, Missing, Request, RoutedMicrobatch
from swarm_coordinator.simulator.volunteer import (
    SHARED_UPLINK_FRACTION,
    SimulatedVolunteer,
    SwarmView,
)
from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import Lease, LeasedMicrobatch, Mask, MaskRequest, Roster
from swarm_shared.scheduling.inflight_window import InFlightWindow, SendRecord

FORWARD_SHARE = 1 / 3
SMALL_BYTES = 256 * 1024
"""Size up to which a payload does not queue on a link: token ids, receipts and refusals."""


@dataclass(slots=True)
class _Compute:
    """One queued computation."""

    seconds: float
    done: Action


class _Node:
    """The data plane of one volunteer while it holds its stage."""

    def __init__(self, plane: MicrobatchPlane, volunteer: SimulatedVolunteer) -> None:
        assert volunteer.stage is not None
        self.volunteer = volunteer
        self.stage = volunteer.stage
        self.open = True
        self.held: dict[MicrobatchIndex, Receipt] = {}
        self.held_step = Step(0)
        self.unreported: list[Receipt] = []
        self.in_flight = 0
        self.flight = InFlightWindow()
        self.least_window, self.max_window = 1, 1
        self.leased: deque[tuple[Lease, LeasedMicrobatch]] = deque()
        self.edge_credits = plane.edge_credits
        self.first = Hop(self, StageIndex(0))
        self.next: Hop | None = None
        if self.stage < plane.last_stage:
            self.next = Hop(self, StageIndex(self.stage + 1))
        self.up_free_at = self.down_free_at = 0.0
        self.known: dict[PeerId, StageIndex] = {}
        self._by_stage: dict[StageIndex, list[PeerId]] = {}
        self._plane = plane
        self._backwards: deque[_Compute] = deque()
        self._forwards: deque[_Compute] = deque()
        self._busy = False

    # ---- the roster

    def learn(self, roster: Roster) -> None:
        self.known = {record.peer: record.stage for record in roster.peers}
        self._by_stage = {}
        for record in roster.peers:
            if record.accepts_work:
                self._by_stage.setdefault(record.stage, []).append(record.peer)
        self.first.roster_changed()
        if self.next is not None:
            self.next.roster_changed()

    def members(self, stage: StageIndex) -> list[PeerId]:
        return self._by_stage.get(stage, [])

    def works_on(self, step: Step) -> bool:
        return self.open and self.volunteer.alive and self.volunteer.version + 1 == step

    # ---- sending (`hop.Sender`)

    @property
    def now(self) -> float:
        return self._plane.now

    def later(self, seconds: float, action: Action) -> None:
        self._plane.later(self, seconds, action)

    def ask_mask(self, parcel: RoutedMicrobatch, answer: Missing) -> None:
        self._plane.ask_mask(self, parcel, answer)

    def deliver(self, stage: StageIndex, parcel: RoutedMicrobatch, request: Request) -> None:
        self._plane.deliver_request(self, stage, parcel, request)

    def answer(self, request: Request, answer: Answer) -> None:
        self._plane.answer(request, answer)

    # ---- computing: one thing at a time, backwards first

    @property
    def microbatch_seconds(self) -> float:
        return self._plane.work(self.stage) / self.volunteer.hardware.flops_per_second

    def compute(self, share: float, done: Action) -> None:
        task = _Compute(share * self.microbatch_seconds, done)
        (self._forwards if share == FORWARD_SHARE else self._backwards).append(task)
        self._next()

    def _next(self) -> None:
        if self._busy or not (self._backwards or self._forwards):
            return
        task = (self._backwards or self._forwards).popleft()
        self._busy = True

        def finished() -> None:
            self._busy = False
            task.done()
            self._next()

        self._plane.later(self, task.seconds, finished)

    # ---- counting

    def count(self, parcel: RoutedMicrobatch) -> Receipt | None:
        """Accumulate a microbatch once if the mask includes this stage; its receipt if held."""
        if self.held_step != parcel.step:
            self.held_step, self.held, self.unreported = parcel.step, {}, []
        known = self.held.get(parcel.microbatch)
        if known is None and self.stage in parcel.accumulate and self.works_on(parcel.step):
            known = self._plane.receipt(self, parcel)
            self.held[parcel.microbatch] = known
            self.unreported.append(known)
        return known


class MicrobatchPlane:
    """Implements `volunteer.DataPlane`."""

    TICK_SECONDS: ClassVar[float] = 0.25
    FOLLOWS_ROSTERS: ClassVar[bool] = True

    def __init__(self, swarm: SwarmView) -> None:
        self._swarm = swarm
        self._nodes: dict[PeerId, _Node] = {}
        self._roster: Roster | None = None
        self._masks: dict[tuple[PeerId, int], Missing] = {}
        self._early: dict[PeerId, list[Lease]] = {}
        self._asked = 0
        self.last_stage = len(swarm.works) - 1
        self.edge_credits = swarm.manifest.limits.edge_credits
        self.completed = 0
        swarm.event_heap.later(swarm.manifest.limits.receipt_interval_seconds, self._report)

    @property
    def now(self) -> float:
        return self._swarm.event_heap.now

    def work(self, stage: StageIndex) -> float:
        return self._swarm.works[stage]

    def later(self, node: _Node, seconds: float, action: Action) -> None:
        """Schedule an action that is dropped when the node has closed."""
        self._swarm.event_heap.later(
            seconds, lambda: node.open and node.volunteer.alive and action()
        )

    # ---- serving peers

    def serves(self, volunteer: SimulatedVolunteer) -> None:
        node = self._nodes[volunteer.peer] = _Node(self, volunteer)
        if self._roster is not None:
            node.learn(self._roster)
        for lease in self._early.pop(volunteer.peer, ()):
            self.lease(volunteer, lease)

    def changed(self, volunteer: SimulatedVolunteer) -> None:
        """Ignored: `_transfer` reads the sharing of the uplink itself."""

    def stops(self, volunteer: SimulatedVolunteer) -> None:
        node = self._nodes.pop(volunteer.peer, None)
        if node is not None:
            node.open = False

    def leaving(self, volunteer: SimulatedVolunteer) -> None:
        """Return the leased microbatches that it has not started."""
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            while node.leased:
                lease, leased = node.leased.popleft()
                self._resolved(node, lease, leased.microbatch, Answer("failed"))

    def roster(self, volunteer: SimulatedVolunteer, roster: Roster) -> None:
        self._roster = roster
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            latency = volunteer.hardware.latency_seconds
            self.later(node, latency, lambda: node.learn(roster))

    def queued(self, volunteer: SimulatedVolunteer) -> int:
        node = self._nodes.get(volunteer.peer)
        return 0 if node is None else node.in_flight

    # ---- the trainer's side

    def lease(self, volunteer: SimulatedVolunteer, lease: Lease) -> None:
        node = self._nodes.get(volunteer.peer)
        if node is None:
            # The lease arrives together with the message that admits it to the step.
            self._early.setdefault(volunteer.peer, []).append(lease)
            return
        latency = volunteer.hardware.latency_seconds

        def take() -> None:
            node.least_window = max(1, lease.window)
            node.max_window = max(node.least_window, lease.max_window)
            node.leased.extend((lease, leased) for leased in lease.microbatches)
            self._drive(node)

        self.later(node, latency, take)

    def _drive(self, node: _Node) -> None:
        while node.leased and node.flight.in_flight < node.flight.size(
            node.least_window, node.max_window
        ):
            lease, leased = node.leased.popleft()
            if not node.works_on(lease.step):
                continue
            parcel = RoutedMicrobatch(lease.step, leased.microbatch, frozenset(leased.accumulate))
            send_record = node.flight.sent(self._swarm.event_heap.now)

            def done(
                answer: Answer, lease: Lease = lease, leased: LeasedMicrobatch = leased,
                send_record: SendRecord = send_record,
            ) -> None:  # fmt: skip
                if answer.state == "ok":
                    node.flight.returned(send_record, self._swarm.event_heap.now)
                else:
                    node.flight.failed()
                self._resolved(node, lease, leased.microbatch, answer)
                self._drive(node)

            node.first.send(parcel, done)

    def _resolved(
        self, node: _Node, lease: Lease, microbatch: MicrobatchIndex, answer: Answer
    ) -> None:
        volunteer, ok = node.volunteer, answer.state == "ok"
        self.completed += ok
        event = LeaseResolved(
            volunteer.session, volunteer.peer, lease.step, microbatch, lease.lease, ok,
            "" if ok else answer.state, answer.receipts, None, 0,
        )  # fmt: skip
        self._to_coordinator(node, lambda: volunteer.deliver(event))

    def _to_coordinator(self, node: _Node, action: Action) -> None:
        latency = node.volunteer.hardware.latency_seconds
        self.later(node, latency + self._swarm.options.coordinator_latency_seconds, action)

    def _report(self) -> None:
        for node in list(self._nodes.values()):
            if node.unreported:
                batch, node.unreported = tuple(node.unreported), []
                volunteer = node.volunteer
                event = ReceiptsVerified(volunteer.session, volunteer.peer, batch)
                self._to_coordinator(node, lambda v=volunteer, e=event: v.deliver(e))  # type: ignore[misc]
        self._swarm.event_heap.later(
            self._swarm.manifest.limits.receipt_interval_seconds, self._report
        )

    # ---- masks

    def ask_mask(
        self,
        node: _Node,
        parcel: RoutedMicrobatch,
        answer: Missing,
    ) -> None:
        self._asked += 1
        number = self._asked
        self._masks[node.volunteer.peer, number] = answer
        request = MaskRequest(request=number, step=parcel.step, microbatch=parcel.microbatch)
        self._to_coordinator(node, lambda: node.volunteer.send(request))

    def mask(self, volunteer: SimulatedVolunteer, message: Mask) -> None:
        answer = self._masks.pop((volunteer.peer, message.request), None)
        node = self._nodes.get(volunteer.peer)
        if answer is not None and node is not None:
            latency = volunteer.hardware.latency_seconds
            self.later(node, latency, lambda: answer(message.accumulate))

    # ---- from peer to peer

    def deliver_request(
        self, sender: _Node, stage: StageIndex, parcel: RoutedMicrobatch, request: Request
    ) -> None:
        receiver = self._nodes.get(request.target)
        if receiver is None:
            return  # lost: the roster will show it
        size = self._swarm.sizes[stage].input_bytes

        def arrive() -> None:
            if receiver.open and receiver.volunteer.alive:
                self._serve(sender, receiver, stage, parcel, request)

        self._transfer(sender, receiver, size, arrive)

    def _transfer(self, sender: _Node, receiver: _Node, size: int, arrive: Action) -> None:
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

    def answer(self, request: Request, answer: Answer) -> None:
        if request.open:
            request.open = False
            request.answered(answer)

    def _reply(
        self, receiver: _Node, sender: _Node, request: Request, answer: Answer, size: int
    ) -> None:
        def arrive() -> None:
            if sender.open and sender.volunteer.alive:
                self.answer(request, answer)

        self._transfer(receiver, sender, size, arrive)

    def _serve(
        self,
        sender: _Node,
        node: _Node,
        stage: StageIndex,
        parcel: RoutedMicrobatch,
        request: Request,
    ) -> None:
        """Process one microbatch in this stage: forward, on to the next stage, backward, answer."""
        if node.stage != stage or not node.works_on(parcel.step):
            self._reply(node, sender, request, Answer("wrong step"), 0)
            return
        if node.in_flight >= self._swarm.manifest.limits.stage_queue:
            self._reply(node, sender, request, Answer("busy"), 0)
            return
        node.in_flight += 1
        arrived = self.now

        def answer(given: Answer, size: int) -> None:
            node.in_flight -= 1
            self._reply(node, sender, request, given, size)

        def computed(receipts: tuple[Receipt, ...]) -> None:
            own = node.count(parcel)
            if own is not None:
                receipts = (*receipts, own)
            size = self._swarm.sizes[stage].input_gradient_bytes
            total = self.now - arrived
            uplink = node.volunteer.uplink_seconds(stage)
            answer(Answer("ok", receipts, node.microbatch_seconds, total, uplink), size)

        def came_back(given: Answer) -> None:
            if given.state != "ok":
                answer(Answer("failed"), 0)
                return
            node.compute(1 - FORWARD_SHARE, lambda: computed(given.receipts))

        def sent_on() -> None:
            if node.next is None:
                # The last stage goes on at once: loss and backward belong to the same request.
                node.compute(1 - FORWARD_SHARE, lambda: computed(()))
            else:
                node.next.send(parcel, came_back)

        node.compute(FORWARD_SHARE, sent_on)

    def receipt(self, node: _Node, parcel: RoutedMicrobatch) -> Receipt:
        manifest = self._swarm.manifest
        return Receipt(
            run=RunId("simulated"), generation=Generation(1), step=parcel.step,
            microbatch=parcel.microbatch, stage=node.stage, peer=node.volunteer.peer,
            samples=manifest.training.sequences_per_microbatch,
            tokens=manifest.tokens_per_microbatch,
            loss_sum=1.0 if node.stage == self.last_stage else None,
        )  # fmt: skip
