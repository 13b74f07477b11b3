"""A simulated sender: carries out the decisions of `swarm_shared.volunteer_rules.delivery`, as
`swarm_client.pipeline.downstream` does over sockets."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from kits.swarm_world.decisions import CarryOut
from kits.swarm_world.facts import Violation
from kits.swarm_world.network import Edge
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import RefusalReason
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.delivery import (
    RETRY_SECONDS,
    Abandoned,
    Action,
    AskMask,
    CancelRequest,
    CloseEdge,
    Completed,
    Dispatcher,
    OpenEdge,
    Transmit,
)
from swarm_shared.volunteer_rules.latency import LatencyEstimate

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer

MIN_OVERDUE_SECONDS = 1.0
"""Seconds before an answer is overdue; fewer than in the daemon, because hedges are under test."""

UNKNOWN_LATENCY_SECONDS = 4.0
"""The same before the first answer."""

HELLO_SECONDS = 3.0
"""Seconds within which a stage server answers a hello."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """One microbatch with its accumulate mask."""

    step: Step
    microbatch: MicrobatchIndex
    accumulate: tuple[StageIndex, ...]
    is_copy: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one request or delivery."""

    refusal: RefusalReason | None
    receipts: tuple[Receipt, ...] = ()
    loss_sum: float = 0.0
    service_seconds: float = 0.0
    total_seconds: float = 0.0
    owing: tuple[PeerId, ...] = ()

    @property
    def ok(self) -> bool:
        return self.refusal is None


FAILED = Answer(RefusalReason.FAILED)


class Downstream:
    def __init__(self, peer: SimPeer, stage: StageIndex) -> None:
        depth = peer.world.options.stages - stage
        self.peer, self.stage = peer, stage
        rng = random.Random(f"{peer.id} {stage}")
        routing = StageRouting(rng, peer.world.options.microbatches)
        self._dispatcher = Dispatcher(
            stage, routing, depth, LatencyEstimate(MIN_OVERDUE_SECONDS, UNKNOWN_LATENCY_SECONDS)
        )
        self._edges: dict[PeerId, Edge] = {}
        self._requests: dict[int, Edge] = {}
        self._deliveries: dict[int, tuple[Parcel, Callable[[Answer], None]]] = {}
        self._answers: dict[int, Answer] = {}
        self._used: dict[int, dict[int, tuple[object, bool]]] = {}
        """By delivery, each mask that was sent, and whether it may be sent again. A mask is of one
        attempt, and of no use once a request with it may have been carried out."""
        self.questions: dict[int, float] = {}
        """When each mask was asked for that has not been answered."""
        self._ticks_at = math.inf
        self._carry_out = CarryOut(
            self._dispatcher.take_actions, self._carry_out_one, self._wake_in_time
        )
        self.roster_changed()

    # ---- the sender's own

    def send(self, parcel: Parcel, done: Callable[[Answer], None]) -> int:
        """Deliver to any peer of the stage; return the delivery's number."""
        number = self._dispatcher.submit(
            parcel.step, parcel.microbatch, parcel.accumulate, self.peer.world.now,
            is_copy=parcel.is_copy,
        )  # fmt: skip
        self._deliveries[number] = (parcel, done)
        self._carry_out()
        return number

    def withdraw(self, delivery: int) -> None:
        self._deliveries.pop(delivery, None)
        self._dispatcher.withdraw(delivery, self.peer.world.now)
        self._carry_out()

    def oldest_step_is(self, step: Step | None) -> None:
        self._dispatcher.oldest_step_is(step, self.peer.world.now)
        self._carry_out()

    def roster_changed(self) -> None:
        members = self.peer.members
        serving = {
            peer: record.microbatches_per_second
            for peer, record in members.items()
            if record.stage == self.stage and record.accepts_work
        }
        self._dispatcher.roster_changed(serving, members, self.peer.world.now)
        self._carry_out()

    def masked(self, query: int, missing: tuple[StageIndex, ...] | None) -> None:
        del self.questions[query]
        self._dispatcher.masked(query, missing, self.peer.world.now)
        self._carry_out()

    def close(self) -> None:
        self._dispatcher.close()
        self._carry_out()

    # ---- carrying out

    def _wake_in_time(self) -> None:
        wakes_at = self._dispatcher.wakes_at()
        if wakes_at is not None and wakes_at < self._ticks_at:
            self._ticks_at = wakes_at
            self.peer.later(wakes_at - self.peer.world.now, lambda: self._tick(wakes_at))

    def _tick(self, at: float) -> None:
        if at != self._ticks_at:
            return  # an earlier one was scheduled after it
        self._ticks_at = math.inf
        hedged = self._dispatcher.hedged
        self._dispatcher.tick(self.peer.world.now)
        self.peer.world.counts["hedge"] += self._dispatcher.hedged - hedged
        self._carry_out()

    def _carry_out_one(self, action: Action) -> None:
        match action:
            case Transmit(request, delivery, target, accumulate, is_copy):
                parcel = self._deliveries[delivery][0]
                self._check_mask(delivery, accumulate)
                self._transmit(
                    request, delivery, self._edges[target],
                    Parcel(parcel.step, parcel.microbatch, accumulate, is_copy),
                )  # fmt: skip
            case Completed(delivery, request):
                self._deliveries.pop(delivery)[1](self._answers.pop(request))
            case Abandoned(delivery):
                self._deliveries.pop(delivery)[1](FAILED)
            case CancelRequest(request):
                edge = self._requests.pop(request)
                del edge.requests[request]
                edge.forth("cancel", request, lambda: _cancel(edge, request))
                self._finish(edge)
            case AskMask(query, _, step, microbatch):
                self.questions[query] = self.peer.world.now
                self.peer.ask_mask(step, microbatch, self, query)
            case OpenEdge(target):
                self._open(target)
            case CloseEdge(target):
                self._finish(self._edges.pop(target))

    def _transmit(self, request: int, delivery: int, edge: Edge, parcel: Parcel) -> None:
        self._requests[request] = edge
        edge.requests[request] = (delivery, parcel.accumulate)
        edge.forth("forward", parcel, lambda: edge.receiver.server.serve(edge, request, parcel))

    def _check_mask(self, delivery: int, mask: tuple[StageIndex, ...]) -> None:
        used = self._used.setdefault(delivery, {})
        _, may_be_sent = used.get(id(mask), (mask, True))
        if mask and not may_be_sent:
            raise Violation(f"{self.peer.id} sends {mask} of delivery {delivery} again")
        used[id(mask)] = (mask, False)

    def answered(self, edge: Edge, request: int, answer: Answer) -> None:
        """An answer has arrived, perhaps again."""
        if self._requests.pop(request, None) is not None:
            delivery, mask = edge.requests.pop(request)
            self._answers[request] = answer
            if answer.refusal in RETRY_SECONDS:
                self._used[delivery][id(mask)] = (mask, True)
        now, dispatcher = self.peer.world.now, self._dispatcher
        if answer.refusal is None:
            dispatcher.answered(request, answer.service_seconds, answer.total_seconds, 0.0, now)
        else:
            dispatcher.refused(request, answer.refusal, "", now)
        self._carry_out()
        self._answers.pop(request, None)
        self._finish(edge)

    def _finish(self, edge: Edge) -> None:
        """End an edge that takes no requests any more once it has none."""
        if not edge.requests and self._edges.get(edge.receiver.id) is not edge:
            edge.end()

    # ---- edges

    def _open(self, target: PeerId) -> None:
        peer, world, receiver = self.peer, self.peer.world, self.peer.world.peers[target]
        edge = Edge(self, receiver)

        def opened(accepted: bool) -> None:
            if not edge.opening:
                return
            edge.opening = False
            if accepted and edge.open:
                self._edges[target] = edge
                self._dispatcher.opened(target, world.manifest.limits.edge_credits, world.now)
            else:
                edge.end()
                self._dispatcher.open_failed(target, world.now)
            self._carry_out()

        if frozenset((peer.id, target)) in world.blocked or not receiver.alive:
            peer.later(world.delay(), lambda: opened(False))
            return

        def answer() -> None:
            edge.back("hello answer", "", partial(opened, receiver.server.accepts(peer.id)))

        edge.forth("hello", self.stage, answer)
        peer.later(HELLO_SECONDS, lambda: opened(False))

    def edge_ended(self, edge: Edge) -> None:
        target, now = edge.receiver.id, self.peer.world.now
        requests, edge.requests = list(edge.requests), {}
        for request in requests:
            self._requests.pop(request, None)
        if self._edges.get(target) is edge:
            del self._edges[target]
            self._dispatcher.edge_lost(target, "the link has ended", now)
        else:
            for request in requests:
                self._dispatcher.failed(request, "the link has ended", now)
        self._carry_out()


def _cancel(edge: Edge, request: int) -> None:
    for task in list(edge.tasks.get(request, ())):
        task.cancel()
