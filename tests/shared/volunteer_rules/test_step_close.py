"""A step close at one peer: it averages exactly the commit set, or reports why not.

The rules by example, then the invariants under every order of orders, results, losses and aborts.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from shared.volunteer_rules.closing_peer import ME, OTHER, ClosingPeer
from swarm_shared.base.errors import ProtocolError
from swarm_shared.protocol import Applied, RoundReport, SnapshotFailed, SnapshotReady, SumsChecked
from swarm_shared.volunteer_rules.step_close import (
    MAX_QUEUED_ORDERS,
    DropPrepared,
    Lane,
    Rejoin,
    StepApplied,
    StepClose,
)


def peer_with(*held: int, next_held: tuple[int, ...] = ()) -> ClosingPeer:
    """`next_held` is accumulated of step 2, which is computed meanwhile with staleness 1."""
    peer = ClosingPeer(staleness=1 if next_held else 0)
    peer.computes(*held)
    peer.computes(*next_held, step=2)
    peer.run()
    return peer


def last_report(peer: ClosingPeer) -> RoundReport:
    message = peer.sent[-1]
    assert isinstance(message, RoundReport)
    return message


def held_of(peer: ClosingPeer, step: int = 1) -> set[int]:
    return peer.workers[Lane.HELD].accumulated[step]


# ---- one stage


def test_what_is_held_and_committed_is_averaged_and_applied_once() -> None:
    peer = peer_with(0, 3)
    peer.closes(0, 3, parts=2)
    peer.run()
    assert last_report(peer) == RoundReport(step=1, attempt=1, ok=True, own_squared=4.0)
    assert peer.account.closes(1)
    assert peer.close.averaged_attempt == 1
    peer.applies()
    peer.run()
    assert peer.sent[-1] == Applied(step=1, digest="of HELD", norm=1.0)
    assert peer.decided == [StepApplied(0, 1, 2), DropPrepared()]
    assert peer.account.version == 1
    assert not peer.account.closes(2)
    assert peer.account.receipts() == ()
    assert peer.close.averaged_attempt is None


def test_a_surplus_is_removed_before_the_average() -> None:
    peer = peer_with(0, 3, 5)
    peer.closes(0, 3)
    peer.run()
    assert last_report(peer).ok
    assert held_of(peer) == {0, 3}
    assert peer.account.count(1) == 2


def test_a_surplus_that_cannot_be_removed_empties_the_accumulator_and_is_reported() -> None:
    peer = peer_with(0, 3, 5, next_held=(3, 5))
    peer.workers[Lane.HELD].can_uncommit = False
    peer.closes(0, 3)
    peer.run()
    report = last_report(peer)
    assert (report.ok, report.reset, report.not_finite) == (False, True, False)
    assert report.reason == "1 extra microbatches could not be removed"
    assert (held_of(peer), held_of(peer, 2)) == (set(), {3, 5})
    assert [peer.account.count(step) for step in (1, 2)] == [0, 2]


def test_a_sum_that_is_not_finite_is_discarded_before_others_get_it() -> None:
    peer = peer_with(0, 3)
    peer.workers[Lane.HELD].finite = False
    peer.closes(0, 3)
    peer.run()
    report = last_report(peer)
    assert (report.ok, report.reset, report.not_finite) == (False, True, True)
    assert held_of(peer) == set()
    assert peer.account.receipts() == ()
    assert peer.workers[Lane.HELD].result is None


def test_an_average_that_is_not_finite_is_reported_and_its_inputs_stay() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.step_worker()
    peer.workers[Lane.HELD].finite = False
    peer.run()
    report = last_report(peer)
    assert (report.ok, report.reset, report.not_finite) == (False, False, True)
    assert report.reason == "the averaged gradient is not finite"
    assert held_of(peer) == {0}


def test_what_is_committed_and_not_held_is_named() -> None:
    peer = peer_with(0)
    peer.closes(0, 7, 9)
    peer.run()
    assert (last_report(peer).ok, last_report(peer).missing) == (False, (7, 9))
    assert peer.workers[Lane.HELD].result is None


def test_what_is_committed_and_lost_is_credited_no_more() -> None:
    peer = peer_with(0, 7)
    held_of(peer).discard(7)
    peer.closes(0, 7)
    peer.run()
    assert last_report(peer).missing == (7,)
    assert [receipt.microbatch for receipt in peer.account.receipts()] == [0]


def test_a_failed_average_is_reported_with_its_culprit_and_can_be_tried_again() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.step_worker()
    peer.finish_reduce(next(iter(peer.reducing)), failure="lost", culprit=OTHER)
    report = last_report(peer)
    assert (report.ok, report.reason, report.culprit, report.carrier_failed) == (
        False, "lost", OTHER, True,
    )  # fmt: skip
    assert peer.account.closes(1), "until the coordinator ends the attempt for all members"
    peer.aborts()
    assert not peer.account.closes(1)
    peer.closes(0, attempt=2)
    peer.run()
    assert last_report(peer).ok
    assert held_of(peer) == {0}


def test_a_failure_of_the_worker_is_reported_with_its_reason() -> None:
    peer = peer_with(0)
    peer.closes(0)
    (work,) = peer.live
    del peer.live[work]
    peer.close.failed(work, "not now" * 100)
    peer.carry()
    assert last_report(peer).reason.startswith("not now")
    assert len(last_report(peer).reason) == 500


def test_an_abort_ends_an_attempt_in_the_middle_and_leaves_the_accumulator() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.step_worker()
    late = next(iter(peer.reducing))
    peer.aborts()
    assert not peer.account.closes(1)
    peer.closes(0, attempt=2)
    peer.finish_reduce(late)
    peer.run()
    assert [(r.ok, r.attempt) for r in peer.sent if isinstance(r, RoundReport)] == [(True, 2)]
    assert held_of(peer) == {0}


def test_an_attempt_that_is_aborted_before_it_began_is_not_begun() -> None:
    peer = peer_with(0)
    peer.saves()
    for attempt in range(1, 100):
        peer.closes(0, attempt=attempt)
        peer.aborts(attempt=attempt)
    peer.closes(0, attempt=100)
    peer.run()
    assert [r.attempt for r in peer.sent if isinstance(r, RoundReport)] == [100]


def test_an_abort_ends_no_order_but_those_of_its_attempt() -> None:
    peer = peer_with(0)
    peer.saves()
    peer.closes(0, attempt=1)
    peer.saves()
    peer.closes(0, attempt=2)
    peer.aborts(attempt=1)
    peer.run()
    assert [type(message) for message in peer.sent] == [SnapshotReady, SnapshotReady, RoundReport]
    assert last_report(peer).attempt == 2


def test_an_accumulator_that_is_emptied_after_an_abort_is_not_reported() -> None:
    peer = peer_with(0)
    peer.workers[Lane.HELD].finite = False
    peer.closes(0)
    peer.step_worker()
    peer.aborts()
    peer.run()
    assert held_of(peer) == set()
    assert peer.sent == []


@pytest.mark.parametrize("failure", ["its sum is not finite", "a member is gone"])
def test_orders_that_wait_for_an_attempt_are_carried_out_when_it_has_failed(failure: str) -> None:
    peer = peer_with(0)
    peer.workers[Lane.HELD].finite = failure != "its sum is not finite"
    peer.closes(0)
    peer.saves()
    peer.step_worker()
    for number in list(peer.reducing):
        peer.finish_reduce(number, failure)
    peer.run()
    report, snapshot = peer.sent
    assert isinstance(report, RoundReport)
    assert not report.ok
    assert isinstance(snapshot, SnapshotReady)


def test_a_removal_that_is_aborted_leaves_no_receipt_without_a_gradient() -> None:
    peer = peer_with(0, 5)
    peer.closes(0)
    peer.step_worker()
    peer.aborts()
    peer.run()
    assert held_of(peer) == {0}
    assert peer.account.count(1) == 1


@pytest.mark.parametrize(("step", "attempt"), [(1, 2), (2, 1)])
def test_a_step_that_is_not_averaged_here_is_not_applied_and_the_peer_attaches_again(
    step: int, attempt: int
) -> None:
    peer = peer_with(0, next_held=(0,))
    peer.closes(0)
    peer.run()
    peer.applies(step=step, attempt=attempt)
    peer.run()
    assert peer.decided == [Rejoin(), DropPrepared()]
    assert peer.account.version == 0


def test_a_close_of_another_step_is_answered_and_not_taken_part_in() -> None:
    peer = peer_with(0, next_held=(3,))
    peer.closes(3, step=2)
    peer.run()
    report = last_report(peer)
    assert (report.step, report.ok, report.missing) == (2, False, (3,))
    assert not peer.account.closes(1)
    peer.closes(0)
    peer.run()
    assert last_report(peer).ok


def test_what_was_counted_of_the_next_step_outlives_the_apply_of_this_one() -> None:
    peer = peer_with(0, 3, next_held=(3, 5))
    peer.closes(0, 3)
    peer.run()
    assert (peer.account.closes(1), peer.account.closes(2)) == (True, False)
    peer.applies()
    peer.run()
    assert [peer.account.count(step) for step in (1, 2)] == [0, 2]
    peer.closes(3, 5, step=2, attempt=2)
    peer.run()
    assert last_report(peer).ok


def test_a_step_that_cannot_be_applied_is_reported_and_the_stage_stays() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.run()
    peer.workers[Lane.HELD].can_apply = False
    peer.applies()
    peer.run()
    report = last_report(peer)
    assert (report.ok, report.reset, report.reason) == (False, True, "it holds a NaN by now")
    assert peer.account.closes(1), "others apply it: nothing more is added to it here"
    assert peer.decided == [DropPrepared()]
    assert peer.close.averaged_attempt is None
    peer.closes(0, attempt=2)
    peer.run()
    assert last_report(peer).ok


def test_orders_that_arrive_faster_than_they_are_carried_out_end_the_session() -> None:
    peer = peer_with(0)
    for attempt in range(1, 2 + MAX_QUEUED_ORDERS):
        peer.closes(0, attempt=attempt)
    with pytest.raises(ProtocolError, match="already wait"):
        peer.closes(0, attempt=1000)


def test_a_snapshot_is_saved_in_its_turn_and_its_failure_is_reported() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.saves()
    peer.run()
    assert [type(message) for message in peer.sent] == [RoundReport, SnapshotReady]
    peer.saves()
    (work,) = peer.live
    del peer.live[work]
    peer.close.failed(work, "the disk is full")
    peer.carry()
    assert peer.sent[-1] == SnapshotFailed(version=0, stage=0, reason="the disk is full")


# ---- a lost session


def test_an_attempt_of_a_session_that_is_lost_is_not_begun() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.closes(0, attempt=2)
    peer.loses_session()
    assert not peer.account.closes(1)
    peer.closes(0, attempt=3)
    peer.run()
    assert [r.attempt for r in peer.sent if isinstance(r, RoundReport)] == [3]


def test_what_is_averaged_when_the_session_is_lost_can_be_applied_in_the_next_one() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.run()
    peer.loses_session()
    assert peer.close.averaged_attempt == 1
    assert not peer.account.closes(1)
    peer.applies()
    peer.run()
    assert isinstance(peer.sent[-1], Applied)


def test_an_apply_of_a_lost_session_that_cannot_be_carried_out_does_not_end_the_next_one() -> None:
    peer = peer_with(0)
    peer.saves()
    peer.applies()
    peer.loses_session()
    peer.run()
    assert peer.decided == []


def test_an_apply_that_outlives_its_session_is_answered_in_the_next_one() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.run()
    peer.applies()
    peer.loses_session()
    peer.run()
    assert not any(isinstance(message, Applied) for message in peer.sent)
    peer.applies()
    assert isinstance(peer.sent[-1], Applied)
    assert Rejoin() not in peer.decided


def test_an_apply_that_fails_after_its_session_leaves_the_step_open() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.run()
    peer.workers[Lane.HELD].can_apply = False
    peer.applies()
    peer.loses_session()
    assert peer.account.closes(1), "nothing is added to a step that is being applied"
    peer.run()
    assert not peer.account.closes(1)
    assert len(peer.sent) == 1


def test_a_statement_of_sums_ends_with_its_session() -> None:
    peer = averaged_peer()
    peer.checks()
    assert peer.live
    peer.loses_session()
    assert peer.live == {}


# ---- a move


def moving_peer() -> ClosingPeer:
    peer = peer_with(0, 3)
    peer.prepares()
    peer.closes(0, 3, moving=True)
    return peer


def test_both_stages_are_averaged_and_the_new_one_is_applied_and_held() -> None:
    peer = moving_peer()
    peer.run()
    assert last_report(peer).ok
    assert peer.prepared is not None
    peer.applies()
    peer.run()
    assert peer.sent[-1] == Applied(step=1, digest="of PREPARED", norm=1.0)
    assert peer.switched
    assert peer.decided == [StepApplied(1, 1, 2)], "counted in the old stage"
    assert (peer.prepared.version, peer.account.version) == (1, 0)


def test_the_new_stage_does_not_wait_for_the_old_one() -> None:
    peer = moving_peer()
    peer.step_worker(Lane.PREPARED)
    peer.reduces()
    peer.step_worker(Lane.PREPARED)
    assert peer.workers[Lane.PREPARED].result == ((1, 1), frozenset())
    assert peer.sent == []
    peer.run()
    assert last_report(peer).ok


@pytest.mark.parametrize("lane", Lane)
def test_when_one_of_the_averages_fails_nothing_is_applied_in_either(lane: Lane) -> None:
    peer = moving_peer()
    peer.step_worker(Lane.HELD)
    peer.step_worker(Lane.PREPARED)
    failing = next(number for number, work in peer.reducing.items() if work.lane is lane)
    peer.finish_reduce(failing, failure="a member is gone")
    assert (last_report(peer).ok, last_report(peer).reason) == (False, "a member is gone")
    assert peer.live == {}, "the other one is given up"
    peer.closes(0, 3, attempt=2)
    peer.run()
    peer.applies(attempt=2)
    peer.run()
    assert not peer.switched
    assert peer.decided == [StepApplied(0, 1, 2), DropPrepared()]


def test_a_move_without_a_prepared_stage_fails_and_counts_nothing() -> None:
    peer = peer_with(0, 3)
    peer.closes(0, 3, moving=True)
    assert last_report(peer).reason == "no stage is prepared for this move"
    assert peer.workers[Lane.HELD].result is None


def test_a_prepared_stage_that_is_lost_fails_the_attempt_and_costs_nothing_else() -> None:
    peer = moving_peer()
    peer.loses_prepared()
    assert not last_report(peer).ok
    peer.closes(0, 3, attempt=2)
    peer.run()
    assert last_report(peer).ok


def test_a_failure_in_the_next_stage_is_named_as_such() -> None:
    peer = moving_peer()
    work = next(n for n, w in peer.live.items() if w.lane is Lane.PREPARED)
    del peer.live[work]
    peer.close.failed(work, "killed")
    peer.carry()
    assert last_report(peer).reason == "of the next stage: killed"


def test_an_average_of_the_next_stage_that_is_not_finite_fails_the_attempt() -> None:
    peer = moving_peer()
    peer.workers[Lane.PREPARED].finite = False
    peer.run()
    report = last_report(peer)
    assert (report.ok, report.not_finite) == (False, False), "this peer added nothing to it"
    assert report.reason == "the next stage's averaged gradient is not finite"


def test_a_prepared_stage_that_cannot_apply_makes_the_peer_attach_again() -> None:
    peer = moving_peer()
    peer.run()
    peer.workers[Lane.PREPARED].can_apply = False
    peer.applies()
    peer.run()
    assert peer.decided == [Rejoin()]
    assert not peer.switched


def test_an_apply_in_the_new_stage_ends_with_its_session_and_with_that_stage() -> None:
    for lost in (StepClose.session_lost, StepClose.prepared_lost):
        peer = moving_peer()
        peer.run()
        peer.applies()
        assert peer.live
        lost(peer.close)
        peer.carry()
        assert peer.live == {}


def test_a_move_of_a_lost_session_is_reported_in_no_other_one() -> None:
    peer = moving_peer()
    peer.step_worker()
    peer.loses_session()
    peer.run()
    assert peer.sent == []


def test_orders_that_wait_for_a_switch_of_stages_are_not_carried_out_after_it() -> None:
    peer = moving_peer()
    peer.run()
    peer.applies()
    peer.saves()
    peer.run()
    assert peer.switched
    assert isinstance(peer.sent[-1], Applied)
    assert peer.live == {}


@pytest.mark.parametrize("when", ["averaged", "applying"])
def test_a_move_whose_prepared_stage_is_lost_before_the_apply_ends_the_session(when: str) -> None:
    """The run counts on this peer in its new stage; the old one stays averaged for the next
    session."""
    peer = moving_peer()
    peer.run()
    if when == "averaged":
        peer.loses_prepared()
        peer.prepares()  # another one, that has averaged nothing
        peer.applies()
    else:
        peer.applies()
        peer.loses_prepared()
    assert Rejoin() in peer.decided
    peer.loses_session()
    peer.applies()
    peer.run()
    assert peer.sent[-1] == Applied(step=1, digest="of HELD", norm=1.0)


def test_a_move_whose_session_is_lost_in_its_apply_stays_averaged_in_the_old_stage() -> None:
    peer = moving_peer()
    peer.run()
    peer.applies()
    peer.loses_session()
    peer.run()
    assert not peer.switched
    assert peer.close.averaged_attempt == 1
    peer.applies()
    peer.run()
    assert peer.sent[-1] == Applied(step=1, digest="of HELD", norm=1.0)


# ---- the check of sums


def averaged_peer(*, moving: bool = False) -> ClosingPeer:
    peer = moving_peer() if moving else peer_with(0)
    if not moving:
        peer.closes(0)
    peer.run()
    assert last_report(peer).ok
    return peer


@pytest.mark.parametrize("details", [False, True])
def test_the_sums_of_what_is_averaged_here_are_stated_and_then_applied(details: bool) -> None:
    peer = averaged_peer()
    peer.checks(details=details)
    peer.applies()
    peer.run()
    assert peer.sent[-2:] == [
        SumsChecked(step=1, attempt=1, details=details, statement="of 1+0"),
        Applied(step=1, digest="of HELD", norm=1.0),
    ]


def test_a_moving_peer_states_the_sums_of_both_stages() -> None:
    peer = averaged_peer(moving=True)
    peer.checks()
    peer.run()
    assert peer.sent[-1] == SumsChecked(step=1, attempt=1, details=False, statement="of 1+1")


@pytest.mark.parametrize(("step", "attempt"), [(1, 2), (2, 1)])
def test_a_check_of_another_attempt_is_ignored(step: int, attempt: int) -> None:
    peer = averaged_peer()
    sent = len(peer.sent)
    peer.checks(step, attempt)
    assert not peer.live
    assert len(peer.sent) == sent


def test_a_check_before_the_average_waits_for_it_and_one_after_the_apply_is_ignored() -> None:
    peer = peer_with(0)
    peer.closes(0)
    peer.checks()
    peer.run()
    assert isinstance(peer.sent[-2], RoundReport)
    assert isinstance(peer.sent[-1], SumsChecked)
    peer.applies()
    peer.checks()
    peer.run()
    assert isinstance(peer.sent[-1], Applied)


def test_an_abort_ends_the_check_of_its_attempt() -> None:
    peer = averaged_peer()
    sent = len(peer.sent)
    peer.checks()
    peer.checks(details=True)
    peer.aborts()
    peer.run()
    assert len(peer.sent) == sent
    assert not peer.account.closes(1)


def test_a_check_of_a_lost_session_is_not_answered_and_the_average_stays() -> None:
    peer = averaged_peer()
    sent = len(peer.sent)
    peer.checks()
    peer.loses_session()
    peer.run()
    assert len(peer.sent) == sent
    assert peer.close.averaged_attempt == 1
    peer.checks()
    peer.run()
    assert isinstance(peer.sent[-1], SumsChecked)


def test_sums_that_cannot_be_stated_fail_the_attempt() -> None:
    peer = averaged_peer()
    peer.can_state = False
    peer.checks()
    peer.run()
    assert (last_report(peer).ok, last_report(peer).reason) == (False, "its average is gone")
    assert peer.close.averaged_attempt is None


@pytest.mark.parametrize("when", ["before the check", "during the check"])
def test_a_move_whose_prepared_stage_is_lost_states_no_sums_and_fails(when: str) -> None:
    peer = averaged_peer(moving=True)
    if when == "before the check":
        peer.loses_prepared()
        peer.checks()
    else:
        peer.checks()
        peer.loses_prepared()
    peer.run()
    assert (last_report(peer).ok, last_report(peer).reason) == (False, "the next stage was lost")


# ---- the invariants


RARELY = st.sampled_from((False, False, False, False, True))


class AnyCourse(RuleBasedStateMachine):
    """Every course of closes, aborts, applies, losses and late results that a coordinator and two
    workers can give."""

    def __init__(self) -> None:
        super().__init__()
        self.peer = ClosingPeer(staleness=1)
        self.attempt = 0

    def _work(self, requests: int) -> None:
        for _ in range(requests):
            self.peer.step_worker(Lane.HELD)
            self.peer.step_worker(Lane.PREPARED)

    @rule(
        computed=st.sets(st.integers(0, 3)), ahead=RARELY,
        others=st.sampled_from(((), (), (), (0,), (1,), (0, 2))),
        parts=st.integers(1, 2), moving=st.booleans(), requests=st.integers(0, 4),
    )  # fmt: skip
    def order_close(
        self, computed: set[int], ahead: bool, others: tuple[int, ...], parts: int, moving: bool,
        requests: int,
    ) -> None:  # fmt: skip
        """`others` are committed and not held, or held and not committed."""
        self.attempt += 1
        step = self.peer.account.step + ahead
        self.peer.computes(*sorted(computed), step=step)
        self._work(4)
        if moving and self.peer.prepared is None:
            self.peer.prepares()
        committed = held_of(self.peer, step) ^ set(others)
        self.peer.closes(
            *sorted(committed), step=step, attempt=self.attempt, moving=moving, parts=parts
        )
        self._work(requests)

    @rule(requests=st.integers(1, 4))
    def work(self, requests: int) -> None:
        self._work(requests)

    @rule(which=st.integers(0, 3), fails=RARELY)
    def average(self, which: int, fails: bool) -> None:
        running = list(self.peer.reducing)
        if running:
            failure = "a member is gone" if fails else None
            self.peer.finish_reduce(running[which % len(running)], failure, culprit=ME)
            self._work(1)

    @rule(
        fault=st.sampled_from((None, None, "finite", "can_uncommit")),
        before=st.sampled_from(("", "", "", "abort", "lose session", "lose prepared")),
        wrong_step=RARELY, wrong_attempt=RARELY,
        checks=st.integers(0, 2), can_state=st.sampled_from((True, True, True, False)),
        after=st.sampled_from(("run", "run", "run", "", "lose session", "lose prepared")),
    )  # fmt: skip
    def finish_and_apply(
        self, fault: str | None, before: str, wrong_step: bool, wrong_attempt: bool, checks: int,
        can_state: bool, after: str,
    ) -> None:  # fmt: skip
        """Let everything be done, which has a `fault` in the held stage; then order an Apply of the
        latest attempt, before which its sums are asked for."""
        if fault is not None:
            setattr(self.peer.workers[Lane.HELD], fault, False)
        self.peer.run()
        self.peer.workers[Lane.HELD].finite = self.peer.workers[Lane.HELD].can_uncommit = True
        assert self.peer.live == {}, "nothing is waited for that is not being done"
        if not self.peer.orders or self.peer.switched:
            return
        step, attempt = list(self.peer.orders)[-1]
        match before:
            case "abort" if not self.peer.apply_sessions[step, attempt]:
                self.peer.aborts(step, attempt)
            case "lose session":
                self.peer.loses_session()
            case "lose prepared" if self.peer.prepared is not None:
                self.peer.loses_prepared()
                self.peer.prepares()
        self.peer.can_state = can_state
        for number in range(checks):
            self.peer.checks(step, attempt, details=number > 0)
        self.peer.applies(step + wrong_step, attempt + wrong_attempt)
        if after == "lose session":
            self.peer.loses_session()
        elif after == "lose prepared" and self.peer.prepared is not None:
            self.peer.loses_prepared()
        if after:
            self.peer.run()

    @rule()
    def prepare_or_lose(self) -> None:
        if self.peer.prepared is None:
            self.peer.prepares()
        else:
            self.peer.loses_prepared()

    @rule(
        lane=st.sampled_from(Lane), fault=st.sampled_from(("finite", "can_uncommit", "can_apply"))
    )
    def work_with_a_fault(self, lane: Lane, fault: str) -> None:
        worker = self.peer.workers[lane]
        setattr(worker, fault, False)
        self._work(1)
        setattr(worker, fault, True)

    @rule(
        order=st.sampled_from(("abort", "apply", "check", "snapshot", "session lost")),
        back=st.integers(0, 2),
        later=RARELY,
    )
    def disturb(self, order: str, back: int, later: bool) -> None:
        """An order out of turn, of a recent attempt, or the end of the session."""
        recent = list(self.peer.orders)[:-4:-1] or [(1, 0)]
        step, attempt = recent[back % len(recent)]
        match order:
            case "abort":
                if not self.peer.apply_sessions.get((step, attempt)):  # a decision is final
                    self.peer.aborts(step, attempt)
            case "apply":
                self.peer.applies(step + later, attempt)
            case "check":
                self.peer.checks(step, attempt + later)
            case "snapshot":
                self.peer.saves()
            case _:
                self.peer.loses_session()

    @invariant()
    def holds(self) -> None:
        self.peer.check()
        if self.peer.switched:
            self.peer = ClosingPeer(staleness=1)


AnyCourse.TestCase.settings = settings(max_examples=150, stateful_step_count=50)
test_in_every_course = AnyCourse.TestCase
