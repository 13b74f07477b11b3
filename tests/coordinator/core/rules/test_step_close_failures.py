"""Members that die, hang or fail repeatedly during a close."""

from __future__ import annotations

from typing import Any

import pytest

from kits.swarm_world.event_bench import Bench
from swarm_coordinator.core.events import AppliedStep, Command
from swarm_coordinator.core.rules.step_close import MAX_CARRIER_FAILURES, MAX_FAILED_ATTEMPTS
from swarm_coordinator.core.state.run import PeerPhase, RunPhase
from swarm_shared.base.types import PeerId
from swarm_shared.protocol import AbortRound, AssignStage, Close

ALL = ("a0", "b0", "a1", "b1")


def closing(**options: Any) -> Bench:
    """Two peers a stage; everything is committed and the first close is under way."""
    bench = Bench(**options)
    bench.join_all(*ALL)
    bench.report("a0", 0)
    bench.report("b0", 1)
    bench.report("b1", 0, 1)
    assert bench.run.phase is RunPhase.CLOSING
    return bench


def closed_again(bench: Bench, seconds: float = 6.0) -> list[Command]:
    """After an abort: wait for the next close of the same step."""
    commands = bench.tick(seconds)
    assert bench.run.phase is RunPhase.CLOSING
    return commands


def applied(bench: Bench) -> Bench:
    for peer in bench.closing():
        bench.apply(peer)
    return bench


def stage_1_has_averaged(bench: Bench) -> Bench:
    bench.averaged("a1")
    bench.averaged("b1")
    return bench


def test_a_member_that_dies_before_the_others_have_averaged_ends_the_attempt() -> None:
    bench = closing()
    bench.averaged("b0")
    commands = bench.lose("b0")
    assert bench.sent("a0", AbortRound, commands)
    assert not any(bench.sent(peer, AbortRound, commands) for peer in ("b0", "a1", "b1"))
    assert bench.run.phase is RunPhase.COLLECT
    assert (1, 0) not in bench.step().table


def test_a_member_that_dies_after_the_decision_does_not_hold_up_the_others() -> None:
    bench = closing()
    bench.average_all()
    bench.apply("a0")
    bench.apply("a1")
    bench.apply("b1")
    bench.lose("b0")
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.step().step == 2


def test_a_member_that_applies_and_then_dies_does_not_hold_up_the_others() -> None:
    bench = closing()
    bench.average_all()
    bench.apply("b0")
    bench.lose("b0")
    for peer in ("a0", "a1", "b1"):
        bench.apply(peer)
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.step().step == 2


def test_a_peer_named_for_three_failed_attempts_is_excluded_and_synced_after_the_step() -> None:
    bench = stage_1_has_averaged(closing())
    for _ in range(3):
        bench.failed("a0", culprit="b0")
        bench.tick(1.0)
        bench.report("a0", 1)
        bench.tick(6.0)
    assert bench.closing() == ["a0", "a1", "b1"]
    assert not bench.sent("b0", Close)
    bench.averaged("a0")
    applied(bench)
    assert bench.run.peers[PeerId("b0")].phase is PeerPhase.SYNCING
    assert {p.peer for p in bench.run.ready_peers(0)} == {"a0"}
    bench.save("a0")
    assert len(bench.sent("b0", AssignStage)) == 1


def test_carrier_failures_beyond_the_limit_count_against_their_reporter() -> None:
    bench = stage_1_has_averaged(closing())
    for _ in range(MAX_CARRIER_FAILURES + MAX_FAILED_ATTEMPTS):
        assert "b0" not in bench.step().excluded
        bench.failed("a0", culprit="b0", carrier_failed=True)
        bench.tick(6.0)
    assert bench.step().excluded == {"b0"}
    assert bench.step().carrier_failures == MAX_CARRIER_FAILURES


def test_the_last_peer_of_a_stage_is_never_excluded() -> None:
    bench = stage_1_has_averaged(closing())
    bench.lose("a0")
    for _ in range(5):
        bench.tick(6.0)
        bench.report("b0", 0, 1)
        assert PeerId("b0") in bench.closing()
        bench.failed("b0")


def test_an_excluded_peer_is_readmitted_when_its_stage_has_no_other_peer() -> None:
    bench = closing()
    for _ in range(3):
        bench.failed("a0", culprit="b0")
        bench.tick(6.0)
        bench.report("a0", 1)
        bench.tick(6.0)
    assert not any(p.peer == "b0" for p in bench.run.ready_peers(0))
    bench.lose("a0")
    assert [p.peer for p in bench.run.ready_peers(0)] == ["b0"]
    bench.tick(1.0)
    bench.report("b0", 0, 1)
    closed_again(bench)
    assert bench.close_of("b0").committed == (0, 1)


def test_an_overdue_close_goes_on_without_its_silent_members() -> None:
    bench = closing(limits={"lease_seconds": 20.0})
    for peer in ("a0", "a1", "b1"):
        bench.averaged(peer)
    bench.tick(19.0)
    assert bench.run.phase is RunPhase.CLOSING
    bench.tick(2.0)
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.closing() == ["a0", "a1", "b1"]
    assert {share.peer for share in bench.records(AppliedStep)[0].shares} == {"a0", "b0", "b1"}
    applied(bench)
    assert bench.run.peers[PeerId("b0")].phase is PeerPhase.SYNCING


def test_a_stage_that_is_slow_as_a_whole_is_given_more_time_and_loses_no_member() -> None:
    bench = closing(limits={"lease_seconds": 20.0})
    bench.averaged("a0")
    bench.averaged("b0")
    bench.tick(21.0)
    closed_again(bench, 1.0)
    assert bench.closing() == ["a0", "b0", "a1", "b1"]
    bench.tick(30.0)
    assert bench.run.phase is RunPhase.CLOSING


@pytest.mark.parametrize("named", ["a1", "stranger"])
def test_a_peer_that_keeps_naming_one_that_cannot_be_excluded_is_excluded_itself(
    named: str,
) -> None:
    bench = Bench()
    bench.join_all("a0", "b0", "a1")
    bench.fill()
    for _ in range(6):
        if PeerId("b0") not in bench.closing():
            break
        bench.failed("b0", culprit=named)
        bench.tick(6.0)
    assert bench.closing() == ["a0", "a1"]
    bench.average_all()
    assert len(bench.records(AppliedStep)) == 1


def test_a_member_that_does_not_apply_in_time_is_left_behind_and_synced() -> None:
    bench = closing(limits={"lease_seconds": 20.0})
    bench.average_all()
    for peer in ("a0", "a1", "b1"):
        bench.apply(peer)
    bench.tick(19.0)
    assert bench.run.phase is RunPhase.APPLYING
    bench.tick(2.0)
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.run.peers[PeerId("b0")].phase is PeerPhase.SYNCING
