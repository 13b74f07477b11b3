"""The delivery of microbatches from one sender to the peers of one stage: choice of the peer,
retries, masks and hedges.

Sans I/O. The owner reports what happened (`submit`, `opened`, `answered`, `masked`, `tick`, ...),
each with the time where time matters, then carries out what `take_actions` returns, and calls
`tick` no later than `wakes_at`. The microbatch's tensor stays with the owner, so a lost peer is
replaced by sending the same tensor to another one, and nothing upstream is computed again.

A delivery has one or more attempts. An attempt waits for a peer, is sent to it, pauses after a
refusal, or asks the coordinator for a new mask after a failure. A peer may answer late because it
is slow, because its worker hangs, or because a peer behind it does. The sender cannot distinguish
these cases and need not: when an answer is overdue (`latency`) and no other microbatch waits for
room, the delivery is hedged: a further attempt goes to another peer (the backup tasks of MapReduce,
Dean & Ghemawat 2004). The first answer is taken and the other requests are cancelled. Two peers may
then have counted the microbatch: the coordinator's table has one of them, and the other one removes
it at the step close.

Invariants:

1. Every submitted delivery ends exactly once: with `Completed`, with `Abandoned`, or withdrawn.
2. An edge has at most as many requests in flight as its peer granted credits, and at most one
   opening of an edge to a peer is under way.
3. A peer never has two requests in flight of one delivery.
4. After a failure, an attempt of a training microbatch is sent again only with a mask that was
   asked for after the failure. A hedge of a training microbatch is sent only with a mask asked for
   when it began. Both masks are restricted to this stage and those after it.
5. No attempt waits while an open edge has room to a peer that the routing allows and that has not
   got its microbatch, unless an edge to its planned peer is being opened, and then no longer than
   that peer takes for a microbatch; and for each attempt that waits an edge is being opened, as
   long as there are such peers without one. Attempts wait in the order in which they began to.
6. A delivery that has ended has no request in flight: each was answered, failed, or cancelled.
7. Nothing is sent to a peer that does not serve the stage, and nothing of a step older than the
   oldest wanted one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import RefusalReason
from swarm_shared.scheduling.routing import Observation, StageRouting
from swarm_shared.volunteer_rules.latency import LatencyEstimate

BUSY_RETRY_SECONDS = 0.05
"""Pause after a busy refusal; a full queue drains by one microbatch in about this time or more."""

STEP_RETRY_SECONDS = 0.1
"""Pause after a wrong-step refusal; peers apply a step within a fraction of a second of
each other."""

MAX_FAILURES = 8
"""Failures of one attempt after which it ends, and the coordinator leases the microbatch again."""

MAX_HEDGES = 2
"""Maximum number of hedges of one delivery; beyond that the step itself is slow."""

OVERDUE_CHECK_SECONDS = 0.25
"""Minimum seconds between two searches for overdue answers."""

OVERDUE_MICROBATCHES = 2.0
"""Microbatches of the peer itself for which an answer may take longer than usual: the usual latency
is that of all peers, of which one may be much slower."""

RETRY_SECONDS = {
    RefusalReason.BUSY: BUSY_RETRY_SECONDS,
    RefusalReason.WRONG_STEP: STEP_RETRY_SECONDS,
}
"""Pauses after the refusals that are no failures: the peer has not begun, so the mask still
holds."""


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """Open an edge to `peer`; report `opened` or `open_failed`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class CloseEdge:
    """Send nothing more on the edge to `peer`, and close it once all requests on it have ended. A
    new edge to the same peer may be opened meanwhile."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send the microbatch of `delivery` to `peer` on its edge; report `answered`, `refused` or
    `failed`, or `edge_lost` for all requests on the edge together."""

    request: int
    delivery: int
    peer: PeerId
    accumulate: tuple[StageIndex, ...]
    """The stages that shall count the microbatch."""
    is_copy: bool
    """Whether another copy of the microbatch may be under way."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel the request at its receiver. Reports of it are ignored from now on."""

    request: int


@dataclass(frozen=True, slots=True)
class AskMask:
    """Ask the coordinator which stages have not counted the microbatch; report `masked`."""

    query: int
    delivery: int
    step: Step
    microbatch: MicrobatchIndex


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer of `request` is the delivery's; the delivery has ended."""

    delivery: int
    request: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """There will be no answer; the delivery has ended. The coordinator leases the microbatch again
    if it is still needed."""

    delivery: int
    reason: str


Action = OpenEdge | CloseEdge | Transmit | CancelRequest | AskMask | Completed | Abandoned


@dataclass(slots=True, eq=False)
class _Edge:
    peer: PeerId
    credits: int
    requests: dict[int, _Sent] = field(default_factory=dict)
    """The requests in flight, by number."""

    @property
    def has_room(self) -> bool:
        return len(self.requests) < self.credits


@dataclass(slots=True, eq=False)
class _Delivery:
    number: int
    step: Step
    microbatch: MicrobatchIndex
    attempts: list[_Attempt] = field(default_factory=list)
    """The attempts under way."""
    hedges: int = 0
    reason: str | None = None
    """Why the first ended attempt of this delivery has ended: it has retried most often."""

    def sent(self) -> list[_Sent]:
        return [a.state for a in self.attempts if isinstance(a.state, _Sent)]

    def peers(self) -> set[PeerId]:
        """The peers that have the microbatch now."""
        return {sent.edge.peer for sent in self.sent()}


@dataclass(frozen=True, slots=True)
class _Waiting:
    """The state of an attempt that waits for a peer with room."""


@dataclass(frozen=True, slots=True)
class _Sent:
    attempt: _Attempt
    request: int
    edge: _Edge
    at: float
    in_flight: int
    """Requests in flight on the edge when this one was sent, itself included."""
    expected_at: float
    """Time at which the answer is expected, without the usual latency."""


@dataclass(frozen=True, slots=True)
class _Pausing:
    """The state of an attempt that pauses after a refusal."""

    until: float


@dataclass(frozen=True, slots=True)
class _AskingMask:
    attempt: _Attempt
    query: int
    overdue: PeerId | None
    """The peer whose answer is overdue, while a hedge asks; None after a failure."""


_WAITING = _Waiting()


@dataclass(slots=True, eq=False)
class _Attempt:
    """One of the attempts to have a delivery's microbatch computed. It ends by leaving
    `delivery.attempts`."""

    delivery: _Delivery
    accumulate: tuple[StageIndex, ...]
    is_copy: bool
    """Whether another copy of the microbatch may be under way: its peer is not the planned one."""
    state: _Waiting | _Sent | _Pausing | _AskingMask = _WAITING
    failures: int = 0


class Dispatcher:
    """The deliveries of one sender to one stage.

    Reports about requests, queries and deliveries that have ended are ignored: they may cross a
    cancellation on their way.
    """

    def __init__(
        self,
        stage: StageIndex,
        routing: StageRouting,
        depth: int = 1,
        latency: LatencyEstimate | None = None,
    ) -> None:
        """`depth` is the number of stages from `stage` to the last. No peer serves the stage before
        the first `roster_changed`; every step is wanted before the first `oldest_step_is`."""
        self.stage = stage
        self.hedged = 0
        """Hedges begun."""
        self._depth = depth
        self._latency = latency or LatencyEstimate()
        self._routing = routing
        self._serving: dict[PeerId, None] = {}
        self._edges: dict[PeerId, _Edge] = {}
        """Edges that take requests. An edge that only finishes its requests is not listed here."""
        self._opening: dict[PeerId, None] = {}
        self._deliveries: dict[int, _Delivery] = {}
        self._waiting: dict[_Attempt, float] = {}
        """The waiting attempts, each with the time since when, in the order in which they began."""
        self._pausing: dict[_Attempt, _Pausing] = {}
        self._sent: dict[int, _Sent] = {}
        """The requests in flight by number, in the order in which they were sent."""
        self._asking: dict[int, _AskingMask] = {}
        """The attempts that ask for a mask, by the number of the query."""
        self._numbers = itertools.count(1)
        self._oldest_step: Step | None = Step(0)
        self._closed = False
        self._retry_at: float | None = None
        """When an attempt that waits may be sent although nothing is reported: at the end of a ban,
        or of the time in which a planned peer's edge was to open."""
        self._overdue_checked_at = -math.inf
        self._actions: list[Action] = []

    def take_actions(self) -> list[Action]:
        """Return the actions decided since the previous call, to be carried out in this order."""
        actions, self._actions = self._actions, []
        return actions

    def wakes_at(self) -> float | None:
        """The time at which `tick` has to be called at the latest, if nothing is reported before;
        None: never. Read it after every report."""
        times = [] if self._retry_at is None else [self._retry_at]
        if self._pausing:
            times.append(min(pausing.until for pausing in self._pausing.values()))
        if self._sent and not self._waiting and len(self._serving) > 1:
            first = min(sent.expected_at for sent in self._sent.values())
            overdue_at = first + self._latency.limit_seconds(self._depth)
            times.append(max(overdue_at, self._overdue_checked_at + OVERDUE_CHECK_SECONDS))
        return min(times, default=None)

    def tick(self, now: float) -> None:
        """Carry on with what waited for this time: pauses, bans, overdue answers."""
        for attempt in [a for a, pausing in self._pausing.items() if pausing.until <= now]:
            del self._pausing[attempt]
            self._wait(attempt, now)
        self._dispatch(now)
        if now >= self._overdue_checked_at + OVERDUE_CHECK_SECONDS:
            self._overdue_checked_at = now
            self._hedge_overdue(now)
            self._dispatch(now)

    # ---- the sender's own

    def submit(
        self,
        step: Step,
        microbatch: MicrobatchIndex,
        accumulate: tuple[StageIndex, ...],
        now: float,
        *,
        is_copy: bool = False,
    ) -> int:
        """Begin a delivery; return its number. It may end before this returns (`take_actions`).
        `is_copy`: another copy of the microbatch may be under way, at a planned peer of this stage
        or a later one."""
        delivery = _Delivery(next(self._numbers), step, microbatch)
        self._deliveries[delivery.number] = delivery
        if self._closed:
            self._abandon(delivery, "this peer has given up its stage")
        elif not self._wants(step):
            self._abandon(delivery, "the step is over")
        else:
            self._wait(_begin_attempt(delivery, accumulate, is_copy), now)
            self._dispatch(now)
        return delivery.number

    def withdraw(self, delivery: int, now: float) -> None:
        """End a delivery without a result: its owner no longer waits for it."""
        if delivery in self._deliveries:
            self._end(self._deliveries[delivery])
            self._dispatch(now)

    def oldest_step_is(self, step: Step | None, now: float) -> None:
        """Abandon deliveries of older steps, present and future ones; None: of every step."""
        self._oldest_step = step
        for delivery in list(self._deliveries.values()):
            if not self._wants(delivery.step):
                # The peer that has it may never answer, and the next step needs the room that it
                # takes.
                self._abandon(delivery, "the step is over")
        self._dispatch(now)

    def close(self) -> None:
        """Abandon everything, close all edges, and abandon whatever is submitted afterwards."""
        self._closed = True
        self._serving = {}
        for delivery in list(self._deliveries.values()):
            self._abandon(delivery, "this peer has given up its stage")
        for peer in list(self._edges):
            self._close_edge(peer)

    def _wants(self, step: Step) -> bool:
        return self._oldest_step is not None and step >= self._oldest_step

    # ---- peers and edges

    def roster_changed(
        self, serving: Mapping[PeerId, float], present: Container[PeerId], now: float
    ) -> None:
        """Take over a changed roster. `serving` are the peers that accept work at the stage, with
        their rates in microbatches per second (0: unknown); `present` are all in the roster.

        What is in flight to a peer that is not present any more fails at once; a peer that merely
        serves no longer (it has moved, or leaves) finishes what it has.
        """
        if self._closed:
            return
        self._serving = dict.fromkeys(serving)
        self._routing.update(serving)
        for sent in [s for s in self._sent.values() if s.edge.peer not in present]:
            self._cancel(sent)
            self._fail(sent, f"{sent.edge.peer} has left the roster", now)
        for peer in [p for p in self._edges if p not in self._serving]:
            self._close_edge(peer)
        self._dispatch(now)

    def opened(self, peer: PeerId, credits: int, now: float) -> None:
        """Report that the edge to `peer` is open, and that the peer has granted `credits` requests
        at a time."""
        del self._opening[peer]
        self._edges[peer] = _Edge(peer, credits)
        if peer not in self._serving:
            self._close_edge(peer)
        self._dispatch(now)

    def open_failed(self, peer: PeerId, now: float) -> None:
        """Report that no edge to `peer` could be opened."""
        del self._opening[peer]
        self._routing.failed(peer, now)
        self._dispatch(now)

    def edge_lost(self, peer: PeerId, reason: str, now: float) -> None:
        """Report that the edge to `peer` has ended, and with it every request on it. (A request on
        an edge that `CloseEdge` has named is reported by `failed` instead.)"""
        edge = self._edges.pop(peer, None)
        if edge is not None:
            for sent in list(edge.requests.values()):
                self._forget(sent)
                self._fail(sent, reason, now)
            self._dispatch(now)

    def retire(self, peer: PeerId, now: float) -> None:
        """Give up the present edge to `peer`, because there is a better link: the next request
        opens a new edge; requests in flight finish on the old one."""
        if peer in self._edges:
            self._close_edge(peer)
            self._dispatch(now)

    def _close_edge(self, peer: PeerId) -> None:
        del self._edges[peer]
        self._actions.append(CloseEdge(peer))

    # ---- requests and masks

    def answered(
        self,
        request: int,
        service_seconds: float,
        total_seconds: float,
        uplink_seconds: float,
        now: float,
    ) -> None:
        """Report that the gradient has arrived. The peer has reported the seconds: of computing,
        from the request's arrival there to its answer, and of its uplink per microbatch."""
        sent = self._sent.get(request)
        if sent is None:
            return
        elapsed = now - sent.at
        # The share of the time that the peer's own account does not explain is the link's.
        link_seconds = max(0.0, elapsed - total_seconds) if total_seconds else 0.0
        observation = Observation(
            min(service_seconds, elapsed), uplink_seconds, link_seconds, sent.in_flight
        )
        self._latency.observe(elapsed)
        self._routing.observe(sent.edge.peer, observation, now)
        self._forget(sent)
        delivery = sent.attempt.delivery
        delivery.attempts.remove(sent.attempt)
        self._end(delivery)
        self._actions.append(Completed(delivery.number, request))
        self._dispatch(now)

    def refused(self, request: int, reason: RefusalReason, detail: str, now: float) -> None:
        """Report that the peer has refused the request."""
        sent = self._sent.get(request)
        if sent is None:
            return
        self._forget(sent)
        self._routing.refused(sent.edge.peer, now)
        pause_seconds = RETRY_SECONDS.get(reason)
        if pause_seconds is None:
            self._fail(sent, f"{reason.value}: {detail}" if detail else reason.value, now)
        else:
            sent.attempt.state = self._pausing[sent.attempt] = _Pausing(now + pause_seconds)
        self._dispatch(now)

    def failed(self, request: int, reason: str, now: float) -> None:
        """Report that the request has failed; whether the peer has counted the microbatch is
        unknown."""
        sent = self._sent.get(request)
        if sent is not None:
            self._forget(sent)
            self._fail(sent, reason, now)
            self._dispatch(now)

    def masked(self, query: int, missing: tuple[StageIndex, ...] | None, now: float) -> None:
        """Report the coordinator's answer to AskMask: the stages that have not counted the
        microbatch. None: there is no coordinator, or the session ended before it answered."""
        asking = self._asking.pop(query, None)
        if asking is None:
            return
        attempt, overdue = asking.attempt, asking.overdue
        if missing is None:
            # A hedge is no reason: the peer whose answer is overdue may still answer.
            reason = "which stages counted it is unknown" if overdue is None else None
            self._end_attempt(attempt, reason)
        else:
            if overdue is not None:
                # It gets nothing more until it has answered something.
                self._routing.failed(overdue, now)
            attempt.accumulate = tuple(stage for stage in missing if stage >= self.stage)
            self._wait(attempt, now)
        self._dispatch(now)

    # ---- decisions

    def _wait(self, attempt: _Attempt, now: float) -> None:
        attempt.state = _WAITING
        self._waiting[attempt] = now

    def _dispatch(self, now: float) -> None:
        """Send waiting attempts, in their order, as far as there is room; open an edge where a peer
        without one would be done sooner."""
        self._retry_at = None
        if not self._waiting:
            return
        awaiting = self._await_planned(now)
        awaited = {peer for peer, _ in awaiting.values()}
        opening = [p for p in self._opening if p in self._serving and p not in awaited]
        for attempt in [a for a in self._waiting if a not in awaiting]:
            holders = attempt.delivery.peers()
            expected = next((peer for peer in opening if peer not in holders), None)
            if expected is not None:
                opening.remove(expected)
            peer = self._choose(attempt, holders, now, may_open=expected is None)
            if peer is not None and peer not in self._edges:
                self._open(peer)
                # Which may take long, and fail in the end: meanwhile any open edge will do.
                peer = self._choose(attempt, holders, now, may_open=False)
            elif peer is None and expected is None and not holders:
                break  # nor is there a peer for any later attempt
            if peer is not None:
                self._transmit(attempt, self._edges[peer], now)
        times = [until for _, until in awaiting.values()]
        ban_ends_at = self._routing.next_ban_end(now) if self._waiting else None
        if ban_ends_at is not None:
            times.append(ban_ends_at)
        self._retry_at = min(times, default=None)

    def _await_planned(self, now: float) -> dict[_Attempt, tuple[PeerId, float]]:
        """Open edges to the planned peers of attempts that wait; return the attempts with these
        peers, and until when they wait: for as long as the peer takes for a microbatch. Another
        peer would have more than its share of the step meanwhile."""
        awaiting: dict[_Attempt, tuple[PeerId, float]] = {}
        for attempt, since in self._waiting.items():
            delivery = attempt.delivery
            peer = None if attempt.is_copy else self._routing.planned(delivery.microbatch, now)
            if peer is None or peer not in self._serving or peer in self._edges:
                continue
            until = since + self._routing.seconds_of(peer, now)
            if now < until and peer not in delivery.peers():
                awaiting[attempt] = peer, until
                self._open(peer)
        return awaiting

    def _open(self, peer: PeerId) -> None:
        if peer not in self._opening:
            self._opening[peer] = None
            self._actions.append(OpenEdge(peer))

    def _choose(
        self, attempt: _Attempt, holders: Container[PeerId], now: float, *, may_open: bool
    ) -> PeerId | None:
        in_flight: dict[PeerId, int] = {}
        for peer in self._serving:
            edge = self._edges.get(peer)
            if peer in holders:
                continue
            if edge is not None:
                if edge.has_room:
                    in_flight[peer] = len(edge.requests)
            elif may_open and peer not in self._opening:
                in_flight[peer] = 0
        if not in_flight:
            return None
        microbatch = None if attempt.is_copy else attempt.delivery.microbatch
        return self._routing.choose(now, in_flight, microbatch)

    def _transmit(self, attempt: _Attempt, edge: _Edge, now: float) -> None:
        del self._waiting[attempt]
        request, number = next(self._numbers), attempt.delivery.number
        own_seconds = OVERDUE_MICROBATCHES * self._routing.seconds_of(edge.peer, now)
        sent = _Sent(attempt, request, edge, now, len(edge.requests) + 1, now + own_seconds)
        attempt.state = self._sent[request] = edge.requests[request] = sent
        self._actions.append(
            Transmit(request, number, edge.peer, attempt.accumulate, attempt.is_copy)
        )

    def _forget(self, sent: _Sent) -> None:
        """Remove a request that is no longer in flight."""
        del self._sent[sent.request]
        del sent.edge.requests[sent.request]

    def _cancel(self, sent: _Sent) -> None:
        self._forget(sent)
        self._actions.append(CancelRequest(sent.request))

    def _fail(self, sent: _Sent, reason: str, now: float) -> None:
        """Count a failure of the attempt and of the peer; go on, or end the attempt."""
        attempt = sent.attempt
        attempt.failures += 1
        attempt.is_copy = True
        self._routing.failed(sent.edge.peer, now)
        if attempt.failures >= MAX_FAILURES:
            self._end_attempt(
                attempt,
                f"{attempt.failures} attempts to reach stage {self.stage} failed, the last one "
                f"because {reason}",
            )
        else:
            # A peer further down may have counted it before the link broke.
            self._ask_mask(attempt, overdue=None)

    def _ask_mask(self, attempt: _Attempt, overdue: PeerId | None) -> None:
        delivery = attempt.delivery
        asking = _AskingMask(attempt, next(self._numbers), overdue)
        attempt.state = self._asking[asking.query] = asking
        self._actions.append(
            AskMask(asking.query, delivery.number, delivery.step, delivery.microbatch)
        )

    def _hedge_overdue(self, now: float) -> None:
        """Hedge each delivery whose attempts are all in flight and whose latest one is overdue."""
        limit_seconds = self._latency.limit_seconds(self._depth)
        for delivery in list(self._deliveries.values()):
            if self._waiting:
                return  # the stage is busy, and one more copy would make it slower
            sent = delivery.sent()
            if len(sent) < len(delivery.attempts) or delivery.hedges >= MAX_HEDGES:
                continue
            latest = max(sent, key=lambda request: request.at)
            if now < latest.expected_at + limit_seconds or not self._has_other_room(
                delivery.peers()
            ):
                continue
            delivery.hedges += 1
            self.hedged += 1
            overdue = latest.edge.peer
            hedge = _begin_attempt(delivery, latest.attempt.accumulate, is_copy=True)
            self._ask_mask(hedge, overdue)

    def _has_other_room(self, holders: Container[PeerId]) -> bool:
        edges = self._edges
        return any(
            peer not in holders and (peer not in edges or edges[peer].has_room)
            for peer in self._serving
        )

    # ---- ends

    def _end_attempt(self, attempt: _Attempt, reason: str | None) -> None:
        """End one attempt, which is in none of the collections by state any more."""
        delivery = attempt.delivery
        delivery.attempts.remove(attempt)
        delivery.reason = delivery.reason or reason
        if not delivery.attempts:
            self._abandon(delivery, delivery.reason or "no peer answered")

    def _abandon(self, delivery: _Delivery, reason: str) -> None:
        self._end(delivery)
        self._actions.append(Abandoned(delivery.number, reason))

    def _end(self, delivery: _Delivery) -> None:
        """End a delivery and all attempts that are left."""
        del self._deliveries[delivery.number]
        for attempt in delivery.attempts:
            match attempt.state:
                case _Waiting():
                    del self._waiting[attempt]
                case _Sent() as sent:
                    self._cancel(sent)
                case _Pausing():
                    del self._pausing[attempt]
                case _AskingMask(query=query):
                    del self._asking[query]


def _begin_attempt(
    delivery: _Delivery, accumulate: tuple[StageIndex, ...], is_copy: bool
) -> _Attempt:
    attempt = _Attempt(delivery, accumulate, is_copy)
    delivery.attempts.append(attempt)
    return attempt
