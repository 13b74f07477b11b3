"""The invariants of `swarm_shared.volunteer_rules.delivery`, after every one of random reports.

A model follows the decisions alone: what is in flight where, which masks may be used, who waits.
"""

from __future__ import annotations

import copy
import itertools
import random
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import RefusalReason
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.delivery import (
    MAX_FAILURES,
    MAX_HEDGES,
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

STAGE = StageIndex(1)
PEERS = [PeerId(name) for name in "abcd"]
Mask = tuple[StageIndex, ...]


@dataclass(eq=False)
class Edge:
    peer: PeerId
    credits: int
    requests: set[int] = field(default_factory=set)

    @property
    def has_room(self) -> bool:
        return len(self.requests) < self.credits


@dataclass(eq=False)
class Attempt:
    delivery: int
    mask: Mask
    """The only one that it may be sent with. Every mask of a test is another one."""
    microbatch: MicrobatchIndex
    failures: int = 0
    waits_since: float = 0.0


@dataclass(frozen=True)
class Sent:
    attempt: Attempt
    edge: Edge
    at: float


@dataclass(eq=False)
class Submitted:
    step: Step
    microbatch: MicrobatchIndex
    hedges: int = 0


class DeliveryMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.routing = StageRouting(random.Random(1), 8)
        self.latency = LatencyEstimate(min_seconds=1.0, unknown_seconds=1.0)
        self.dispatcher = Dispatcher(STAGE, self.routing, 1, self.latency)
        self.now = 1000.0
        self.oldest: Step | None = Step(0)
        self.serving: list[PeerId] = []
        self.opening: set[PeerId] = set()
        self.edges: dict[PeerId, Edge] = {}
        self.submitted: dict[int, Submitted] = {}
        """Deliveries that have not ended."""
        self.ended: set[int] = set()
        self.waiting: list[Attempt] = []
        """Attempts of training microbatches, in the order in which they began to wait."""
        self.pausing: list[tuple[float, Attempt]] = []
        self.sent: dict[int, Sent] = {}
        self.asking: dict[int, Attempt] = {}
        self.failed: list[Attempt] = []
        """Attempts that have failed and need a new mask now."""
        self.finished_requests: list[int] = []
        self.ticking = False
        self.masks = itertools.count(100)
        self.set_roster(PEERS, set())

    # ---- following the decisions

    def follow(self) -> None:
        """Record what has been decided, and check it."""
        for action in self.dispatcher.take_actions():
            self.follow_one(action)
        assert not self.failed, "neither asks for a mask nor gives up"
        self.check()

    def follow_one(self, action: Action) -> None:
        match action:
            case OpenEdge(peer):
                assert peer in self.serving
                assert peer not in self.opening
                assert peer not in self.edges
                self.opening.add(peer)
            case CloseEdge(peer):
                del self.edges[peer]
            case Transmit():
                self.follow_transmit(action)
            case CancelRequest(request):
                self.take_back(request)
            case AskMask():
                self.follow_question(action)
            case Completed(delivery, request):
                assert request == self.finished_requests[-1]
                self.end(delivery)
            case Abandoned(delivery, reason):
                assert reason
                self.end(delivery)

    def follow_transmit(self, action: Transmit) -> None:
        edge = self.edges[action.peer]
        assert action.delivery in self.submitted
        assert action.peer in self.serving
        assert edge.has_room
        assert action.request not in self.sent
        assert action.request not in self.finished_requests
        assert action.peer not in self.peers(action.delivery)
        attempt = next(
            attempt
            for attempt in self.waiting
            if (attempt.delivery, attempt.mask) == (action.delivery, action.accumulate)
        )
        for earlier in self.waiting[: self.waiting.index(attempt)]:
            assert action.peer in self.peers(earlier.delivery) or self.awaited(earlier)
        self.waiting.remove(attempt)
        edge.requests.add(action.request)
        self.sent[action.request] = Sent(attempt, edge, self.now)

    def follow_question(self, action: AskMask) -> None:
        delivery = self.submitted[action.delivery]
        assert action.step == delivery.step
        for attempt in self.failed:
            if attempt.delivery == action.delivery:
                self.failed.remove(attempt)
                self.asking[action.query] = attempt
                return
        self.check_hedge(action.delivery)
        delivery.hedges += 1
        self.asking[action.query] = Attempt(action.delivery, (), delivery.microbatch)

    def check_hedge(self, number: int) -> None:
        """It is with peers only and the latest is overdue, while another peer has room and
        nothing waits."""
        assert self.ticking
        assert not self.waiting
        assert self.submitted[number].hedges < MAX_HEDGES
        assert all(attempt.delivery != number for attempt in self.asking.values())
        assert all(attempt.delivery != number for _, attempt in self.pausing)
        latest = max(s.at for s in self.sent.values() if s.attempt.delivery == number)
        assert self.now >= latest + self.latency.limit_seconds(1)
        others = set(self.serving) - self.peers(number)
        assert any(peer not in self.edges or self.edges[peer].has_room for peer in others)

    def peers(self, delivery: int) -> set[PeerId]:
        """The peers that have the microbatch now."""
        return {s.edge.peer for s in self.sent.values() if s.attempt.delivery == delivery}

    def take_back(self, request: int) -> Sent:
        sent = self.sent.pop(request)
        sent.edge.requests.remove(request)
        self.finished_requests.append(request)
        return sent

    def end(self, number: int) -> None:
        del self.submitted[number]  # once
        self.ended.add(number)
        self.waiting = [a for a in self.waiting if a.delivery != number]
        self.pausing = [(until, a) for until, a in self.pausing if a.delivery != number]
        self.asking = {q: a for q, a in self.asking.items() if a.delivery != number}
        self.failed = [a for a in self.failed if a.delivery != number]

    # ---- what holds after every report

    def check(self) -> None:
        for sent in self.sent.values():
            assert len(sent.edge.requests) <= sent.edge.credits
            assert sent.attempt.delivery in self.submitted, "in flight, though it has ended"
        under_way = {
            attempt.delivery
            for attempt in (
                *self.waiting,
                *self.asking.values(),
                *(sent.attempt for sent in self.sent.values()),
                *(attempt for _, attempt in self.pausing),
            )
        }
        assert under_way == self.submitted.keys()
        for number, delivery in self.submitted.items():
            assert self.oldest is not None
            assert delivery.step >= self.oldest
            in_flight = [s for s in self.sent.values() if s.attempt.delivery == number]
            assert len(self.peers(number)) == len(in_flight), "twice at one peer"
            assert delivery.hedges <= MAX_HEDGES
        self.check_that_room_is_used()

    def check_that_room_is_used(self) -> None:
        assert self.edges.keys() <= set(self.serving)
        room = {peer: len(e.requests) for peer, e in self.edges.items() if e.has_room}
        awaited = {peer for peer in map(self.awaited, self.waiting) if peer is not None}
        assert awaited <= self.opening
        has_it = [self.peers(a.delivery) for a in self.waiting if self.awaited(a) is None]
        for peers in has_it:
            usable = {peer: count for peer, count in room.items() if peer not in peers}
            assert self.chosen(usable) is None, "waits although there is room"
        opening = (self.opening & set(self.serving)) - awaited
        if len(has_it) > len(opening) and not any(has_it):
            closed = [p for p in self.serving if p not in {*self.edges, *self.opening}]
            assert self.chosen(room | dict.fromkeys(closed, 0)) is None, "no edge is opened"

    def awaited(self, attempt: Attempt) -> PeerId | None:
        """The planned peer that the attempt may wait for, although others have room."""
        peer = self.routing.planned(attempt.microbatch, self.now)
        if peer is None or attempt.failures or peer not in self.serving or peer in self.edges:
            return None
        late_at = attempt.waits_since + self.routing.seconds_of(peer, self.now)
        return peer if self.now < late_at and peer not in self.peers(attempt.delivery) else None

    def waits(self, attempt: Attempt) -> None:
        attempt.waits_since = self.now
        self.waiting.append(attempt)

    def chosen(self, usable: dict[PeerId, int]) -> PeerId | None:
        """What the routing would choose; it stays as it is."""
        return copy.deepcopy(self.routing).choose(self.now, usable, None) if usable else None

    # ---- the sender's own

    @rule(
        count=st.integers(1, 3),
        ahead=st.sampled_from([0, 0, 0, 1]),
        stages=st.sets(st.integers(0, 3)),
        first=st.integers(0, 7),
    )
    def submit(self, count: int, ahead: int, stages: set[int], first: int) -> None:
        step = Step((self.oldest or 0) + ahead)
        for index in range(first, first + count):
            self.submit_one(step, MicrobatchIndex(index), self.new_mask(stages))

    def submit_one(self, step: Step, microbatch: MicrobatchIndex, mask: Mask) -> None:
        number = self.dispatcher.submit(step, microbatch, mask, self.now)
        assert number not in self.ended | self.submitted.keys()
        self.submitted[number] = Submitted(step, microbatch)
        self.waits(Attempt(number, mask, microbatch))
        self.follow()

    def new_mask(self, stages: set[int]) -> Mask:
        return tuple(StageIndex(stage) for stage in (*sorted(stages), next(self.masks)))

    # ---- peers and edges

    @precondition(lambda self: self.opening)
    @rule(credits=st.integers(1, 3))
    def edges_open(self, credits: int) -> None:
        for peer in sorted(self.opening):
            self.open_one(peer, credits)

    def open_one(self, peer: PeerId, credits: int) -> None:
        self.opening.remove(peer)
        self.edges[peer] = Edge(peer, credits)
        self.dispatcher.opened(peer, credits, self.now)
        self.follow()

    def set_roster(self, serving: list[PeerId], absent: set[PeerId]) -> None:
        self.serving = serving
        rates = {peer: float(PEERS.index(peer)) for peer in serving}  # the first one's is unknown
        self.dispatcher.roster_changed(rates, set(PEERS) - absent, self.now)
        lost = {r: sent for r, sent in self.sent.items() if sent.edge.peer in absent}
        for sent in lost.values():
            self.attempt_failed(sent.attempt)
        self.follow()
        assert not self.sent.keys() & lost.keys(), "in flight at a peer that has left"

    # ---- what happens less often: one rule, so that the machine draws it less often

    @rule(data=st.data())
    def something_rare(self, data: st.DataObject) -> None:
        possible = [self.roster_changes, self.step_changes]
        possible += [self.withdraw] if self.submitted else []
        possible += [self.opening_fails] if self.opening else []
        possible += [self.edge_ends, self.better_link] if self.edges else []
        possible += [self.late_report] if self.finished_requests else []
        data.draw(st.sampled_from(possible))(data)

    def roster_changes(self, data: st.DataObject) -> None:
        serving = data.draw(st.sets(st.sampled_from(PEERS)))
        absent = data.draw(st.sets(st.sampled_from(PEERS), max_size=2))
        self.set_roster(sorted(serving - absent), absent)

    def step_changes(self, data: st.DataObject) -> None:
        step = data.draw(st.sampled_from([0, 0, 1, 1, 2, None]))
        self.oldest = None if step is None else Step(step)
        self.dispatcher.oldest_step_is(self.oldest, self.now)
        self.follow()
        over = Step(0 if self.oldest is None else self.oldest - 1)
        self.submit_one(over, MicrobatchIndex(0), self.new_mask(set()))
        assert max(self.ended) > max(self.submitted, default=0), "accepted, though it is over"

    def withdraw(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.submitted)))
        cancelled = [r for r, sent in self.sent.items() if sent.attempt.delivery == number]
        self.dispatcher.withdraw(number, self.now)
        actions = self.dispatcher.take_actions()
        assert actions[: len(cancelled)] == [CancelRequest(request) for request in cancelled]
        for request in cancelled:
            self.take_back(request)
        self.end(number)
        for action in actions[len(cancelled) :]:
            self.follow_one(action)
        self.check()

    def opening_fails(self, data: st.DataObject) -> None:
        peer = data.draw(st.sampled_from(sorted(self.opening)))
        self.opening.remove(peer)
        self.dispatcher.open_failed(peer, self.now)
        self.follow()

    def edge_ends(self, data: st.DataObject) -> None:
        edge = self.edges.pop(data.draw(st.sampled_from(sorted(self.edges))))
        for request in sorted(edge.requests):
            self.attempt_failed(self.take_back(request).attempt)
        self.dispatcher.edge_lost(edge.peer, "the link ended", self.now)
        self.follow()

    def better_link(self, data: st.DataObject) -> None:
        self.dispatcher.retire(data.draw(st.sampled_from(sorted(self.edges))), self.now)
        self.follow()

    def late_report(self, data: st.DataObject) -> None:
        """It crosses a cancellation, or comes a second time."""
        request = data.draw(st.sampled_from(sorted(self.finished_requests)))
        self.dispatcher.answered(request, 1.0, 1.0, 0.0, self.now)
        self.dispatcher.failed(request, "late", self.now)
        self.dispatcher.refused(request, RefusalReason.BUSY, "late", self.now)
        self.dispatcher.masked(10_000 + request, (), self.now)
        assert self.dispatcher.take_actions() == []

    # ---- requests and masks

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), seconds=st.floats(0.0, 3.0))
    def answer(self, data: st.DataObject, seconds: float) -> None:
        request = data.draw(st.sampled_from(sorted(self.sent)))
        sent = self.sent[request]
        others = [r for r, s in self.sent.items() if s.attempt.delivery == sent.attempt.delivery]
        self.answer_one(request, seconds)
        assert sent.attempt.delivery in self.ended
        assert not self.sent.keys() & set(others), "not cancelled"

    def answer_one(self, request: int, seconds: float) -> None:
        self.dispatcher.answered(request, seconds, 2 * seconds, 0.0, self.now)
        sent = self.sent.pop(request)
        sent.edge.requests.remove(request)
        actions = self.dispatcher.take_actions()
        done = actions.index(Completed(sent.attempt.delivery, request))
        for action in actions[:done]:
            self.follow_one(action)
        self.finished_requests.append(request)
        for action in actions[done:]:
            self.follow_one(action)
        self.check()

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), reason=st.sampled_from([None, *RefusalReason]))
    def refuse_or_fail(self, data: st.DataObject, reason: RefusalReason | None) -> None:
        request = data.draw(st.sampled_from(sorted(self.sent)))
        attempt = self.take_back(request).attempt
        pause = None if reason is None else RETRY_SECONDS.get(reason)
        if pause is None:
            self.attempt_failed(attempt)
        else:
            self.pausing.append((self.now + pause, attempt))
        if reason is None:
            self.dispatcher.failed(request, "it broke", self.now)
        else:
            self.dispatcher.refused(request, reason, "because", self.now)
        self.follow()

    def attempt_failed(self, attempt: Attempt) -> None:
        attempt.failures += 1
        if attempt.failures < MAX_FAILURES:
            self.failed.append(attempt)

    @precondition(lambda self: self.asking)
    @rule(data=st.data(), stages=st.one_of(st.none(), st.sets(st.integers(0, 3))))
    def mask_arrives(self, data: st.DataObject, stages: set[int] | None) -> None:
        query = data.draw(st.sampled_from(sorted(self.asking)))
        attempt = self.asking.pop(query)
        if stages is None:
            self.dispatcher.masked(query, None, self.now)
        else:
            missing = self.new_mask(stages)
            attempt.mask = tuple(stage for stage in missing if stage >= STAGE)
            self.waits(attempt)
            self.dispatcher.masked(query, missing, self.now)
        self.follow()

    # ---- time

    @rule(seconds=st.sampled_from([0.04, 0.2, 1.0, 5.0]))
    def time_passes(self, seconds: float) -> None:
        until = self.now + seconds
        while (wakes_at := self.dispatcher.wakes_at()) is not None and wakes_at <= until:
            assert wakes_at > self.now or self.now == until - seconds, "wakes for nothing"
            self.now = max(self.now, wakes_at)
            self.tick()
        self.now = until
        self.tick()

    def tick(self) -> None:
        for until, attempt in self.pausing:
            if until <= self.now:
                self.waits(attempt)
        self.pausing = [entry for entry in self.pausing if entry[0] > self.now]
        self.ticking = True
        self.dispatcher.tick(self.now)
        self.follow()
        self.ticking = False

    def teardown(self) -> None:
        """With everything there, all deliveries end with an answer."""
        self.oldest = Step(0)
        self.dispatcher.oldest_step_is(self.oldest, self.now)
        self.set_roster(PEERS, set())
        rounds = 0
        while self.submitted:
            rounds += 1
            assert rounds < 1000, "a delivery hangs while all that it needs is there"
            for peer in sorted(self.opening):
                self.open_one(peer, 1)
            for query, attempt in list(self.asking.items()):
                if query in self.asking:
                    del self.asking[query]
                    attempt.mask = self.new_mask({1})
                    self.waits(attempt)
                    self.dispatcher.masked(query, attempt.mask, self.now)
                    self.follow()
            for request in sorted(self.sent):
                if request in self.sent:
                    self.answer_one(request, 0.1)
            self.time_passes(1.0)
        self.dispatcher.close()
        self.follow()
        assert not self.edges


DeliveryMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=60)
TestDeliveryInvariants = DeliveryMachine.TestCase
