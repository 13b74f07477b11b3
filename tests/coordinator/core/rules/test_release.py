"""What ends with a peer's part in the step, with its stage and with its membership."""

from __future__ import annotations

import pytest

from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.rules.roster import MAX_CHANGES_AT_ONCE
from swarm_coordinator.core.state.peers import PeerPhase, StageTransfer
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import AbortRound, MaskRequest, Roster

B0 = PeerId("b0")


def released(bench: Bench, ends: Release) -> None:
    release(bench.run, bench.run.peers[B0], ends, bench.now)


@pytest.mark.parametrize("ends", Release)
def test_with_anything_end_its_cells_its_leases_and_its_part_in_the_close(ends: Release) -> None:
    bench = joined("a0", "b0", "a1", "b1", microbatches=4, starting=2)
    bench.report("b0", 0, 1)
    bench.report("a0", 2)
    bench.run.roster.dirty = False
    driven = set(bench.step().leases.driven_by(B0))
    assert driven
    released(bench, ends)
    assert {cell.peer for cell in bench.step().table.values()} == {"a0"}
    assert not bench.step().leases.leased_to(B0)
    assert driven <= bench.step().unsettled
    assert bench.run.roster.dirty

    bench = joined("a0", "b0", "a1", "b1", starting=2)
    bench.fill()
    assert bench.run.phase is RunPhase.CLOSING
    released(bench, ends)
    assert bench.run.phase is RunPhase.COLLECT
    aborts = [c for c in bench.run.commands if isinstance(getattr(c, "message", None), AbortRound)]
    assert [abort.message.reason for abort in aborts] == [f"…b0 {ends}"]


def test_an_excluded_peer_keeps_its_stage_and_takes_no_part() -> None:
    bench = Bench.trained(1)
    released(bench, Release.STEP)
    peer = bench.run.peers[B0]
    assert (peer.stage, peer.phase) == (0, PeerPhase.READY)
    assert not bench.run.peers.holds_current(peer)


def test_a_peer_without_its_stage_has_no_state_no_transfer_and_no_receipts() -> None:
    bench = Bench.trained(1)
    peer = bench.run.peers[B0]
    peer.early_receipts[Step(3), MicrobatchIndex(0)] = bench.receipt("b0", 0)
    released(bench, Release.STAGE)
    assert (peer.stage, peer.phase, peer.version) == (None, PeerPhase.ADMITTED, 0)
    assert (peer.transfer, peer.early_receipts) == (None, {})


def test_a_peer_that_has_moved_takes_nothing_out_of_the_step_that_is_applied() -> None:
    """What it counted is in the average of its former stage, which stands."""
    bench = Bench.trained(1, names=("a0", "b0", "a1"))
    bench.run.peers.begin_transfer(bench.peer("b0"), StageTransfer(StageIndex(1), bench.now))
    bench.event_tick()
    bench.save("a1")
    bench.ready("b0")
    for peer, microbatches in (("a0", [0]), ("b0", [1]), ("a1", [0, 1])):
        bench.report(peer, *microbatches)
    bench.average_all()
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.peer("b0").stage == 1
    bench.lose("b0")
    assert bench.run.phase is RunPhase.APPLYING
    assert bench.step().table[1, 0].peer == "b0"
    assert bench.run.statistics.work.cleared == 0


def test_a_peer_that_is_gone_awaits_no_mask() -> None:
    bench = Bench.trained(1)
    for name in ("a0", "b0"):
        bench.send(name, MaskRequest(request=1, step=Step(2), microbatch=MicrobatchIndex(0)))
    released(bench, Release.MEMBERSHIP)
    assert [mask.peer for mask in bench.run.steps.masks] == ["a0"]
    assert B0 not in bench.run.peers


@pytest.mark.parametrize("ends", [Release.STAGE, Release.MEMBERSHIP])
def test_the_last_peer_of_a_stage_leaves_it_to_those_that_are_excluded(ends: Release) -> None:
    bench = Bench.trained(1)
    release(bench.run, bench.peer("a0"), Release.STEP, bench.now)
    bench.step().failure_counts[PeerId("a0")] = 3
    released(bench, ends)
    assert [peer.peer for peer in bench.run.peers.ready(0)] == ["a0"]
    assert not bench.step().failure_counts


def test_a_readmitted_peer_is_in_the_roster_at_once_although_the_other_one_flickers() -> None:
    """What changes again and again is published later, and would leave the stage without a peer."""
    bench = Bench.trained(1)
    release(bench.run, bench.peer("a0"), Release.STEP, bench.now)
    for _ in range(MAX_CHANGES_AT_ONCE):
        bench.pause("b0")
        bench.resume("b0")
    assert not bench.sent("a1", Roster, bench.pause("b0")), "its changes wait"
    (roster,) = bench.sent("a1", Roster, bench.lose("b0"))
    assert [record.peer for record in roster.peers if record.stage == 0] == ["a0"]


def test_a_peer_that_leaves_without_a_stage_is_no_reason_for_a_roster() -> None:
    bench = Bench.trained(1)
    bench.attach("x")
    assert not bench.sent("a0", Roster, bench.lose("x") + bench.tick(1.0))
    assert bench.sent("a0", Roster, bench.lose("b0"))
