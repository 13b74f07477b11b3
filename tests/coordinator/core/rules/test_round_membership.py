"""Loss of a member during a close: free once the other members have averaged, else one round."""

from __future__ import annotations

from typing import Any

import pytest

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import AppliedStep, Command, Restored
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    AbortRound,
    Apply,
    AssignStage,
    Close,
    Leaving,
    NotFinite,
    Welcome,
)

ALL = ("a0", "b0", "a1", "b1")


def closing(*names: str, **options: Any) -> Bench:
    """Everything is committed, by two of stage 0 and one of stage 1, and the close is under way."""
    bench = joined(*(names or ALL), **options)
    bench.report("a0", 0)
    bench.report("b0", 1)
    bench.report("a1", 0, 1)
    for stage in range(2, bench.manifest.stage_count):
        bench.report(f"a{stage}", 0, 1)
    assert bench.run.phase is RunPhase.CLOSING
    return bench


def averaged(bench: Bench, *peers: str) -> list[Command]:
    return [command for peer in peers for command in bench.averaged(peer)]


def told(bench: Bench, kind: type[Any], among: list[Command]) -> set[str]:
    return {peer for peer in bench.sessions if bench.sent(peer, kind, among)}


def shares(bench: Bench) -> dict[tuple[str, int], int]:
    [record] = bench.records(AppliedStep)
    return {(s.peer, s.stage): s.microbatches for s in record.shares}


def stage_0_alone_again(bench: Bench) -> None:
    """A death has ended the round of stage 0; its share is counted again, and it closes again."""
    averaged(bench, "a1", "b1")
    bench.averaged("b0")
    bench.lose("b0")
    bench.report("a0", 1)
    bench.tick(2.0)
    assert bench.run.phase is RunPhase.CLOSING


# ---- lost members


def test_a_death_when_the_others_have_averaged_costs_nothing_and_its_work_counts() -> None:
    bench = closing()
    averaged(bench, "a0", "b0", "a1")
    commands = bench.lose("b0")
    assert told(bench, AbortRound, commands) == set()
    assert bench.run.phase is RunPhase.CLOSING
    commands = bench.averaged("b1")
    assert told(bench, Apply, commands) == {"a0", "a1", "b1"}
    assert shares(bench) == {("a0", 0): 1, ("b0", 0): 1, ("a1", 1): 2}


def test_the_death_of_the_last_one_that_was_waited_for_ends_the_wait() -> None:
    bench = closing()
    averaged(bench, "a0", "a1", "b1")
    commands = bench.lose("b0")
    assert told(bench, Apply, commands) == {"a0", "a1", "b1"}
    assert shares(bench)["b0", 0] == 1
    assert bench.run.statistics.work.cleared == 0


def test_a_death_before_the_others_have_averaged_ends_the_round_of_one_stage() -> None:
    bench = closing()
    bench.averaged("a1")
    commands = bench.lose("b0")
    assert told(bench, AbortRound, commands) == {"a0"}
    assert set(bench.step().table) == {(0, 0), (0, 1), (1, 1)}
    bench.averaged("b1")
    bench.report("a0", 1)
    commands = bench.tick(2.0)
    assert told(bench, Close, commands) == {"a0"}
    assert bench.close_of("a0").committed == (0, 1)
    commands = bench.averaged("a0")
    assert told(bench, Apply, commands) == {"a0", "a1", "b1"}
    [record] = bench.records(AppliedStep)
    assert record.attempts == (record.attempt, record.attempt - 1)
    attempts = {peer: bench.sent(peer, Apply, commands)[0].attempt for peer in ("a0", "a1", "b1")}
    assert attempts == {"a0": record.attempt, "a1": record.attempt - 1, "b1": record.attempt - 1}


def test_a_death_that_ends_a_round_does_not_make_the_next_one_wait_longer_each_time() -> None:
    bench = closing(*ALL, "c0", "d0", "e0", "f0")
    averaged(bench, "a1", "b1")
    pauses = []
    for peer in ("c0", "d0", "e0", "f0"):
        bench.lose(peer)
        began = bench.now
        while bench.run.phase is RunPhase.COLLECT:
            bench.tick(0.1)
        pauses.append(bench.now - began)
    assert pauses == pytest.approx([bench.manifest.limits.receipt_interval_seconds] * 4, abs=0.15)


def test_when_the_last_one_of_a_stage_dies_its_average_dies_with_it() -> None:
    bench = closing()
    averaged(bench, "a0", "b0", "a1")
    bench.lose("b0")
    bench.lose("a0")
    assert bench.run.phase is RunPhase.COLLECT
    assert {cell for cell in bench.step().table if cell[1] == 0} == set(), "b0's as well"
    assert bench.step().closing.rounds
    bench.join_all("c0")
    bench.report("c0", 0, 1)
    bench.averaged("b1")
    bench.tick(2.0)
    bench.averaged("c0")
    assert shares(bench) == {("c0", 0): 2, ("a1", 1): 2}


def test_a_second_death_of_one_that_came_back_without_its_average_clears_nothing() -> None:
    bench = closing()
    averaged(bench, "a0", "b0", "a1")
    bench.lose("b0")
    bench.attach("b0")
    bench.lose("b0")
    bench.averaged("b1")
    assert shares(bench)["b0", 0] == 1


def test_one_that_has_averaged_and_then_holds_another_stage_counts_in_both() -> None:
    bench = closing()
    averaged(bench, "a0", "b0")
    bench.averaged("a1")
    bench.lose("b1")  # the round of stage 1 goes on without it: a1 has averaged
    assert bench.run.phase is RunPhase.APPLYING
    bench = closing("a0", "b0", "a1")
    averaged(bench, "a0", "b0")
    bench.lose("b0")
    bench.lose("a1")
    bench.join("b0", 1)
    bench.report("b0", 0, 1)
    bench.tick(2.0)
    assert bench.close_of("b0").committed == (0, 1)
    assert bench.closing() == ["a0", "b0"]
    bench.averaged("b0")
    assert shares(bench) == {("a0", 0): 1, ("b0", 0): 1, ("b0", 1): 2}


# ---- returning and joining peers


def test_one_that_comes_back_with_its_average_applies_it_with_the_others() -> None:
    bench = closing()
    averaged(bench, "a0", "b0", "a1")
    attempt = bench.attempt_of("b0")
    bench.lose("b0")
    commands = bench.attach("b0", stage=0, version=0, averaged_attempt=attempt)
    assert bench.sent("b0", Welcome, commands)[0].keep
    assert bench.closing() == list(ALL)
    commands = bench.averaged("b1")
    assert told(bench, Apply, commands) == set(ALL)
    for peer in ALL:
        bench.apply(peer)
    assert bench.peer("b0").phase is PeerPhase.READY
    assert shares(bench)["b0", 0] == 1


@pytest.mark.parametrize("said", [{"averaged_attempt": 999}, {}])
def test_one_that_comes_back_without_its_average_is_synced_after_the_step(
    said: dict[str, int],
) -> None:
    bench = closing()
    averaged(bench, "a0", "b0", "a1")
    bench.lose("b0")
    bench.attach("b0", stage=0, version=0, **said)
    assert bench.closing() == ["a0", "a1", "b1"]
    commands = bench.averaged("b1")
    assert told(bench, Apply, commands) == {"a0", "a1", "b1"}
    for peer in ("a0", "a1", "b1"):
        bench.apply(peer)
    assert bench.peer("b0").phase is PeerPhase.SYNCING


def test_a_peer_that_had_no_part_in_an_average_cannot_apply_it_with_the_others() -> None:
    bench = closing()
    attempt = bench.attempt_of("a0")
    bench.attach("c0", stage=0, version=0, averaged_attempt=attempt)
    assert bench.closing() == list(ALL)
    bench.average_all()
    bench.apply_all()
    assert bench.peer("c0").phase is PeerPhase.SYNCING


def test_a_member_that_returns_during_the_apply_is_checked_when_the_holders_have_reported() -> None:
    """It missed the Apply; until the others have reported, the digest of its state is not known."""
    bench = closing()
    bench.average_all()
    attempt = bench.attempt_of("b0")
    bench.lose("b0")
    assert bench.sent("b0", Apply, bench.attach("b0", stage=0, version=0, averaged_attempt=attempt))
    bench.apply("b0", digest="another")
    assert bench.peer("b0").phase is PeerPhase.READY
    bench.apply_all()
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.peer("b0").phase is PeerPhase.SYNCING
    assert list(bench.run.statistics.flags) == ["b0"]


def test_a_peer_that_joins_a_stage_that_has_averaged_takes_part_in_the_next_step() -> None:
    bench = closing(limits={"join_hold_seconds": 60.0})
    stage_0_alone_again(bench)
    bench.failed("a0")
    assert bench.run.phase is RunPhase.COLLECT
    bench.join_all("c1", "c0")
    assert bench.peer("c1").phase is PeerPhase.SYNCING
    assert bench.peer("c0").phase is PeerPhase.READY
    assert not bench.sent("c1", AssignStage, bench.ready("c1")), "it would be refused again"
    bench.tick(3.0)
    assert bench.run.phase is RunPhase.CLOSING, "the close does not wait for c1"
    assert bench.closing() == ["a0", "c0", "a1", "b1"]


def test_a_coordinator_that_comes_back_while_a_step_is_applied_knows_each_stage_s_attempt() -> None:
    last = AppliedStep(Step(3), 9, 2.0, 8, 1.0, 3.0, 0.1, (), (9, 7))
    bench = Bench(Restored(2, Version(3), last, None, False, None))
    commands = bench.attach("a0", stage=0, version=2, averaged_attempt=9)
    assert [apply.attempt for apply in bench.sent("a0", Apply, commands)] == [9]
    commands = bench.attach("a1", stage=1, version=2, averaged_attempt=7)
    assert [apply.attempt for apply in bench.sent("a1", Apply, commands)] == [7]
    commands = bench.attach("b1", stage=1, version=2, averaged_attempt=9)
    assert not bench.sent("b1", Apply, commands)
    assert not bench.sent("b1", Welcome, commands)[0].keep


# ---- failures


def test_a_failed_member_ends_its_own_round_and_the_others_keep_what_they_have() -> None:
    bench = closing()
    averaged(bench, "a1", "b1")
    commands = bench.failed("a0", culprit="b0")
    assert told(bench, AbortRound, commands) == {"a0", "b0"}
    commands = bench.tick(2.0)
    assert told(bench, Close, commands) == {"a0", "b0"}
    averaged(bench, "a0", "b0")
    assert bench.run.phase is RunPhase.APPLYING


def test_replicas_that_average_to_different_gradients_end_their_own_round() -> None:
    bench = closing()
    averaged(bench, "a1", "b1")
    bench.averaged("a0", own=1.0)
    commands = bench.averaged("b0", own=1.5)
    assert told(bench, AbortRound, commands) == {"a0", "b0"}
    assert len(bench.step().table) == 4


def test_a_late_failure_of_one_whose_part_is_averaged_takes_nothing_back() -> None:
    bench = closing(limits={"lease_seconds": 20.0})
    averaged(bench, "a0", "a1")  # b0 and b1 are silent; b1 is still awaited
    bench.tick(21.0)
    assert bench.run.peers.excluded == {"b0", "b1"}
    assert bench.run.phase is RunPhase.APPLYING
    bench = closing(limits={"lease_seconds": 20.0})
    averaged(bench, "a0")
    bench.tick(21.0)
    assert bench.run.phase is RunPhase.COLLECT, "stage 1 was silent as a whole"
    bench.failed("b0", reset=True, missing=(1,))
    assert len(bench.step().table) == 4


def test_what_is_not_finite_at_one_that_has_averaged_changes_nothing() -> None:
    bench = closing()
    stage_0_alone_again(bench)
    bench.failed("a0", missing=(0,))
    assert bench.run.phase is RunPhase.COLLECT
    bench.send("a1", NotFinite(step=Step(1), microbatch=MicrobatchIndex(0), sender=PeerId("a1")))
    assert bench.peer("a1").phase is PeerPhase.READY
    assert {cell for cell in bench.step().table if cell[1] == 1} == {(0, 1), (1, 1)}


def test_a_leaver_that_has_averaged_applies_the_step_before_it_goes() -> None:
    bench = closing()
    stage_0_alone_again(bench)
    bench.failed("a0")
    bench.send("b1", Leaving())
    bench.tick(2.0)
    assert PeerId("b1") in bench.run.peers
    bench.averaged("a0")
    bench.apply_all()
    bench.tick(1.0)
    assert PeerId("b1") not in bench.run.peers


# ---- stages that average together


def test_both_ends_of_a_tied_model_fail_together_and_what_is_between_goes_on() -> None:
    bench = closing("a0", "b0", "a1", "a2", "b2", stages=3, tied=True)
    averaged(bench, "b0", "a1", "a2", "b2")
    bench.failed("a0")
    assert told(bench, AbortRound, bench.last) == {"a0", "b0", "a2", "b2"}
    commands = bench.tick(2.0)
    assert told(bench, Close, commands) == {"a0", "b0", "a2", "b2"}
    averaged(bench, "a0", "b0", "b2")
    bench.lose("a2")
    [record] = bench.records(AppliedStep)
    assert record.attempts[0] == record.attempts[2] == record.attempt
    assert record.attempts[1] < record.attempt


def test_the_tied_ends_wait_for_each_other_before_a_death_costs_nothing() -> None:
    bench = closing("a0", "b0", "a1", "b1", tied=True)
    averaged(bench, "a0", "b0")
    commands = bench.lose("b0")
    assert told(bench, AbortRound, commands) == {"a0", "a1", "b1"}


def switching() -> Bench:
    """c0 switches to stage 1 in this close; stage 2 is not involved."""
    bench = joined("a0", "b0", "c0", "a1", "b1", "a2", "b2", stages=3)
    bench.prepare_move("c0", 1)
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    assert bench.close_of("c0").moving
    return bench


def test_stages_between_which_a_peer_switches_fail_together() -> None:
    bench = switching()
    commands = bench.failed("a1")
    assert told(bench, AbortRound, commands) == {"a0", "b0", "c0", "a1", "b1"}
    assert bench.peer("c0").moving is None


def test_a_switching_member_that_dies_when_all_others_have_averaged_costs_nothing() -> None:
    bench = switching()
    averaged(bench, "a0", "b0", "a1", "b1", "a2", "b2")
    bench.lose("c0")
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.closing() == ["a0", "b0", "a1", "b1", "a2", "b2"]


def test_a_stage_is_not_left_to_members_that_switch_away_from_it() -> None:
    bench = switching()
    averaged(bench, "a0", "b0", "c0", "a1", "b1")
    bench.lose("a0")
    assert bench.run.phase is RunPhase.CLOSING
    commands = bench.lose("b0")
    assert told(bench, AbortRound, commands) == {"c0", "a1", "b1"}


def test_a_stage_without_its_own_members_is_not_applied_by_members_that_switch_to_it() -> None:
    """A switching member does not report the norm of its destination."""
    bench = switching()
    averaged(bench, "a0", "b0", "c0", "a2", "b2", "a1")
    bench.lose("b1")
    assert bench.run.phase is RunPhase.APPLYING
    bench = switching()
    averaged(bench, "a0", "b0", "c0", "a1", "b1")
    bench.lose("b1")
    assert bench.run.phase is RunPhase.CLOSING
    commands = bench.lose("a1")
    assert told(bench, AbortRound, commands) == {"a0", "b0", "c0"}


def test_an_audit_ends_the_averages_that_contain_what_it_finds_wrong_and_no_move() -> None:
    bench = switching()
    bench.run.audits.retracted.add((MicrobatchIndex(0), StageIndex(1)))
    commands = bench.event_tick()
    assert told(bench, AbortRound, commands) == {"a0", "b0", "c0", "a1", "b1"}
    assert bench.peer("c0").moving is not None, "it is not to blame"


def test_a_mover_waits_for_the_next_step_when_its_next_stage_has_averaged() -> None:
    bench = closing(*ALL, "c0")
    averaged(bench, "a1", "b1")
    bench.failed("a0")
    bench.prepare_move("c0", 1)
    commands = bench.tick(2.0)
    assert bench.sent("c0", Close, commands)[0].moving == ()
    averaged(bench, "a0", "b0", "c0")
    bench.apply_all()
    c0 = bench.peer("c0")
    assert c0.stage == 0
    assert c0.moving is not None
