"""Delivering microbatches, case by case. `test_delivery_invariants` has the random cases."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import RefusalReason
from swarm_shared.scheduling.routing import (
    FIRST_BAN_SECONDS,
    Observation,
    StageRouting,
)
from swarm_shared.volunteer_rules.delivery import (
    BUSY_RETRY_SECONDS,
    MAX_FAILURES,
    MAX_HEDGES,
    OVERDUE_CHECK_SECONDS,
    OVERDUE_MICROBATCHES,
    STEP_RETRY_SECONDS,
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
from swarm_shared.volunteer_rules.latency import (
    MIN_OVERDUE_SECONDS,
    OVERDUE_SECONDS_PER_STAGE,
    UNKNOWN_LATENCY_SECONDS,
    LatencyEstimate,
)

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
STAGE = StageIndex(1)
ALL_STAGES = (StageIndex(0), StageIndex(1), StageIndex(2))
SOON = 0.5
"""Seconds after which an answer is overdue in these tests, before there is a usual latency."""
OVERDUE = SOON + OVERDUE_CHECK_SECONDS
"""Seconds after which an overdue answer has been noticed."""


MICROBATCHES = 7


def routing() -> StageRouting:
    """Plans equal peers in turn, in the order of their names."""
    return StageRouting(random.Random(1), MICROBATCHES)


class Sender:
    """A dispatcher with its clock; every edge opens at once, with `credits`, unless the peer is in
    `slow_to_open`."""

    def __init__(
        self, *peers: PeerId, credits: int = 2, slow_to_open: Sequence[PeerId] = (),
        rate: float = 100.0,
    ) -> None:  # fmt: skip
        self.latency = LatencyEstimate(min_seconds=SOON, unknown_seconds=SOON)
        self.dispatcher = Dispatcher(STAGE, routing(), latency=self.latency)
        self.now = 10.0
        self.numbers: list[int] = []
        """Of the deliveries, in order."""
        self.credits, self.slow_to_open = credits, slow_to_open
        self.rate = rate
        self.roster(*peers)

    def roster(self, *serving: PeerId, also_present: Sequence[PeerId] = ()) -> list[Action]:
        rates = dict.fromkeys(serving, self.rate)
        self.dispatcher.roster_changed(rates, {*serving, *also_present}, self.now)
        return self.actions()

    def actions(self) -> list[Action]:
        """What has been decided, with the openings that this kit answers."""
        taken: list[Action] = []
        while actions := self.dispatcher.take_actions():
            taken += actions
            for action in actions:
                if isinstance(action, OpenEdge) and action.peer not in self.slow_to_open:
                    self.dispatcher.opened(action.peer, self.credits, self.now)
        return [a for a in taken if not isinstance(a, OpenEdge) or a.peer in self.slow_to_open]

    def submit(
        self,
        microbatch: int = 0,
        step: int = 1,
        accumulate: tuple[StageIndex, ...] = ALL_STAGES,
    ) -> list[Action]:
        number = self.dispatcher.submit(
            Step(step), MicrobatchIndex(microbatch), accumulate, self.now
        )
        self.numbers.append(number)
        return self.actions()

    def answer(self, request: int, **seconds: float) -> list[Action]:
        self.dispatcher.answered(
            request, seconds.get("service", 0.01), seconds.get("total", 0.0),
            seconds.get("uplink", 0.0), self.now,
        )  # fmt: skip
        return self.actions()

    def refuse(self, request: int, reason: RefusalReason, detail: str = "") -> list[Action]:
        self.dispatcher.refused(request, reason, detail, self.now)
        return self.actions()

    def fail(self, request: int, reason: str = "the link broke") -> list[Action]:
        self.dispatcher.failed(request, reason, self.now)
        return self.actions()

    def mask(self, query: int, *missing: int) -> list[Action]:
        self.dispatcher.masked(query, tuple(StageIndex(s) for s in missing), self.now)
        return self.actions()

    def no_coordinator(self, query: int) -> list[Action]:
        self.dispatcher.masked(query, None, self.now)
        return self.actions()

    def pass_time(self, seconds: float) -> list[Action]:
        """Let time pass, with a tick whenever one is due."""
        until, taken = self.now + seconds, list[Action]()
        while (wakes_at := self.dispatcher.wakes_at()) is not None and wakes_at <= until:
            self.now = max(self.now, wakes_at)
            self.dispatcher.tick(self.now)
            taken += self.actions()
        self.now = until
        return taken


def the_transmit(actions: Sequence[Action]) -> Transmit:
    (transmit,) = (action for action in actions if isinstance(action, Transmit))
    return transmit


def the_question(actions: Sequence[Action]) -> AskMask:
    (question,) = actions
    assert isinstance(question, AskMask)
    return question


# The way of one microbatch


def test_a_microbatch_is_sent_to_a_peer_and_its_answer_completes_it() -> None:
    sender = Sender(A, slow_to_open=[A])
    assert sender.submit() == [OpenEdge(A)]
    sender.dispatcher.opened(A, 2, sender.now)
    (sent,) = sender.actions()
    assert sent == Transmit(the_transmit([sent]).request, 1, A, ALL_STAGES, is_copy=False)
    assert sender.answer(the_transmit([sent]).request) == [
        Completed(1, the_transmit([sent]).request)
    ]
    assert sender.answer(the_transmit([sent]).request) == []  # it has ended


def test_credits_bound_what_a_peer_has_and_the_rest_waits_in_order() -> None:
    sender = Sender(A)
    sent = [the_transmit(sender.submit(microbatch)) for microbatch in range(2)]
    assert sender.submit(2) == sender.submit(3) == []
    actions = sender.answer(sent[1].request)
    assert the_transmit(actions).delivery == sender.numbers[2]
    assert the_transmit(sender.answer(sent[0].request)).delivery == sender.numbers[3]


def test_a_peer_whose_uplink_takes_longer_than_its_device_gets_as_much_as_its_uplink_takes() -> (
    None
):
    sender = Sender(A, B)
    for _ in range(8):
        sent = the_transmit(sender.submit())
        sender.answer(sent.request, uplink=30.0 if sent.peer == A else 10.0)
    # Two at B are done before one at A, and B has no room for a third.
    assert [the_transmit(sender.submit()).peer for _ in range(3)] == [B, B, A]


def test_the_share_of_a_link_is_what_the_peer_does_not_account_for() -> None:
    sender = Sender(A, B, rate=0.0)
    for _ in range(8):
        sent = the_transmit(sender.submit())
        sender.now += 0.4
        # Both compute for as long; at A half of the time is the link's.
        sender.answer(sent.request, service=0.01, total=0.2 if sent.peer == A else 0.4)
    assert [the_transmit(sender.submit()).peer for _ in range(3)] == [B, B, A]


class RecordingRouting(StageRouting):
    def __init__(self) -> None:
        super().__init__(random.Random(1), MICROBATCHES)
        self.seen: list[Observation] = []

    def observe(self, peer: PeerId, seen: Observation, now: float) -> None:
        self.seen.append(seen)
        super().observe(peer, seen, now)


def test_the_routing_learns_how_many_requests_shared_the_link() -> None:
    sender, routing = Sender(A), RecordingRouting()
    sender.dispatcher = Dispatcher(STAGE, routing=routing)
    sender.roster(A)
    sent = [the_transmit(sender.submit(number)) for number in range(2)]
    sender.now += 0.5
    for transmit in sent:
        sender.answer(transmit.request, service=0.75, total=0.25, uplink=0.125)
    # A device cannot have computed for longer than the answer took.
    assert routing.seen == [Observation(0.5, 0.125, 0.25, 1), Observation(0.5, 0.125, 0.25, 2)]


def test_a_microbatch_does_not_wait_for_an_opening_while_an_open_edge_has_room() -> None:
    sender = Sender(A, B, slow_to_open=[A, B], rate=0.0)  # without which there is no plan
    assert sender.submit(0) == [OpenEdge(A)]
    assert sender.submit(1) == [OpenEdge(B)]
    sender.dispatcher.opened(B, 2, sender.now)
    sent = [action.delivery for action in sender.actions() if isinstance(action, Transmit)]
    assert sent == sender.numbers


def test_a_microbatch_waits_for_the_edge_to_its_planned_peer_as_long_as_that_takes_for_one() -> (
    None
):
    sender = Sender(A, B, C, slow_to_open=[A], rate=0.5)
    assert the_transmit(sender.submit(1)).peer == B
    assert sender.submit(0) == [OpenEdge(A)]
    assert sender.submit(3) == [], "the edge that is being opened is for it, too"
    assert sender.pass_time(1.9) == []
    sender.dispatcher.opened(A, 2, sender.now)
    assert [t.peer for t in sender.actions() if isinstance(t, Transmit)] == [A, A]


def test_a_microbatch_goes_to_another_peer_when_the_edge_to_its_planned_one_takes_too_long() -> (
    None
):
    sender = Sender(A, B, C, slow_to_open=[A], rate=0.5)
    assert the_transmit(sender.submit(1)).peer == B
    assert sender.submit(0) == [OpenEdge(A)]
    assert sender.pass_time(1.9) == []
    assert the_transmit(sender.pass_time(0.2)).peer == B


def test_a_microbatch_whose_planned_peer_has_failed_it_waits_for_no_edge() -> None:
    sender = Sender(A, B, C, rate=0.5)
    sent = the_transmit(sender.submit(0))
    assert sent.peer == A
    sender.dispatcher.edge_lost(A, "the link broke", sender.now)
    question = the_question(sender.actions())
    assert the_transmit(sender.mask(question.query, 1)).peer in {B, C}


def test_a_peer_that_cannot_be_reached_is_banned_for_a_while() -> None:
    sender = Sender(A, B, credits=1, slow_to_open=[A])
    assert sender.submit() == [OpenEdge(A)]
    sender.dispatcher.open_failed(A, sender.now)
    assert the_transmit(sender.actions()).peer == B
    assert sender.submit() == []
    assert sender.pass_time(FIRST_BAN_SECONDS) == [OpenEdge(A)]


def test_when_no_peer_can_be_reached_they_are_tried_in_turn() -> None:
    sender = Sender(A, B, slow_to_open=[A, B])
    assert sender.submit() == [OpenEdge(A)]
    for failed, next_one in ((A, B), (B, A), (A, B)):
        sender.dispatcher.open_failed(failed, sender.now)
        assert sender.actions() == [OpenEdge(next_one)]


# Refusals and failures


@pytest.mark.parametrize(
    ("reason", "pause_seconds"),
    [(RefusalReason.BUSY, BUSY_RETRY_SECONDS), (RefusalReason.WRONG_STEP, STEP_RETRY_SECONDS)],
)
def test_a_peer_that_cannot_serve_now_is_asked_again_later_with_the_same_mask(
    reason: RefusalReason, pause_seconds: float
) -> None:
    sender = Sender(A)
    sent = the_transmit(sender.submit())
    for _ in range(2 * MAX_FAILURES):
        assert sender.refuse(sent.request, reason) == []
        assert sender.pass_time(0.9 * pause_seconds) == []
        again = the_transmit(sender.pass_time(0.2 * pause_seconds))
        assert again == Transmit(again.request, 1, A, ALL_STAGES, is_copy=False)
        sent = again


def test_of_several_pauses_the_first_to_end_is_waited_for() -> None:
    sender = Sender(A, B, credits=1)
    at_a, at_b = (the_transmit(sender.submit(microbatch)) for microbatch in range(2))
    sender.refuse(at_a.request, RefusalReason.BUSY)
    sender.refuse(at_b.request, RefusalReason.WRONG_STEP)
    assert BUSY_RETRY_SECONDS < STEP_RETRY_SECONDS
    assert sender.dispatcher.wakes_at() == sender.now + BUSY_RETRY_SECONDS


def test_a_full_peer_is_left_to_itself_for_a_while() -> None:
    sender = Sender(A, B)
    sent = the_transmit(sender.submit())
    assert sent.peer == A
    sender.refuse(sent.request, RefusalReason.BUSY)
    assert the_transmit(sender.pass_time(BUSY_RETRY_SECONDS)).peer == B
    assert the_transmit(sender.submit()).peer == B


@pytest.mark.parametrize("how", ["fails", "is refused", "the link ends", "leaves the roster"])
def test_after_a_failure_the_mask_is_asked_for_and_another_peer_counts_what_is_missing(
    how: str,
) -> None:
    sender = Sender(A, B)
    for microbatch in (7, 8):  # which opens both edges
        sender.answer(the_transmit(sender.submit(microbatch)).request)
    sent = the_transmit(sender.submit(7))
    assert sent.peer == A
    match how:
        case "fails":
            actions = sender.fail(sent.request)
        case "is refused":
            actions = sender.refuse(sent.request, RefusalReason.FAILED)
        case "the link ends":
            sender.dispatcher.edge_lost(A, "the link ended", sender.now)
            actions = sender.actions()
        case _:
            cancel, question, close = sender.roster(B)
            assert (cancel, close) == (CancelRequest(sent.request), CloseEdge(A))
            actions = [question]
    question = the_question(actions)
    assert (question.delivery, question.step, question.microbatch) == (sender.numbers[-1], 1, 7)
    assert sender.pass_time(0.9 * FIRST_BAN_SECONDS) == []
    again = the_transmit(sender.mask(question.query, 0, 2))
    # Stage 0 is upstream of this sender's target: its mask has not to do with it.
    assert again == Transmit(again.request, question.delivery, B, (StageIndex(2),), is_copy=True)


def test_a_report_of_a_request_whose_edge_is_lost_is_ignored() -> None:
    sender = Sender(A, B)
    sent = the_transmit(sender.submit())
    sender.dispatcher.edge_lost(A, "the link ended", sender.now)
    question = the_question(sender.actions())
    assert sender.answer(sent.request) == []
    assert sender.fail(sent.request) == []
    assert the_transmit(sender.mask(question.query, 1)).peer == B


def test_a_peer_that_failed_is_banned_and_what_has_no_other_waits_for_the_end_of_the_ban() -> None:
    sender = Sender(A, B, credits=1)
    at_a, at_b = (the_transmit(sender.submit(microbatch)) for microbatch in range(2))
    question = the_question(sender.fail(at_a.request))
    assert sender.mask(question.query, 1) == []
    assert at_b.peer == B
    assert the_transmit(sender.pass_time(FIRST_BAN_SECONDS)).peer == A


def test_a_microbatch_that_keeps_failing_is_abandoned_with_the_last_reason() -> None:
    sender = Sender(A)
    sent = the_transmit(sender.submit())
    for number in range(MAX_FAILURES - 1):
        question = the_question(sender.fail(sent.request, f"cause {number}"))
        sent = the_transmit(sender.mask(question.query, 1))
    (abandoned,) = sender.fail(sent.request, "the last cause")
    assert isinstance(abandoned, Abandoned)
    assert abandoned.reason.endswith("because the last cause")
    assert f"{MAX_FAILURES} attempts to reach stage {STAGE}" in abandoned.reason


def test_without_a_coordinator_a_microbatch_that_failed_is_abandoned() -> None:
    sender = Sender(A, B)
    sent = the_transmit(sender.submit())
    question = the_question(sender.fail(sent.request))
    (abandoned,) = sender.no_coordinator(question.query)
    assert isinstance(abandoned, Abandoned)
    assert "unknown" in abandoned.reason
    assert sender.mask(question.query, 1) == []


# Hedges


def test_an_overdue_microbatch_goes_to_another_peer_too_with_the_mask_of_that_moment() -> None:
    sender = Sender(A, B)
    first = the_transmit(sender.submit(4))
    assert sender.pass_time(0.9 * SOON) == []
    question = the_question(sender.pass_time(OVERDUE))
    assert (question.step, question.microbatch) == (1, 4)
    second = the_transmit(sender.mask(question.query, 0, 1))
    assert second == Transmit(second.request, 1, B, (STAGE,), is_copy=True)
    assert sender.dispatcher.hedged == 1
    # The second answers first, and the peer that hangs is relieved of the microbatch.
    assert sender.answer(second.request) == [
        CancelRequest(first.request), Completed(1, second.request),
    ]  # fmt: skip
    # It gets nothing more until its ban ends.
    assert [the_transmit(sender.submit()).peer for _ in range(2)] == [B, B]
    assert sender.submit() == []


def test_a_peer_that_is_slower_than_others_is_overdue_later_by_its_own_time() -> None:
    sender = Sender(A, B, rate=0.5)
    sender.submit()
    assert sender.pass_time(SOON + 0.9 * OVERDUE_MICROBATCHES / 0.5) == []
    assert the_question(sender.pass_time(0.1 * OVERDUE_MICROBATCHES / 0.5 + OVERDUE_CHECK_SECONDS))


def test_a_copy_goes_by_the_shortest_delay_and_waits_for_no_planned_peer() -> None:
    sender = Sender(A, B, C, slow_to_open=[A])
    assert the_transmit(sender.submit(1)).peer == B
    sender.numbers.append(
        sender.dispatcher.submit(
            Step(1), MicrobatchIndex(0), ALL_STAGES, sender.now, is_copy=True
        )
    )  # fmt: skip
    sent = the_transmit(sender.actions())
    assert sent.is_copy, "so that the next stage knows it, too"


def test_an_answer_while_the_hedge_asks_for_its_mask_ends_both() -> None:
    sender = Sender(A, B)
    first = the_transmit(sender.submit())
    question = the_question(sender.pass_time(OVERDUE))
    assert sender.answer(first.request) == [Completed(1, first.request)]
    assert sender.mask(question.query, 1) == []


def test_without_a_coordinator_a_microbatch_is_not_hedged_and_its_answer_still_taken() -> None:
    sender = Sender(A, B)
    first = the_transmit(sender.submit())
    for _ in range(MAX_HEDGES):
        question = the_question(sender.pass_time(OVERDUE))
        assert sender.no_coordinator(question.query) == []
    assert sender.answer(first.request) == [Completed(1, first.request)]


def test_a_hedge_that_could_not_be_sent_is_no_reason_for_the_end() -> None:
    sender = Sender(A, B)
    sent = the_transmit(sender.submit())
    sender.no_coordinator(the_question(sender.pass_time(OVERDUE)).query)
    for _ in range(MAX_FAILURES - 1):
        sent = the_transmit(sender.mask(the_question(sender.fail(sent.request)).query, 1))
    (abandoned,) = sender.fail(sent.request, "the last cause")
    assert isinstance(abandoned, Abandoned)
    assert abandoned.reason.endswith("the last cause")


def test_a_hedge_that_waits_holds_up_no_other_microbatch() -> None:
    sender = Sender(A, B, credits=2)
    sender.submit()
    question = the_question(sender.pass_time(OVERDUE))
    others = [the_transmit(sender.submit(number)) for number in range(1, 4)]
    assert [transmit.peer for transmit in others] == [B, A, B]
    sender.dispatcher.withdraw(others[1].delivery, sender.now)
    assert sender.actions() == [CancelRequest(others[1].request)]
    # Now the hedge waits for B, which is full; A has room, and is banned as its answer is overdue.
    assert sender.mask(question.query, 1) == []
    assert sender.submit(4) == []
    sent = the_transmit(sender.pass_time(FIRST_BAN_SECONDS))
    assert (sent.peer, sent.delivery) == (A, sender.numbers[-1])


def test_the_more_stages_are_below_the_later_an_answer_is_overdue() -> None:
    sender = Sender(A, B)
    sender.dispatcher = Dispatcher(STAGE, routing(), depth=3, latency=LatencyEstimate(SOON, SOON))
    sender.roster(A, B)
    sender.submit()
    assert sender.pass_time(SOON + 1.9 * OVERDUE_SECONDS_PER_STAGE) == []
    assert the_question(sender.pass_time(0.1 * OVERDUE_SECONDS_PER_STAGE + OVERDUE_CHECK_SECONDS))


def test_a_microbatch_has_at_most_two_hedges_each_at_a_peer_of_its_own() -> None:
    peers = [PeerId(name) for name in "abcdef"]
    sender = Sender(*peers)
    sent = [the_transmit(sender.submit())]
    for _ in range(2):
        assert sender.pass_time(0.9 * SOON) == []  # it counts from the latest request
        question = the_question(sender.pass_time(OVERDUE))
        sent.append(the_transmit(sender.mask(question.query, 1)))
    assert len({transmit.peer for transmit in sent}) == 3
    assert sender.pass_time(100 * SOON) == []


def test_nothing_is_hedged_while_other_microbatches_wait_for_room() -> None:
    """Then the stage is busy, and one more copy would make it slower."""
    sender = Sender(A, B, C, credits=1)
    sent = [the_transmit(sender.submit(microbatch)) for microbatch in range(3)]
    question = the_question(sender.fail(sent[2].request))
    assert sender.mask(question.query, 1) == []  # the only peer with room is banned
    assert SOON < OVERDUE < FIRST_BAN_SECONDS
    assert sender.pass_time(OVERDUE) == []
    assert the_transmit(sender.pass_time(FIRST_BAN_SECONDS - OVERDUE)).peer == sent[2].peer
    assert sender.dispatcher.hedged == 0


def test_the_only_peer_of_a_stage_is_waited_for() -> None:
    sender = Sender(A)
    sender.submit()
    assert sender.pass_time(10 * SOON) == []
    assert sender.dispatcher.wakes_at() is None


def test_when_the_other_peers_are_full_a_microbatch_is_hedged_once_there_is_room() -> None:
    sender = Sender(A, B, credits=1)
    at_a, at_b = (the_transmit(sender.submit(microbatch)) for microbatch in range(2))
    assert sender.pass_time(5 * SOON) == []
    sender.answer(at_b.request)
    question = the_question(sender.pass_time(20 * SOON))
    assert question.delivery == at_a.delivery


def test_the_reason_of_the_attempt_that_ends_first_is_reported() -> None:
    sender = Sender(A, B)
    first = the_transmit(sender.submit())
    hedge = the_transmit(sender.mask(the_question(sender.pass_time(OVERDUE)).query, 1))
    question = the_question(sender.fail(first.request, "of the first"))
    assert sender.no_coordinator(question.query) == []
    for number in range(MAX_FAILURES - 1):
        question = the_question(sender.fail(hedge.request, f"cause {number}"))
        hedge = the_transmit(sender.mask(question.query, 1))
    (abandoned,) = sender.fail(hedge.request, "of the second")
    assert isinstance(abandoned, Abandoned)
    assert "unknown" in abandoned.reason


def test_what_is_late_follows_from_what_is_usual() -> None:
    latency = LatencyEstimate()
    assert latency.limit_seconds(depth=1) == UNKNOWN_LATENCY_SECONDS
    for _ in range(50):
        latency.observe(0.1)
    assert latency.limit_seconds(depth=1) == MIN_OVERDUE_SECONDS
    # The sender to the last stage acts before those upstream of it.
    assert latency.limit_seconds(depth=2) == MIN_OVERDUE_SECONDS + OVERDUE_SECONDS_PER_STAGE
    for i in range(50):
        latency.observe(6.0 if i % 2 else 14.0)
    assert 20.0 < latency.limit_seconds(depth=1) < 40.0


def test_answers_lower_the_limit_and_what_is_in_flight_is_overdue_by_the_new_one() -> None:
    sender = Sender(A, B)
    sender.dispatcher = Dispatcher(STAGE, routing())
    sender.roster(A, B)
    slow, fast = (the_transmit(sender.submit(microbatch)) for microbatch in range(2))
    sender.answer(fast.request)
    question = the_question(sender.pass_time(MIN_OVERDUE_SECONDS + OVERDUE_CHECK_SECONDS))
    assert question.delivery == slow.delivery


# The roster, the step, and the end


def test_a_peer_that_moves_finishes_what_it_has_and_gets_nothing_more() -> None:
    sender = Sender(A, B)
    sent = the_transmit(sender.submit())
    assert sender.roster(B, also_present=[A]) == [CloseEdge(A)]
    assert [the_transmit(sender.submit()).peer for _ in range(2)] == [B, B]
    assert sender.submit() == []
    assert Completed(1, sent.request) in sender.answer(sent.request)
    # What it has when it leaves the roster later fails then, though its edge is closing.
    moved = Sender(A, B)
    sent = the_transmit(moved.submit())
    moved.roster(B, also_present=[A])
    cancel, question = moved.roster(B)
    assert cancel == CancelRequest(sent.request)
    assert isinstance(question, AskMask)


def test_over_a_better_link_a_new_edge_is_opened_and_what_is_on_the_old_one_finishes() -> None:
    sender = Sender(A, slow_to_open=[A])
    sender.submit(0)
    sender.dispatcher.opened(A, 1, sender.now)
    old = the_transmit(sender.actions())
    sender.dispatcher.retire(A, sender.now)
    assert sender.actions() == [CloseEdge(A)]
    assert sender.submit(1) == [OpenEdge(A)]
    sender.dispatcher.opened(A, 1, sender.now)
    new = the_transmit(sender.actions())
    # The end of the new edge does not concern the request on the old one.
    sender.dispatcher.edge_lost(A, "the link ended", sender.now)
    assert the_question(sender.actions()).delivery == new.delivery
    assert sender.answer(old.request) == [Completed(old.delivery, old.request)]


def test_what_is_of_a_step_that_is_over_is_abandoned_wherever_it_is() -> None:
    sender = Sender(A, B, credits=1)
    asking = the_transmit(sender.submit(0, step=1))
    pausing = the_transmit(sender.submit(1, step=1))
    sender.fail(asking.request)
    sender.refuse(pausing.request, RefusalReason.BUSY)
    for peer in (A, B):
        sender.dispatcher.edge_lost(peer, "", sender.now)
    in_flight = the_transmit(sender.submit(2, step=1))
    later = the_transmit(sender.submit(3, step=2))
    assert sender.submit(4, step=1) == []
    sender.dispatcher.oldest_step_is(Step(2), sender.now)
    over = [Abandoned(sender.numbers[index], "the step is over") for index in (0, 1, 2, 4)]
    actions = sender.actions()
    assert [a for a in actions if isinstance(a, Abandoned)] == over
    assert CancelRequest(in_flight.request) in actions
    assert sender.submit(5, step=1) == [Abandoned(sender.numbers[5], "the step is over")]
    assert sender.answer(later.request) == [Completed(later.delivery, later.request)]
    assert sender.pass_time(10.0) == []


def test_a_delivery_that_is_withdrawn_is_cancelled_and_makes_room() -> None:
    sender = Sender(A, credits=1)
    sent = the_transmit(sender.submit(0))
    sender.submit(1)
    sender.dispatcher.withdraw(sent.delivery, sender.now)
    cancel, next_one = sender.actions()
    assert cancel == CancelRequest(sent.request)
    assert the_transmit([next_one]).delivery == sender.numbers[1]
    sender.dispatcher.withdraw(sent.delivery, sender.now)
    assert sender.actions() == []


def test_a_sender_that_has_closed_opens_no_more_edges_and_sends_nothing() -> None:
    sender = Sender(A, B, slow_to_open=[B])
    sent = the_transmit(sender.submit(0))
    for microbatch in range(1, 3):
        sender.submit(microbatch)
    sender.dispatcher.close()
    actions = sender.actions()
    assert [a.delivery for a in actions if isinstance(a, Abandoned)] == sender.numbers
    assert CancelRequest(sent.request) in actions
    assert actions[-1] == CloseEdge(A)
    sender.dispatcher.opened(B, 2, sender.now)
    assert sender.actions() == [CloseEdge(B)]
    assert sender.roster(A, B) == []
    assert sender.submit() == [Abandoned(sender.numbers[3], "this peer has given up its stage")]
