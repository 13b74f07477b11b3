"""A stage that has lost everybody: who takes it over, and from which version the run goes on."""

from __future__ import annotations

import pytest
from swarm_bench import Bench

from swarm_coordinator.core.events import Note, Restored, RolledBack, Send
from swarm_coordinator.core.rules.status_view import status_of
from swarm_coordinator.core.state.run import PeerPhase, RunPhase
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    Applied,
    AssignStage,
    Lease,
    Mask,
    MaskRequest,
    Ready,
    SaveSnapshot,
    StageRequest,
    SyncFailed,
    Welcome,
)


def lost_stage() -> Bench:
    """Version 3, checkpoint at 2, and nobody left at stage 1."""
    bench = Bench(checkpoint_steps=2, steps=9)
    bench.join_all("a0", "b0", "a1")
    bench.one_step()
    bench.one_step()
    bench.checkpoint()
    bench.one_step()
    assert bench.run.version == 3
    assert bench.run.checkpoint == Bench.checkpoint_of(2, 2)
    bench.lose("a1")
    return bench


def test_a_lost_stage_is_waited_for_before_the_run_goes_back_to_its_checkpoint() -> None:
    bench = lost_stage()
    bench.attach("c1", wanted_stage=1)
    bench.say("c1", StageRequest(stage=StageIndex(1)))
    bench.tick(9.0)
    assert not bench.records(RolledBack)
    commands = bench.tick(2.0)
    assert [r.version for r in bench.records(RolledBack, commands)] == [2]
    for peer, stage in (("a0", 0), ("b0", 0), ("c1", 1)):
        [assigned] = bench.sent(peer, AssignStage, commands)
        assert (assigned.stage, assigned.version) == (stage, 2)
        assert assigned.item == f"checkpoint/2/{stage}"
    for peer in ("a0", "b0", "c1"):
        bench.ready(peer)
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.step().step == 3


def test_the_roll_back_is_durable_before_anybody_hears_of_it() -> None:
    bench = lost_stage()
    bench.join("c1", 1)
    commands = bench.tick(11.0)
    [at] = [i for i, c in enumerate(commands) if getattr(c, "record", None) is not None]
    told = [
        i
        for i, c in enumerate(commands)
        if isinstance(c, Send) and isinstance(c.message, AssignStage)
    ]
    assert told
    assert min(told) > at


def test_after_a_restart_peers_have_longer_to_come_back() -> None:
    bench = Bench.restarted(3, checkpoint=2)
    bench.attach("a0", stage=0, version=3)
    bench.attach("c1", wanted_stage=1)
    bench.say("c1", StageRequest(stage=StageIndex(1)))
    bench.tick(19.0)
    assert not bench.records(RolledBack)
    bench.tick(2.0)
    assert [r.version for r in bench.records(RolledBack)] == [2]


def test_a_mask_that_was_asked_before_a_roll_back_is_answered_after_it() -> None:
    bench = lost_stage()
    bench.join("c1", 1)
    bench.tick(9.8)
    bench.say("a0", MaskRequest(request=5, step=Step(4), microbatch=MicrobatchIndex(0)))
    assert bench.records(RolledBack, bench.tick(0.3))
    [mask] = bench.sent("a0", Mask, bench.tick(0.5))
    assert (mask.request, mask.accumulate) == (5, ())


def test_a_peer_that_comes_back_in_time_saves_the_run_from_going_back() -> None:
    bench = lost_stage()
    bench.tick(9.0)
    bench.attach("a1", stage=1, version=3)
    bench.tick(5.0)
    assert not bench.records(RolledBack)
    assert bench.run.phase is RunPhase.COLLECT


def test_the_words_of_an_assignment_that_was_taken_back_are_ignored() -> None:
    bench = lost_stage()
    bench.attach("c1", wanted_stage=1)
    bench.say("c1", StageRequest(stage=StageIndex(1)))
    bench.tick(11.0)
    assert bench.run.version == 2
    for stale in (
        Ready(stage=0, version=3, digest="d"),
        SyncFailed(stage=0, version=3, reason="?"),
        Applied(step=3, digest="d", norm=1.0),
    ):
        assert not bench.sent("a0", AssignStage, bench.say("a0", stale))
    assert bench.run.peers[PeerId("a0")].phase is PeerPhase.SYNCING


def test_after_a_roll_back_the_same_version_of_the_old_history_is_not_taken_for_the_new_one() -> (
    None
):
    bench = lost_stage()
    bench.lose("b0")
    bench.join("c1", 1)
    bench.tick(11.0)
    bench.ready("a0")
    bench.ready("c1")
    bench.one_step()
    assert bench.run.version == 3
    bench.attach("b0", stage=0, version=3)
    assert not bench.sent("b0", Welcome)[0].keep, "its version 3 is the one that was given up"
    bench.attach("a0", stage=0, version=3)
    assert bench.sent("a0", Welcome)[0].keep


@pytest.mark.parametrize(("stored", "overdue"), [(None, True), (49, True), (50, False)])
def test_a_coordinator_that_finds_no_recent_checkpoint_makes_one_at_once(
    stored: int | None, overdue: bool
) -> None:
    bench = Bench.restarted(53, checkpoint=stored, checkpoint_steps=3, steps=99)
    for name, stage in (("a0", 0), ("b0", 1)):
        bench.attach(name, stage=stage, version=53)
    bench.tick()
    assert bool([c for c in bench.log if isinstance(c, Send) and isinstance(
        c.message, SaveSnapshot
    )]) == overdue  # fmt: skip
    if overdue:
        assert bench.run.checkpoint_overdue
        bench.checkpoint()
        assert not bench.run.checkpoint_overdue


def test_a_restart_does_not_forget_which_history_was_given_up() -> None:
    last = Bench.applied_step(3, attempt=7)
    bench = Bench(
        Restored(2, Version(3), last, None, False, None, True, frozenset({PeerId("a0")}))
    )  # fmt: skip
    bench.attach("b0", stage=1, version=3)
    assert not bench.sent("b0", Welcome)[0].keep, "it did not count in a step since the roll-back"
    bench.attach("a0", stage=0, version=3)
    assert bench.sent("a0", Welcome)[0].keep


def test_a_stage_that_nobody_holds_gets_a_peer_from_the_stage_that_can_spare_one() -> None:
    bench = Bench(checkpoint_steps=100)
    for name in ("x", "y", "z"):
        bench.attach(name)
        bench.say(name, StageRequest(stage=StageIndex(0)))
        bench.ready(name)
    assert [len(bench.run.ready_peers(s)) for s in (0, 1)] == [2, 1]
    bench.one_step()
    bench.lose("y")
    commands = bench.tick(11.0)
    [assigned] = bench.sent("z", AssignStage, commands)
    assert (assigned.stage, assigned.version) == (1, 0)
    assert [r.version for r in bench.records(RolledBack, commands)] == [0]
    bench.ready("x")
    bench.ready("z")
    assert bench.run.phase is RunPhase.COLLECT


def test_a_run_that_waits_for_a_lost_stage_says_so() -> None:
    bench = lost_stage()
    bench.tick(0.5)
    assert "stage 1" in str(status_of(bench.run, bench.now)["waiting_for"])
    bench.attach("a1", stage=1, version=3)
    bench.tick(0.5)
    assert status_of(bench.run, bench.now)["waiting_for"] == ""
    notes = [note.text for note in bench.commands(Note, bench.log)]
    assert "stage 1 has lost every peer: the run waits for somebody to hold it" in notes
    assert "stage 1 is held again" in notes


def test_what_the_other_stages_have_counted_is_not_counted_again_for_a_lost_stage() -> None:
    """At a version that is stored, a newcomer takes the stage and only its cells are open."""
    bench = Bench(checkpoint_steps=1, steps=9)
    bench.join_all("a0", "a1")
    bench.one_step()
    bench.checkpoint()
    bench.report("a0", 0, 1)
    bench.report("a1", 0)
    bench.lose("a1")
    for microbatch, lease in list(bench.step().leases.items()):
        bench.resolve(lease.trainer, microbatch, lease.lease, ok=False, reason="nobody is there")
    bench.join("b1", 1)
    commands = bench.tick(2.0)
    leased = {
        leased.microbatch: leased.accumulate
        for peer in ("a0", "b1")
        for lease in bench.sent(peer, Lease, commands)
        for leased in lease.microbatches
    }
    assert leased == {0: (1,), 1: (1,)}
    assert not bench.records(RolledBack)
    assert bench.step().step == 2
