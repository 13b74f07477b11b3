"""Members that hold up the run: how long it waits, what that costs them, and their refusal."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import Note
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.state.held_time import (
    HELD_BUDGET_SECONDS,
    MAX_ACCOUNTS,
    MAX_DISPUTED_SECONDS,
    MAX_DISPUTED_WITH_ALL_SECONDS,
    REFUSED_AT_SECONDS,
    REFUSED_FOR_SECONDS,
    HeldAccount,
    HeldTime,
    restored_held_time,
)
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import Refused, Welcome

ALL = ("a0", "b0", "c0", "a1", "b1")
LIAR = "c0"
LIMITS = {"lease_seconds": 120.0, "join_hold_seconds": 30.0}


def collecting(*names: str, **options: int) -> Bench:
    return joined(*(names or ALL), limits=LIMITS, **{"steps": 1000, **options})


def held(bench: Bench, peer: str) -> float:
    return bench.run.held_time.seconds(PeerId(peer), bench.now)


def refusals(bench: Bench, peer: str) -> list[Refused]:
    return bench.sent(peer, Refused, bench.log)


def to_close(bench: Bench) -> None:
    """The work of a step is done, and its close begins."""
    bench.tick(0.25)
    bench.fill()
    while bench.run.phase is not RunPhase.CLOSING:
        bench.tick(0.25)


def apply_all(bench: Bench, silent: str) -> None:
    """Every member but one applies; the run goes on when it does not wait for that one any more."""
    bench.apply_all(but=silent)
    while bench.run.phase is RunPhase.APPLYING:
        bench.tick(0.25)


def fetch(bench: Bench, peer: str) -> None:
    """The peer downloads the state of its stage from the others."""
    state = bench.run.peers.get(PeerId(peer))
    if state is None or state.phase is not PeerPhase.SYNCING or state.transfer is None:
        return
    for holder in [p.peer for p in bench.run.peers.ready(state.transfer.stage)]:
        bench.save(holder)
    bench.tick(2.25)
    if state.transfer is not None and state.transfer.source_assigned:
        bench.ready(peer)


def one_step(bench: Bench, silent: str = "") -> float:
    """One step in which a member may not say that it has applied; returns the run's wait."""
    fetch(bench, silent)
    to_close(bench)
    bench.average_all()
    began = bench.now
    apply_all(bench, silent)
    return bench.now - began


# ---- deadlines follow the pace of the step


def test_the_last_member_to_apply_has_seconds_when_the_others_took_none() -> None:
    bench = collecting()
    assert 1.0 < one_step(bench, LIAR) <= 6.0
    assert bench.peer(LIAR).phase is PeerPhase.SYNCING


@pytest.mark.parametrize(
    ("computing", "applying", "more"),
    [(0.0, 20.0, 18.0), (40.0, 0.0, 19.0)],
    ids=["of large states", "of slow steps"],
)
def test_a_slow_member_has_its_time_at_no_charge(
    computing: float, applying: float, more: float
) -> None:
    """As long as the others took for the step, and more than they took to apply it."""
    bench = collecting()
    bench.tick(computing)
    to_close(bench)
    bench.average_all()
    bench.tick(applying)
    bench.apply_all(but=LIAR)
    bench.tick(more)
    bench.apply(LIAR)
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.peer(LIAR).phase is PeerPhase.READY
    assert held(bench, LIAR) == 0.0


def test_the_last_holder_of_a_stage_has_the_whole_time() -> None:
    bench = collecting("a0", "b0", "c0", "a1")
    to_close(bench)
    bench.average_all()
    for peer in ("a0", "b0", "c0"):
        bench.apply(peer)
    bench.tick(100.0)
    assert bench.run.phase is RunPhase.APPLYING
    bench.apply("a1")
    assert bench.run.phase is RunPhase.COLLECT
    assert held(bench, "a1") == 0.0


def test_a_member_that_averages_and_does_not_report_it_costs_seconds_and_is_excluded() -> None:
    bench = collecting()
    to_close(bench)
    for peer in bench.closing():
        if peer != LIAR:
            bench.averaged(peer)
    bench.tick(4.0)
    assert bench.run.phase is RunPhase.CLOSING
    bench.tick(2.0)
    assert bench.run.phase is RunPhase.APPLYING
    assert PeerId(LIAR) in bench.run.peers.excluded
    assert held(bench, LIAR) > 3.0


def test_a_report_just_before_the_deadline_is_charged_as_well() -> None:
    bench = collecting()
    to_close(bench)
    for peer in bench.closing():
        if peer != LIAR:
            bench.averaged(peer)
    bench.tick(4.5)
    bench.averaged(LIAR)
    assert held(bench, LIAR) == pytest.approx(3.5, abs=0.5)


# ---- the budget


def test_a_member_that_never_applies_is_refused_for_longer_each_time() -> None:
    """Once is an accident; from the second step on it pauses."""
    bench = collecting()
    one_step(bench, LIAR)
    bench.tick(0.25)
    assert not refusals(bench, LIAR)
    for minutes in (1, 2, 4, 8):
        before = len(refusals(bench, LIAR))
        for _ in range(3):  # it is a member again once it has downloaded its stage
            if len(refusals(bench, LIAR)) == before:
                one_step(bench, LIAR)
                bench.tick(0.25)
        refused = refusals(bench, LIAR)[-1]
        assert "too often" in refused.reason
        assert f"in {minutes} min" in refused.reason
        assert refused.retry_seconds == 60.0 * minutes
        assert PeerId(LIAR) not in bench.run.peers
        bench.tick(60.0 * minutes + 1.0)
        bench.request(LIAR, 0, wanted_stage=0)
    assert max(held(bench, peer) for peer in ALL if peer != LIAR) == 0.0


def test_a_peer_that_leaves_before_it_is_refused_does_not_come_back_sooner() -> None:
    bench = collecting()
    for _ in range(2):
        held_up.record_held_up_alone(bench.run, bench.peer(LIAR), bench.now)
    bench.lose(LIAR)
    bench.tick(0.25)
    bench.attach(LIAR)
    assert refusals(bench, LIAR)[-1].retry_seconds == 60.0


def test_a_last_holder_pauses_when_there_is_another_one_unless_it_is_forgotten() -> None:
    for hours, refused in ((0, True), (1, False)):
        bench = collecting("a0", "a1")
        for _ in range(2):
            held_up.record_held_up_alone(bench.run, bench.peer("a0"), bench.now)
        bench.tick(3600.0 * hours + 0.25)
        assert not refusals(bench, "a0")
        bench.join("b0", 0)
        bench.tick(0.25)
        fetch(bench, "b0")
        bench.tick(0.25)
        assert bool(refusals(bench, "a0")) == refused
        assert (PeerId("a0") in bench.run.peers) != refused


def spend(bench: Bench, peer: str, seconds: float) -> None:
    """Charge a peer as in so many seconds of waiting for it."""
    state = bench.peer(peer)
    while held_up.held_seconds(bench.run, state, bench.now) < seconds:
        bench.tick(10.0)
        held_up.charge(bench.run, state, bench.now - 10.0, bench.now, bench.now)


def test_a_refusal_outlasts_sessions_and_ends_after_an_hour() -> None:
    bench = collecting()
    spend(bench, LIAR, REFUSED_AT_SECONDS)
    bench.tick(0.25)
    assert refusals(bench, LIAR)
    commands = bench.attach(LIAR)
    assert bench.sent(LIAR, Refused, commands)[0].code == "protocol"
    assert not bench.sent(LIAR, Welcome, commands)
    bench.tick(REFUSED_FOR_SECONDS)
    assert bench.sent(LIAR, Welcome, bench.attach(LIAR))


def test_that_a_peer_is_not_waited_for_any_more_is_noted_once() -> None:
    bench = collecting()
    spend(bench, LIAR, HELD_BUDGET_SECONDS + 20.0)
    bench.event_tick()
    notes = [note for note in bench.commands(Note, bench.log) if "not waited for" in note.text]
    assert [note.peer for note in notes] == [LIAR]


def test_the_devices_of_one_owner_have_one_budget() -> None:
    bench = collecting("a0", "a1")
    owner = PeerId("owner")
    for device in ("d0", "e0"):
        bench.join(device, 0, owner=owner)
    spend(bench, "d0", HELD_BUDGET_SECONDS)
    assert held_up.is_spent(bench.run, bench.peer("e0"), bench.now)
    spend(bench, "d0", REFUSED_AT_SECONDS)
    bench.tick(0.25)
    assert bench.sent("f0", Refused, bench.attach("f0", owner=owner))
    assert bench.sent("g0", Welcome, bench.attach("g0"))


def test_what_two_devices_hold_up_at_once_counts_once() -> None:
    account = HeldAccount()
    assert account.charge(100.0, 110.0, 40.0, 110.0) == 10.0
    assert account.charge(102.0, 112.0, 40.0, 112.0) == 2.0


def test_the_words_of_one_peer_cost_another_one_half_of_its_budget_at_most() -> None:
    account = HeldAccount()
    for since in (0.0, 50.0, 100.0):
        account.dispute(PeerId("a0"), since, since + 30.0, since + 30.0)
    assert account.held.at(130.0) == pytest.approx(MAX_DISPUTED_SECONDS, abs=1.0)


def test_the_words_of_many_peers_have_no_other_one_refused() -> None:
    """Four liars of ten members did."""
    account = HeldAccount()
    for number in range(20):
        account.dispute(PeerId(f"liar{number}"), 50.0 * number, 50.0 * number + 30.0, 50.0 * number)
        assert account.held.at(50.0 * number) <= MAX_DISPUTED_WITH_ALL_SECONDS
    assert account.disputes[PeerId("liar19")].at(950.0) == 30.0, "the two stay apart nevertheless"
    assert REFUSED_AT_SECONDS - MAX_DISPUTED_WITH_ALL_SECONDS > 89.0, "the most of honest worlds"


def test_the_budget_returns_within_an_hour() -> None:
    account = HeldAccount()
    account.charge(0.0, 40.0, 40.0, 40.0)
    assert account.held.at(40.0 + 600.0) == pytest.approx(20.0)
    assert account.held.at(40.0 + 3600.0) == 0.0


def test_the_number_of_accounts_is_bounded_and_the_worst_are_kept() -> None:
    held_time = HeldTime()
    held_time.change(PeerId("worst"), 0.0).charge(0.0, 40.0, 40.0, 40.0)
    for number in range(2 * MAX_ACCOUNTS):
        held_time.change(PeerId(f"peer{number}"), 40.0)
    assert len(held_time.accounts) <= MAX_ACCOUNTS
    assert held_time.seconds(PeerId("worst"), 40.0) == 40.0


def test_who_is_refused_is_not_forgotten_for_any_number_of_new_accounts() -> None:
    """A device may show another owner with each hello, and accounts cost it a message each."""
    held_time = HeldTime()
    held_time.change(PeerId("liar"), 0.0).refuse(3600.0, "it lied", 0.0)
    for number in range(2 * MAX_ACCOUNTS):
        held_time.change(PeerId(f"owner{number}"), 40.0)
    assert held_time.refused([PeerId("liar")], 40.0)


def test_a_shorter_refusal_does_not_take_the_place_of_a_longer_one() -> None:
    account = HeldAccount()
    account.refuse(3600.0, "it lost an audit", 0.0, ends_with_self_test=True)
    account.refuse(60.0, "", 0.0)
    assert (account.refused_until, account.refused_because) == (3600.0, "it lost an audit")
    assert not account.ends_with_self_test, "there is more than that to end"
    account.refuse(7200.0, "it lost an audit", 3601.0, ends_with_self_test=True)
    assert account.ends_with_self_test, "the earlier ones are over"


# ---- downloads


def test_downloads_that_never_end_delay_no_close_once_the_budget_is_spent() -> None:
    bench = collecting("a0", "b0", "a1", "b1")
    bench.one_step()
    waited = 0.0
    for _ in range(10):
        bench.request(LIAR, 0)
        bench.fill()
        began = bench.now
        while bench.run.phase is RunPhase.COLLECT:
            bench.tick(0.25)
        waited += bench.now - began
        bench.average_all()
        apply_all(bench, "")
        bench.lose(LIAR)
    assert 60.0 < waited < HELD_BUDGET_SECONDS + 31.0
    assert bench.sent(LIAR, Welcome, bench.attach(LIAR))


# ---- a word against a word


def fail_by(bench: Bench, accuser: str, accused: str, seconds: float = 10.0) -> None:
    """An attempt that fails after a while, by a member's word against another one."""
    while bench.run.phase is not RunPhase.CLOSING:
        bench.tick(0.25)
        if bench.run.phase is RunPhase.COLLECT:
            bench.fill()
    bench.tick(seconds)
    bench.failed(accuser, culprit=accused)


def test_accuser_and_accused_are_charged_alike() -> None:
    bench = collecting()
    to_close(bench)
    fail_by(bench, LIAR, "a0")
    assert held(bench, "a0") == held(bench, LIAR) > 9.0


@pytest.mark.parametrize(("passed", "out"), [({}, LIAR), ({"a0": 3, LIAR: 5}, "a0")], ids=str)
def test_of_two_that_name_each_other_the_one_with_fewer_passed_audits_sits_out(
    passed: dict[str, int], out: str
) -> None:
    """With equally many the one that came later."""
    bench = collecting()
    for owner, count in passed.items():
        bench.run.audits.standings.change(PeerId(owner)).passed = count
    to_close(bench)
    for _ in range(2):
        assert bench.run.peers.excluded == set()
        fail_by(bench, LIAR, "a0", seconds=0.0)
    assert bench.run.peers.excluded == {out}


def test_an_accuser_cannot_spend_the_budget_of_another_one() -> None:
    bench = collecting()
    for _ in range(12):
        for peer in ("a0", LIAR):
            fetch(bench, peer)
        state = bench.run.peers.get(PeerId(LIAR))
        if state is not None and bench.run.peers.holds_current(state):
            to_close(bench)
            fail_by(bench, LIAR, "a0", seconds=25.0)
        one_step(bench)
    assert held(bench, "a0") <= MAX_DISPUTED_SECONDS
    assert not refusals(bench, "a0")


def test_two_that_keep_naming_each_other_share_no_stage_any_more() -> None:
    bench = collecting("a0", "c0", "a1", "b1")
    bench.one_step()
    to_close(bench)
    fail_by(bench, LIAR, "a0", seconds=25.0)
    fail_by(bench, LIAR, "a0", seconds=25.0)
    assert bench.run.peers.excluded == {LIAR}
    one_step(bench)
    fetch(bench, LIAR)
    assert bench.peer(LIAR).phase is PeerPhase.SYNCING
    began = bench.now
    for _ in range(5):
        one_step(bench)
    assert bench.now - began < 5.0
    bench.lose("a0")
    bench.attach("d0", wanted_stage=0)
    bench.tick(900.0)
    assert bench.run.held_time.account(PeerId(LIAR)).disputes[PeerId("a0")].at(bench.now) < 31.0


def test_who_does_not_join_the_all_reduce_is_remembered_across_steps() -> None:
    """Whichever member notices first names it; it pays for all of them."""
    bench = collecting("a0", "b0", "c0", "d0", "a1", "b1")
    accusers = ["a0", "b0", "d0"]
    attempts = 0
    for _ in range(40):
        for peer in (*accusers, LIAR):
            fetch(bench, peer)
        to_close(bench)
        while PeerId(LIAR) in bench.closing():
            fail_by(bench, accusers[attempts % 3], LIAR, seconds=10.0)
            attempts += 1
            while bench.run.phase is not RunPhase.CLOSING:
                bench.tick(0.25)
                if bench.run.phase is RunPhase.COLLECT:
                    bench.fill()
        bench.average_all()
        apply_all(bench, "")
    assert attempts <= 12
    assert held(bench, LIAR) > 2 * max(held(bench, peer) for peer in accusers)
    assert not any(refusals(bench, peer) for peer in accusers)


# ---------------------------------------------------------------- restarts of the coordinator


def test_held_seconds_go_on_leaking_across_a_restart_whatever_the_clocks_say() -> None:
    before = HeldTime()
    before.change(PeerId("a0"), 5000.0).charge(4900.0, 5000.0, 40.0, 5000.0)
    before.change(PeerId("b0"), 5000.0).dispute(PeerId("a0"), 4900.0, 5000.0, 5000.0)
    records = before.take_changed(5300.0)
    assert not before.take_changed(5300.0)
    after = restored_held_time(records, 7.0)
    for key in ("a0", "b0"):
        assert after.seconds(PeerId(key), 7.0) == before.seconds(PeerId(key), 5300.0) == 30.0
        assert after.seconds(PeerId(key), 307.0) == 20.0
    assert after.account(PeerId("b0")).disputes[PeerId("a0")].at(7.0) == 30.0


def test_a_restart_of_the_coordinator_gives_no_new_budget() -> None:
    bench = collecting()
    spend(bench, LIAR, 11.0)
    bench.tick(1.0)
    before = held(bench, LIAR)
    assert before > 10.0
    bench.restart(away_seconds=60.0)
    assert held(bench, LIAR) == pytest.approx(before - 2.0)
    assert held(bench, "a0") == 0.0


def test_who_is_refused_stays_so_across_a_restart_with_the_reason() -> None:
    bench = collecting()
    keys = (PeerId(LIAR), PeerId("owner"))
    held_up.refuse_until(bench.run, keys, bench.now + 3600.0, "it lost an audit", bench.now)
    bench.tick(1.0)
    bench.restart(away_seconds=1799.0)
    bench.attach("its other device", owner=PeerId("owner"))
    (refused,) = bench.sent("its other device", Refused)
    assert "it lost an audit" in refused.reason
    assert refused.retry_seconds == 1800.0
    bench.tick(1801.0)
    bench.attach(LIAR)
    assert bench.sent(LIAR, Welcome)


def test_two_that_name_each_other_cannot_do_so_anew_after_a_restart() -> None:
    """A single accuser would otherwise spend the budget of the accused by and by."""
    bench = collecting("a0", "b0", LIAR, "a1")
    for _ in range(4):
        to_close(bench)
        fail_by(bench, LIAR, "a0", seconds=25.0)
    bench.tick(0.25)
    before = held(bench, "a0")
    assert before > 30.0
    bench.restart()
    accused, accuser = PeerId("a0"), PeerId(LIAR)
    account = bench.run.held_time.change(accused, bench.now)
    account.dispute(accuser, bench.now, bench.now + 100.0, bench.now)
    assert held(bench, "a0") <= MAX_DISPUTED_SECONDS


def test_accusations_of_many_cost_as_much_after_a_restart_as_without_one() -> None:
    """Their bound holds across it, and returns as slowly."""
    before = HeldTime()
    account = before.change(PeerId("a0"), 0.0)

    def accused(account: HeldAccount, first: int, at: float) -> float:
        for number in range(first, first + 20):
            account.dispute(PeerId(f"liar{number}"), at, at + 30.0, at + 30.0)
            at += 50.0
        return account.held.at(at)

    assert accused(account, 0, 0.0) > 80.0
    restarted = restored_held_time(before.take_changed(1000.0), 1000.0).account(PeerId("a0"))
    for first, at in ((20, 1000.0), (40, 4000.0)):
        expected = accused(account, first, at)
        assert accused(restarted, first, at) == pytest.approx(expected, abs=2.0)
        assert expected > 80.0


# ---------------------------------------------------------------- self-tests


def lost_an_audit(bench: Bench, *keys: str, again: bool = False) -> None:
    """Refuse them for a lost audit: for the first one, unless `again`."""
    named = tuple(map(PeerId, keys))
    held_up.refuse_until(
        bench.run, named, bench.now + 3600.0, "it lost an audit", bench.now,
        ends_with_self_test=not again,
    )  # fmt: skip


def test_a_passed_self_test_ends_the_refusal_of_a_peer_and_its_owner_once() -> None:
    bench = collecting()
    lost_an_audit(bench, LIAR, "owner")
    bench.attach("d0", owner=PeerId("owner"))
    (refused,) = bench.sent("d0", Refused)
    assert (refused.self_test, refused.retry_seconds) == (True, 3600.0)
    bench.attach("d0", owner=PeerId("owner"), self_tested=True)
    assert bench.sent("d0", Welcome)
    assert any("its machine has passed a self-test" in note.text for note in bench.commands(Note))
    bench.tick(0.25)
    bench.restart()
    bench.attach("d0", owner=PeerId("owner"))
    assert bench.sent("d0", Welcome), "a restart of the coordinator brings no refusal back"
    lost_an_audit(bench, "d0", "owner", again=True)
    bench.attach("d0", owner=PeerId("owner"), self_tested=True)
    (refused,) = bench.sent("d0", Refused)
    assert (refused.self_test, refused.retry_seconds) == (False, 3600.0)


def test_each_refused_device_of_an_owner_has_a_self_test_of_its_own() -> None:
    """What one device has passed says nothing of another one's memory."""
    bench = collecting()
    lost_an_audit(bench, "d0", "owner")
    bench.attach("e0", owner=PeerId("owner"), self_tested=True)
    assert bench.sent("e0", Welcome)
    bench.attach("d0", owner=PeerId("owner"))
    assert [one.self_test for one in bench.sent("d0", Refused)] == [True]


def test_whether_a_self_test_ends_a_refusal_outlasts_a_restart() -> None:
    bench = collecting()
    lost_an_audit(bench, "d0")
    lost_an_audit(bench, "e0", again=True)
    bench.tick(0.25)
    bench.restart()
    for peer, self_test in (("d0", True), ("e0", False)):
        bench.attach(peer)
        assert [one.self_test for one in bench.sent(peer, Refused)] == [self_test]


def test_a_peer_that_holds_up_the_run_says_in_vain_that_it_has_passed_a_self_test() -> None:
    bench = collecting()
    spend(bench, LIAR, REFUSED_AT_SECONDS)
    bench.tick(0.25)
    assert [one.self_test for one in refusals(bench, LIAR)] == [False]
    bench.attach(LIAR, self_tested=True)
    (refused,) = bench.sent(LIAR, Refused)
    assert "held up the run" in refused.reason


def test_after_a_passed_self_test_another_one_ends_no_refusal_of_a_peer_that_holds_up_the_run() -> (
    None
):
    bench = collecting()
    lost_an_audit(bench, LIAR)
    assert held_up.lift_refusal(bench.run, PeerId(LIAR), None, bench.now)
    spend(bench, LIAR, REFUSED_AT_SECONDS)
    bench.tick(0.25)
    assert [one.self_test for one in refusals(bench, LIAR)] == [False]


refusals_in_force = st.lists(
    st.tuples(st.sampled_from(("peer", "owner")), st.booleans(), st.floats(1.0, 100.0)), max_size=4
)


@given(refusals_in_force, st.floats(0.0, 120.0))
def test_a_self_test_ends_all_refusals_that_are_in_force_or_none(
    made: list[tuple[str, bool, float]], later: float
) -> None:
    bench = Bench()
    peer, owner = PeerId("peer"), PeerId("owner")
    latest: dict[str, tuple[bool, float]] = {}
    for key, by_self_test, seconds in made:
        held_up.refuse_until(
            bench.run, (PeerId(key),), bench.now + seconds, "why", bench.now,
            ends_with_self_test=by_self_test,
        )  # fmt: skip
        before_by, longest = latest.get(key, (True, 0.0))
        latest[key] = (by_self_test and (before_by or longest == 0.0), max(longest, seconds))
    now = bench.now + later
    before = held_up.refused_seconds(bench.run, peer, owner, now)
    in_force = [by_self_test for by_self_test, seconds in latest.values() if seconds > later]
    lifted = held_up.lift_refusal(bench.run, peer, owner, now)
    assert lifted == (bool(in_force) and all(in_force))
    after = held_up.refused_seconds(bench.run, peer, owner, now)
    assert after == (None if lifted else before)
    assert not held_up.lift_refusal(bench.run, peer, owner, now), "there is nothing left to end"
