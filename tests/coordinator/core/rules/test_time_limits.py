"""Time limits of a close: what becomes of its silent members, and what that costs them."""

from __future__ import annotations

from typing import Any

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import Note
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.state.peers import StageTransfer
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import AbortRound

LEASE_SECONDS = 20.0


def closing(*names: str, **options: Any) -> Bench:
    """The work of a step is done, and all of its members are to average."""
    bench = joined(*names, limits={"lease_seconds": LEASE_SECONDS}, **options)
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    return bench


def averaged(bench: Bench, *peers: str) -> None:
    for peer in peers:
        bench.averaged(peer)


def held(bench: Bench, peer: str) -> float:
    return held_up.held_seconds(bench.run, bench.peer(peer), bench.now)


def is_noted_alone(bench: Bench, peer: str) -> bool:
    return held_up.has_held_up_alone(bench.run, bench.peer(peer), bench.now)


# ---- averages


def test_members_that_are_silent_together_leave_the_others_their_average() -> None:
    bench = closing("a0", "b0", "c0", "d0", "e0", "a1")
    averaged(bench, "a0", "b0", "c0", "a1")
    bench.tick(6.0)
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.run.peers.excluded == {"d0", "e0"}
    assert not bench.sent("a0", AbortRound, bench.log)
    assert is_noted_alone(bench, "d0")
    assert is_noted_alone(bench, "e0")


def test_where_few_of_a_stage_have_averaged_both_sides_are_charged_and_none_is_held_alone() -> None:
    """The few may have reported without averaging; those of another stage are no party."""
    bench = closing("b0", "c0", "d0", "a1", "b1")
    averaged(bench, "d0", "a1", "b1")
    bench.tick(LEASE_SECONDS + 1.0)
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.run.peers.excluded == {"b0", "c0"}
    assert held(bench, "b0") == held(bench, "c0") == held(bench, "d0") > LEASE_SECONDS / 2
    assert held(bench, "a1") == held(bench, "b1") == 0.0
    assert not is_noted_alone(bench, "b0")
    assert not is_noted_alone(bench, "c0")


def test_the_last_member_of_a_stage_that_the_others_switch_away_from_has_the_whole_time() -> None:
    bench = joined("a0", "c0", "d0", "a1", "b1", limits={"lease_seconds": LEASE_SECONDS})
    for peer in ("c0", "d0"):
        state, way = bench.peer(peer), StageTransfer(StageIndex(1), bench.now)
        bench.run.peers.begin_transfer(state, way)
        bench.run.peers.assign_source(state, way, bench.now)
        way.ready = True
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    averaged(bench, "c0", "d0", "a1", "b1")
    bench.tick(LEASE_SECONDS - 1.0)
    assert bench.run.phase is RunPhase.CLOSING
    assert "a0" in bench.closing()
    assert held(bench, "a0") == 0.0
    bench.averaged("a0")
    assert bench.run.phase is RunPhase.APPLYING


# ---- applies


def test_the_last_member_to_apply_is_charged_and_noted_alone() -> None:
    bench = closing("a0", "b0", "c0", "a1", "b1")
    bench.average_all()
    bench.apply_all(but="c0")
    bench.tick(6.0)
    assert bench.run.phase is not RunPhase.APPLYING
    assert held(bench, "c0") > 3.0
    assert is_noted_alone(bench, "c0")
    (note,) = [n.text for n in bench.commands(Note, bench.log) if "did not apply" in n.text]
    assert note == "…c0 did not apply step 1 in time"


def test_when_the_whole_time_is_over_the_run_goes_on_without_all_that_have_not_applied() -> None:
    """Where most are silent none is held alone, and where a whole stage is, none is charged."""
    bench = closing("a0", "b0", "c0", "a1", "b1")
    bench.average_all()
    bench.apply("a0")
    bench.tick(LEASE_SECONDS - 1.0)
    assert bench.run.phase is RunPhase.APPLYING
    bench.tick(2.0)
    assert bench.run.phase is not RunPhase.APPLYING
    assert held(bench, "b0") == held(bench, "c0") > LEASE_SECONDS / 2
    assert held(bench, "a0") == held(bench, "a1") == held(bench, "b1") == 0.0
    assert not any(is_noted_alone(bench, peer) for peer in bench.run.peers)
