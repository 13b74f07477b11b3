"""The fine data plane: every microbatch on its path through queues, credits and links.

The peers follow the production rules (`pipeline_peer`). The model is the time: a device computes
one thing at a time (`compute_order`); a link carries one payload after the other. An audit
takes the transfer of its inputs and the work of a whole microbatch (`audits`).
"""

from __future__ import annotations

import random
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
from swarm_coordinator.core.trust.showing import shown_bytes
from swarm_coordinator.simulator.audits import LIE, ROUNDING, lies_in
from swarm_coordinator.simulator.event_heap import Action
from swarm_coordinator.simulator.pipeline_peer import (
    PART_OF_WORK,
    Members,
    PipelinePeer,
    Request,
    WeightGradients,
)
from swarm_coordinator.simulator.stage_holder import LoadedStage
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_coordinator.simulator.volunteer import (
    COORDINATOR_LATENCY_SECONDS,
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
    Roster,
)
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.compute_order import ComputeOrder, Part
from swarm_shared.volunteer_rules.heartbeat import HeartbeatDelta, HeartbeatSnapshot
from swarm_shared.volunteer_rules.stage_account import Computation

if TYPE_CHECKING:
    from swarm_coordinator.simulator.swarm import Swarm

SMALL_BYTES = 256 * 1024
"""Size up to which a payload does not queue on a link: token ids, receipts and refusals."""


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
    request: Request[Receipt] | WeightGradients | _Audit
    done: Action


class _Node(PipelinePeer[Receipt]):
    """The data plane of one volunteer while it holds its stage."""

    def __init__(
        self, plane: MicrobatchPlane, volunteer: SimulatedVolunteer, loaded: LoadedStage[Receipt]
    ) -> None:
        super().__init__(
            volunteer.peer, plane.swarm.manifest, plane.swarm.sizes, loaded, plane.members,
            volunteer.computing_seconds(loaded.account.stage),
        )  # fmt: skip
        self.volunteer = volunteer
        self.open = True
        self.computed, self.busy_seconds = 0, 0.0
        """Since the last heartbeat."""
        self.heartbeats = HeartbeatDelta(plane.swarm.heartbeat_seconds)
        if volunteer.leaving:
            self.leases.leave()
        self.up_free_at = self.down_free_at = 0.0
        self._plane = plane
        self._waiting: ComputeOrder[_Compute] = ComputeOrder()
        self._busy = False

    # ---- what is modelled

    @property
    def now(self) -> float:
        return self._plane.swarm.event_heap.now

    @property
    def is_up(self) -> bool:
        return self.open and self.volunteer.alive

    def later(self, seconds: float, action: Action) -> None:
        self._plane.swarm.event_heap.later(seconds, lambda: self.is_up and action())

    def find(self, peer: PeerId) -> _Node | None:
        return self._plane.node(peer)

    def routing(self) -> StageRouting:
        return self._plane.routing()

    def uplink_seconds(self) -> float:
        return self.volunteer.uplink_seconds(self.stage)

    def count(self, computation: Computation) -> Receipt | None:
        self.computed += 1
        return super().count(computation)

    def transfer(self, receiver: PipelinePeer[Receipt], size: int, arrive: Action) -> None:
        assert isinstance(receiver, _Node)
        self._plane.transfer(self, receiver, size, arrive)

    def compute(
        self, part: Part, request: Request[Receipt] | WeightGradients, done: Action
    ) -> None:
        task = _Compute(PART_OF_WORK * self.microbatch_seconds, request, done)
        self._add(part, request.step, request.index, task)

    def audit(self, audit: _Audit, share: float, done: Action) -> None:
        """Compute a share of a microbatch for an audit."""
        task = _Compute(share * self.microbatch_seconds, audit, done)
        self._add(Part.AUDIT, audit.order.step, audit.order.microbatch, task)

    def _add(self, part: Part, step: Step, index: MicrobatchIndex, task: _Compute) -> None:
        self._waiting.add(part, step, index, task)
        self._next()

    def _next(self) -> None:
        while not self._busy and self._waiting:
            # What is owed takes memory, as what is in flight does.
            most = self.manifest.limits.stage_queue
            task = self._waiting.take(memory_short=self.owed + self.in_flight >= most)
            if not task.request.ended:
                self._busy = True
                self.later(task.seconds, partial(self._finished, task))

    def _finished(self, task: _Compute) -> None:
        self._busy = False
        self.busy_seconds += task.seconds
        if not task.request.ended:
            task.done()
        self._next()

    # ---- the coordinator

    def resolve(self, result: LeaseResult, receipts: tuple[Receipt, ...] = ()) -> None:
        volunteer = self.volunteer
        event = LeaseResolved(
            volunteer.session, volunteer.peer, result.step, result.microbatch, result.lease,
            result.ok, result.reason, receipts, result.owing,
        )  # fmt: skip
        self.to_coordinator(event)

    def report_receipts(self) -> None:
        batch = self.account.take_unreported()
        if batch:
            volunteer = self.volunteer
            self.to_coordinator(ReceiptsVerified(volunteer.session, volunteer.peer, batch))

    def request_mask(self, step: Step, microbatch: MicrobatchIndex) -> int:
        number = self._plane.next_mask()
        request = MaskRequest(request=number, step=step, microbatch=microbatch)
        self.to_coordinator(MessageReceived(self.volunteer.session, self.volunteer.peer, request))
        return number

    def to_coordinator(self, event: Event) -> None:
        seconds = self.volunteer.hardware.latency_seconds + COORDINATOR_LATENCY_SECONDS
        self.later(seconds, lambda: self.volunteer.deliver(event))


class MicrobatchPlane:
    """Implements `volunteer.DataPlane`."""

    TICK_SECONDS: ClassVar[float] = 0.25
    FOLLOWS_ROSTERS: ClassVar[bool] = True

    def __init__(self, swarm: Swarm) -> None:
        self.swarm = swarm
        self.members = Members()
        """The newest roster's; all nodes have it by its latency."""
        self._nodes: dict[PeerId, _Node] = {}
        self._roster: Roster | None = None
        self._masks_requested = 0
        self._last_stage = StageIndex(swarm.manifest.stage_count - 1)
        self._rng = random.Random(f"{swarm.seed} routing")
        swarm.event_heap.later(swarm.manifest.limits.receipt_interval_seconds, self._report)

    def routing(self) -> StageRouting:
        """Make the routing table of one sender for one stage."""
        training = self.swarm.manifest.training
        return self.swarm.options.routing(self._rng, training.microbatches_per_step)

    def node(self, peer: PeerId) -> _Node | None:
        return self._nodes.get(peer)

    def next_mask(self) -> int:
        self._masks_requested += 1
        return self._masks_requested

    # ---- serving peers

    def serves(self, volunteer: SimulatedVolunteer) -> None:
        assert volunteer.held is not None
        self._nodes[volunteer.peer] = _Node(self, volunteer, volunteer.held)

    def changed(self, volunteer: SimulatedVolunteer) -> None:
        """Ignored: `transfer` reads the sharing of the uplink itself."""

    def step_changed(self, volunteer: SimulatedVolunteer) -> None:
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            node.step_changed()

    def stops(self, volunteer: SimulatedVolunteer) -> None:
        node = self._nodes.pop(volunteer.peer, None)
        if node is not None:
            node.open = False

    def leaving(self, volunteer: SimulatedVolunteer) -> None:
        """Return the leased microbatches that it has not started."""
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            for result in node.leases.leave():
                node.resolve(result)

    def roster(self, volunteer: SimulatedVolunteer, roster: Roster) -> None:
        if roster is not self._roster:
            self._roster, self.members = roster, Members.of(roster.peers)
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            node.learn(self.members)

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

    # ---- leases, receipts and masks

    def lease(self, volunteer: SimulatedVolunteer, lease: Lease) -> None:
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            node.lease(lease)

    def mask(self, volunteer: SimulatedVolunteer, message: Mask) -> None:
        node = self._nodes.get(volunteer.peer)
        if node is not None:
            node.masked(message)

    def _report(self) -> None:
        for node in list(self._nodes.values()):
            node.report_receipts()
        self.swarm.event_heap.later(
            self.swarm.manifest.limits.receipt_interval_seconds, self._report
        )

    def closing(self, held: LoadedStage[Receipt], close: Close) -> None:
        """Ignored: `PipelinePeer` has counted what the peer holds."""

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
        sizes = self.swarm.sizes
        size = sizes[order.stage].input_bytes
        if order.stage < self._last_stage:
            size += sizes[behind].input_gradient_bytes
        if order.comparison is not None:
            size, share = shown_bytes(self.swarm.manifest, order.stage), 0.0
        statement = self._statement(volunteer, audited.volunteer, order)
        self.transfer(
            audited, node, size,
            lambda: node.audit(
                audit, share, lambda: self._state(volunteer, order, statement)
            ),
        )  # fmt: skip

    def _statement(
        self, auditor: SimulatedVolunteer, audited: SimulatedVolunteer, order: Audit
    ) -> AuditStatement:
        distance = None
        if order.comparison is not None:
            lies = lies_in(audited.peer, audited.hardware, order.step, order.microbatch)
            distance = LIE if lies else ROUNDING
        honest = simulated_transcript(
            order.step, order.microbatch, order.stage, self._last_stage,
            auditor.hardware.arithmetic,
        )  # fmt: skip
        return AuditStatement(
            run=RunId("simulated"), generation=Generation(1), audit=order.audit, step=order.step,
            microbatch=order.microbatch, stage=order.stage, peer=order.peer, auditor=auditor.peer,
            transcript=honest, loss_sum=1.0 if order.stage == self._last_stage else None,
            distance=distance,
        )  # fmt: skip

    def _state(
        self, volunteer: SimulatedVolunteer, order: Audit, statement: AuditStatement | None
    ) -> None:
        answer = AuditAnswered(volunteer.session, volunteer.peer, order.audit, statement, "")
        seconds = volunteer.hardware.latency_seconds + COORDINATOR_LATENCY_SECONDS
        volunteer.later(seconds, lambda: volunteer.deliver(answer))

    # ---- from peer to peer

    def transfer(self, sender: _Node, receiver: _Node, size: int, arrive: Action) -> None:
        """Send over the sender's uplink and the receiver's downlink, one large payload at a time.

        Small payloads do not queue: the streams of one connection share it fairly.
        """
        now = self.swarm.event_heap.now
        if sender is receiver:
            self.swarm.event_heap.later(0.0, arrive)
            return
        up, down = sender.volunteer.hardware, receiver.volunteer.hardware
        if size <= SMALL_BYTES:
            slower = min(up.up_bytes_per_second, down.down_bytes_per_second)
            latency = up.latency_seconds + down.latency_seconds
            self.swarm.event_heap.later(size / slower + latency, arrive)
            return
        share = SHARED_UPLINK_FRACTION if sender.volunteer.uploads else 1.0
        begins = max(now, sender.up_free_at)
        sender.up_free_at = begins + size / (share * up.up_bytes_per_second)
        received = max(begins, receiver.down_free_at) + size / down.down_bytes_per_second
        receiver.down_free_at = received
        latency = up.latency_seconds + down.latency_seconds
        self.swarm.event_heap.at(max(sender.up_free_at, received) + latency, arrive)
