"""A stage that has lost every holder: its new holder, and the version to continue from."""

from __future__ import annotations

from typing import Any

import pytest

from kits.memory import offers
from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.events import Note, Restored, RolledBack, Send
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    Applied,
    Apply,
    AssignStage,
    Mask,
    MaskRequest,
    Ready,
    Roster,
    RoundReport,
    SaveSnapshot,
    SyncFailed,
    Welcome,
)


def lost_stage() -> Bench:
    """Version 3, checkpoint at 2, and no peer left at stage 1."""
    bench = joined("a0", "b0", "a1", checkpoint_steps=2, steps=9)
    bench.one_step()
    bench.one_step()
    bench.checkpoint()
    bench.one_step()
    assert bench.run.history.version == 3
    assert bench.run.checkpoints.stored == Bench.checkpoint_of(2, 2)
    bench.lose("a1")
    return bench


def test_a_lost_stage_is_waited_for_before_the_run_goes_back_to_its_checkpoint() -> None:
    bench = lost_stage()
    bench.request("c1", 1, wanted_stage=1)
    bench.tick(9.0)
    assert not bench.records(RolledBack)
    commands = bench.tick(2.0)
    assert bench.roll_backs(commands) == [2]
    for peer, stage in (("a0", 0), ("b0", 0), ("c1", 1)):
        [assigned] = bench.sent(peer, AssignStage, commands)
        assert (assigned.stage, assigned.version) == (stage, 2)
        assert assigned.item == f"checkpoint/2/{stage}"
    for peer in ("a0", "b0", "c1"):
        bench.ready(peer)
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.step().step == 3


def test_the_roll_back_is_durable_before_any_peer_receives_it() -> None:
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
    bench.request("c1", 1, wanted_stage=1)
    bench.tick(19.0)
    assert not bench.records(RolledBack)
    bench.tick(2.0)
    assert bench.roll_backs() == [2]


def test_digests_are_those_of_the_history_that_counts_after_a_roll_back_and_a_restart() -> None:
    bench = lost_stage()
    bench.join("c1", 1)
    assert bench.roll_backs(bench.tick(11.0)) == [2]
    bench.restart()
    bench.run.history.members.add(PeerId("a0"))
    bench.attach("a0", stage=0, version=2, digest="of the checkpoint")
    assert bench.sent("a0", Welcome)[0].keep


def test_a_stage_of_which_only_the_checkpoint_is_left_is_what_the_checkpoint_says() -> None:
    """Holders that were in the majority have reported a digest that their file does not have."""
    bench = joined("a0", "a1", "b1", checkpoint_steps=1, steps=9)
    bench.one_step()
    bench.checkpoint()
    bench.restart()
    bench.attach("a0", stage=0, version=1)
    bench.request("c1", 1, wanted_stage=1)
    bench.tick(5.0)
    loaded = Ready(stage=StageIndex(1), version=Version(1), digest="of the file")
    bench.send("c1", loaded)
    assert bench.peer("c1").phase is PeerPhase.SYNCING
    bench.tick(20.0)
    bench.send("c1", loaded)
    assert bench.run.phase is RunPhase.COLLECT


def test_a_mask_that_was_asked_before_a_roll_back_is_answered_after_it() -> None:
    bench = lost_stage()
    bench.join("c1", 1)
    bench.tick(9.8)
    bench.send("a0", MaskRequest(request=5, step=Step(4), microbatch=MicrobatchIndex(0)))
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


def test_answers_to_a_withdrawn_assignment_are_ignored() -> None:
    bench = lost_stage()
    bench.request("c1", 1, wanted_stage=1)
    bench.tick(11.0)
    assert bench.run.history.version == 2
    for stale in (
        Ready(stage=0, version=3, digest="d"),
        SyncFailed(stage=0, version=3, reason="?"),
        Applied(step=3, digest="d", norm=1.0),
    ):
        assert not bench.sent("a0", AssignStage, bench.send("a0", stale))
    assert bench.peer("a0").phase is PeerPhase.SYNCING


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
    assert bench.run.history.version == 3
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
        assert bench.run.checkpoints.overdue
        bench.checkpoint()
        assert not bench.run.checkpoints.overdue


def test_a_restart_keeps_track_of_the_abandoned_history() -> None:
    last = Bench.applied_step(3, attempt=7)
    bench = Bench(
        Restored(2, Version(3), last, None, False, None, True, frozenset({PeerId("a0")}))
    )  # fmt: skip
    bench.attach("b0", stage=1, version=3)
    assert not bench.sent("b0", Welcome)[0].keep, "it did not count in a step since the roll-back"
    bench.attach("a0", stage=0, version=3)
    assert bench.sent("a0", Welcome)[0].keep


def test_a_peer_that_applies_the_step_that_it_missed_is_of_the_history_and_in_the_roster() -> None:
    last = Bench.applied_step(3, attempt=7)
    bench = Bench(
        Restored(2, Version(3), last, None, False, None, True, frozenset({PeerId("a0")}))
    )  # fmt: skip
    bench.attach("a0", stage=0, version=3)
    bench.attach("b0", stage=1, version=2, averaged_attempt=7)
    commands = bench.send("b0", Applied(step=Step(3), digest="d", norm=1.0))
    [roster] = bench.sent("a0", Roster, commands)
    assert [record.peer for record in roster.peers] == ["a0", "b0"]
    bench.attach("b0", stage=1, version=3)
    assert bench.sent("b0", Welcome)[0].keep


def test_a_stage_without_a_holder_gets_a_peer_from_the_stage_that_can_spare_one() -> None:
    bench = Bench(checkpoint_steps=100)
    for name in ("x", "y", "z"):
        bench.request(name, 0)
        bench.ready(name)
    assert [len(bench.run.peers.ready(s)) for s in (0, 1)] == [2, 1]
    bench.one_step()
    bench.lose("y")
    commands = bench.tick(11.0)
    [assigned] = bench.sent("z", AssignStage, commands)
    assert (assigned.stage, assigned.version) == (1, 0)
    assert bench.roll_backs(commands) == [0]
    bench.ready("x")
    bench.ready("z")
    assert bench.run.phase is RunPhase.COLLECT


def stages_of(bench: Bench) -> dict[str, int | None]:
    return {peer.peer: peer.stage for peer in bench.run.peers.values()}


def newcomer(bench: Bench, name: str, **hello: Any) -> None:
    bench.request(name, 0, **hello)


def test_two_peers_that_download_one_lost_stage_are_spread_over_both_lost_stages() -> None:
    bench = joined("a0", "a1")
    bench.one_step()
    bench.lose("a0")
    newcomer(bench, "x")
    newcomer(bench, "y")
    assert stages_of(bench) == {"a1": 1, "x": 0, "y": 0}
    bench.lose("a1")
    commands = bench.tick(11.0)
    assert stages_of(bench) == {"x": 0, "y": 1}
    assert bench.roll_backs(commands) == [0]
    bench.ready("x")
    bench.ready("y")
    assert bench.run.phase is RunPhase.COLLECT


@pytest.mark.parametrize("stored", [False, True])
def test_a_peer_that_downloads_goes_to_an_empty_stage_before_the_last_holder_does(
    stored: bool,
) -> None:
    bench = Bench(checkpoint_steps=1 if stored else 100)
    newcomer(bench, "z")
    bench.ready("z")
    bench.join("a1", 1)
    bench.one_step()
    if stored:
        bench.checkpoint()
    newcomer(bench, "y")
    assert stages_of(bench) == {"z": 0, "a1": 1, "y": 0}
    bench.lose("a1")
    commands = bench.tick(11.0)
    assert stages_of(bench) == {"z": 0, "y": 1}
    assert bool(bench.records(RolledBack, commands)) != stored
    assert (bench.peer("z").phase is PeerPhase.READY) is stored


def test_an_excluded_peer_takes_a_stage_without_a_holder() -> None:
    bench = Bench(microbatches=1)
    newcomer(bench, "x")
    bench.ready("x")
    bench.join("a1", 1)
    newcomer(bench, "y")
    bench.ready("y")
    assert stages_of(bench) == {"x": 0, "a1": 1, "y": 0}
    bench.fill()
    for _ in range(2):
        bench.tick(6.0)
        bench.failed("x", culprit=PeerId("y"))
    assert bench.run.peers.excluded == {"y"}
    bench.lose("a1")
    bench.tick(11.0)
    assert stages_of(bench) == {"x": 0, "y": 1}
    bench.ready("y")
    assert not bench.run.peers.unheld()


def test_a_peer_that_chose_its_stage_or_pauses_or_leaves_is_not_moved() -> None:
    bench = joined("a0", "b0", "a1")
    bench.one_step()
    newcomer(bench, "x")
    bench.pause("x")
    assert stages_of(bench)["x"] == 1
    bench.lose("a0")
    bench.lose("b0")
    bench.lose("a1")
    newcomer(bench, "small", memory=offers(99))
    bench.tick(30.0)
    assert stages_of(bench) == {"x": 1}
    newcomer(bench, "y")
    bench.tick(1.0)
    assert stages_of(bench) == {"x": 1, "y": 0}


def lost_and_back() -> Bench:
    """Version 3 after a restart; stage 1 overdue, and its peer returned with step 3 averaged."""
    bench = Bench.restarted(3, checkpoint=2)
    bench.attach("a0", stage=0, version=3)
    bench.tick(30.0)
    commands = bench.attach("a1", stage=1, version=2, averaged_attempt=7)
    assert bench.sent("a1", Apply, commands)
    return bench


def test_a_peer_that_is_back_with_the_last_step_averaged_saves_the_run_from_going_back() -> None:
    bench = lost_and_back()
    bench.tick(5.0)
    assert not bench.records(RolledBack)
    bench.send("a1", Applied(step=Step(3), digest="d", norm=1.0))
    bench.tick(1.0)
    assert bench.run.phase is RunPhase.COLLECT
    assert (bench.run.history.version, bench.records(RolledBack)) == (3, [])


def test_a_peer_that_never_applies_the_step_that_it_missed_is_synced_anew() -> None:
    bench = lost_and_back()
    seconds = bench.manifest.limits.lease_seconds
    bench.tick(seconds - 1.0)
    assert not bench.records(RolledBack)
    commands = bench.tick(2.0)
    assert bench.roll_backs(commands) == [2]
    assert {m.version for m in bench.sent("a1", AssignStage, commands)} == {2}
    bench.ready("a0")
    bench.ready("a1")
    assert bench.run.phase is RunPhase.COLLECT


def test_a_peer_that_cannot_apply_the_step_that_it_missed_is_synced_anew_at_once() -> None:
    bench = lost_and_back()
    report = RoundReport(step=Step(3), attempt=7, ok=False, reset=True, reason="no memory")
    commands = bench.send("a1", report)
    assert bench.roll_backs(commands) == [2]
    assert bench.sent("a1", AssignStage, commands)
    assert "could not apply step 3" in bench.run.statistics.flags[PeerId("a1")].reason


def missed_the_step_before_the_last() -> Bench:
    """Step 4 was applied without b1, which is back and has yet to apply step 3."""
    bench = Bench.restarted(3, checkpoint=2, checkpoint_steps=1)
    bench.attach("a0", stage=0, version=3)
    bench.attach("a1", stage=1, version=3)
    bench.attach("b1", stage=1, version=2, averaged_attempt=7)
    bench.checkpoint()
    bench.fill()
    bench.tick(bench.manifest.limits.join_hold_seconds)
    bench.average_all()
    bench.apply_all()
    bench.checkpoint()
    return bench


def test_a_peer_that_never_applies_a_missed_step_does_not_keep_a_stage_from_recovery() -> None:
    """Its stage goes on without it, and is then left with only this peer."""
    bench = missed_the_step_before_the_last()
    assert (bench.run.history.version, bench.run.peers.syncing[PeerId("b1")].missed_apply) == (4, 3)
    bench.lose("a1")
    commands = bench.tick(bench.manifest.limits.lease_seconds + 1.0)
    [assigned] = bench.sent("b1", AssignStage, commands)
    assert (assigned.stage, assigned.version) == (1, 4)
    bench.ready("b1")
    assert not bench.run.peers.unheld()


def test_a_peer_that_applies_a_missed_step_late_downloads_the_step_since_when_it_has() -> None:
    bench = missed_the_step_before_the_last()
    assert not bench.sent("b1", AssignStage, bench.log)
    bench.send("b1", Applied(step=Step(3), digest="d", norm=1.0))
    [assigned] = bench.sent("b1", AssignStage, bench.event_tick())
    assert (assigned.stage, assigned.version) == (1, 4)
    bench.ready("b1")
    assert bench.peer("b1").phase is PeerPhase.READY


def test_a_run_that_waits_for_a_lost_stage_reports_it() -> None:
    bench = lost_stage()
    bench.tick(0.5)
    assert bench.status().waiting_for == "a peer to hold stage 1, which has lost every peer"
    bench.attach("a1", stage=1, version=3)
    bench.tick(0.5)
    assert bench.status().waiting_for == ""
    notes = [note.text for note in bench.commands(Note, bench.log)]
    assert "stage 1 has lost every peer: the run waits for a peer to hold it" in notes
    assert "stage 1 is held again" in notes


def test_what_the_other_stages_have_counted_is_not_counted_again_for_a_lost_stage() -> None:
    """At a stored version, a joining peer takes the stage and only its cells are open."""
    bench = joined("a0", "a1", checkpoint_steps=1, steps=9)
    bench.one_step()
    bench.checkpoint()
    bench.report("a0", 0, 1)
    bench.report("a1", 0)
    bench.lose("a1")
    for microbatch, lease in list(bench.step().leases.items()):
        bench.resolve(lease.trainer, microbatch, lease.lease, ok=False, reason="nobody is there")
    bench.join("b1", 1)
    commands = bench.tick(2.0)
    leased = {found.microbatch: found.accumulate for _, found in bench.leased(commands)}
    assert leased == {0: (1,), 1: (1,)}
    assert not bench.records(RolledBack)
    assert bench.step().step == 2
