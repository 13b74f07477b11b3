"""Leaving volunteers: they are released soon, and nothing is lost with them."""

from __future__ import annotations

from kits.swarm_world.event_bench import Bench
from swarm_coordinator.core.events import (
    CheckpointFailed,
    CloseSession,
    Command,
    ReceiptsVerified,
)
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import PeerId, StageIndex, Step, Version
from swarm_shared.protocol import (
    AssignStage,
    Goodbye,
    Lease,
    Leaving,
    Roster,
    StageRequest,
)

ALL = ("a0", "b0", "a1", "b1")


def leave(bench: Bench, peer: str) -> list[Command]:
    return bench.send(peer, Leaving())


def test_a_leaver_that_holds_nothing_of_the_step_goes_at_once() -> None:
    bench = Bench.trained(1)
    bench.resolve_all()
    commands = leave(bench, "b0")
    assert bench.sent("b0", Goodbye, commands)
    assert [c.peer for c in bench.commands(CloseSession, commands)] == ["b0"]


def test_a_leaver_without_a_stage_goes_at_once() -> None:
    bench = Bench.trained(1)
    bench.attach("new")
    assert bench.sent("new", Goodbye, leave(bench, "new"))


def test_a_leaver_gets_no_stage_any_more() -> None:
    bench = Bench.trained(1)
    bench.fill()
    bench.attach("new")
    leave(bench, "new")
    assert PeerId("new") in bench.run.peers, "nobody goes in the middle of a close"
    commands = bench.send("new", StageRequest(stage=StageIndex(0)))
    assert not bench.sent("new", AssignStage, commands)
    assert bench.peer("new").stage is None


def test_a_leaver_that_holds_part_of_the_step_stays_for_its_end_and_gets_no_more_work() -> None:
    bench = Bench.trained(1)
    bench.resolve_all()
    bench.report("b0", 0)
    commands = leave(bench, "b0")
    assert not bench.sent("b0", Goodbye, commands)
    [roster] = bench.sent("a0", Roster, commands)
    assert [p.peer for p in roster.peers if not p.accepts_work] == ["b0"]
    bench.report("a0", 1)
    bench.report("a1", 0, 1)
    assert PeerId("b0") in bench.closing()
    bench.average_all()
    commands = bench.apply_all()
    assert bench.sent("b0", Goodbye, commands)
    assert not bench.sent("b0", Lease, commands)


def test_the_last_peer_of_a_stage_keeps_working_and_leaves_a_checkpoint_behind() -> None:
    bench = Bench.trained(1, names=("a0", "a1"))
    bench.resolve_all()
    commands = leave(bench, "a1")
    assert not bench.sent("a1", Goodbye, commands)
    assert not bench.savers(commands), "the step ends first"
    assert all(p.accepts_work for p in bench.sent("a0", Roster, commands)[0].peers)
    commands = bench.one_step()
    assert bench.savers(commands) == ["a0", "a1"]
    assert bench.run.phase is RunPhase.WAITING, "no step begins that the leaver is needed for"
    assert not bench.sent("a1", Goodbye, commands)
    commands = bench.checkpoint()
    assert bench.sent("a1", Goodbye, commands)
    commands = bench.request("c1", 1, wanted_stage=1)
    assert bench.sent("c1", AssignStage, commands)[0].item == "checkpoint/2/1"


def test_the_last_peer_of_a_stage_leaves_between_steps_although_the_next_one_has_begun() -> None:
    """Under staleness; it has counted nothing of the next step."""
    bench = Bench.trained(1, names=("a0", "a1"), staleness=1)
    bench.event_tick()
    leave(bench, "a1")
    for step in bench.run.steps.open():
        for microbatch, lease in list(step.leases.items()):
            if lease.trainer == "a1":
                bench.resolve("a1", microbatch, lease.lease, step=step.step, ok=False)
    commands = bench.one_step()
    assert bench.run.steps.ahead is not None
    assert bench.savers(commands) == ["a0", "a1"]
    assert bench.sent("a1", Goodbye, bench.checkpoint())


def test_no_step_begins_ahead_that_would_keep_the_last_peer_of_a_stage() -> None:
    """It counts in every step that is in progress, and would never hold nothing of one."""
    bench = Bench.trained(1, names=("a0", "a1"), staleness=1)
    bench.event_tick()
    assert bench.run.steps.ahead is not None
    leave(bench, "a1")
    ahead = tuple(bench.receipt("a1", microbatch, step=Step(3)) for microbatch in range(2))
    bench.event(ReceiptsVerified(bench.session("a1"), PeerId("a1"), ahead))
    bench.one_step()
    bench.event_tick()
    assert bench.run.steps.ahead is None
    bench.resolve_all()
    assert bench.savers(bench.one_step()) == ["a0", "a1"]
    assert bench.sent("a1", Goodbye, bench.checkpoint())


def test_when_both_peers_of_a_stage_leave_they_leave_a_checkpoint_behind() -> None:
    bench = Bench.trained(1, names=("a0", "b0", "a1"))
    bench.resolve_all()
    bench.report("a0", 0)
    bench.report("b0", 1)
    leave(bench, "a0")
    leave(bench, "b0")
    commands = bench.one_step()
    assert bench.savers(commands)
    commands = bench.checkpoint()
    assert bench.sent("a0", Goodbye, commands)
    assert bench.sent("b0", Goodbye, commands)


def test_when_all_peers_leave_all_are_released_and_the_version_is_stored() -> None:
    bench = Bench.trained(1)
    bench.report("a0", 0)
    for peer in ALL:
        leave(bench, peer)
    assert bench.run.checkpoints.pending is not None, "nobody is left to drive the step to its end"
    bench.checkpoint()
    assert all(bench.sent(peer, Goodbye, bench.log) for peer in ALL)
    assert bench.run.checkpoints.stored == Bench.checkpoint_of(2, 1)


def test_a_leaver_is_not_kept_by_a_checkpoint_that_cannot_be_had() -> None:
    bench = Bench.trained(1, names=("a0", "a1"))
    bench.lose("a1")
    assert not bench.sent("a0", Goodbye, leave(bench, "a0"))
    assert bench.sent("a0", Goodbye, bench.tick(11.0))


def test_a_leaver_is_not_kept_by_a_disk_that_is_full() -> None:
    bench = Bench.trained(1)
    for peer in ALL:
        leave(bench, peer)
    for _ in range(3):
        assert bench.run.peers
        bench.event(CheckpointFailed(Version(1), "the disk is full"))
        bench.tick(6.0)
    assert all(bench.sent(peer, Goodbye, bench.log) for peer in ALL)


def test_a_leaver_is_not_kept_by_a_step_that_does_not_end() -> None:
    bench = Bench.trained(1)
    bench.report("b0", 0)
    leave(bench, "b0")
    assert not bench.sent("b0", Goodbye, bench.tick(119.0))
    assert bench.sent("b0", Goodbye, bench.tick(3.0))
    assert (0, 0) not in bench.step().table
