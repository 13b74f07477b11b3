"""Downloads of a stage's state: wrong files, failures, and how long a close waits."""

from __future__ import annotations

from kits.swarm_world.event_bench import SHA, Bench, Commands
from swarm_coordinator.core.rules.state_transfer import MAX_CLOSE_DELAYS
from swarm_coordinator.core.state.peers import PeerPhase
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import AssignStage, Ready, SnapshotReady, SyncFailed

OTHER_STATE = Ready(stage=StageIndex(0), version=Version(1), digest="another")


def joining(*names: str) -> Bench:
    """c0 joins stage 0 at version 1, and the holders are asked for snapshots."""
    bench = Bench.trained(1, names=(*(names or ("a0", "b0")), "a1"))
    bench.request("c0", 0, wanted_stage=0)
    return bench


def sources(bench: Bench, commands: Commands) -> list[str]:
    [assigned] = bench.sent("c0", AssignStage, commands)
    return [str(holder.peer) for holder in assigned.holders]


def test_a_file_of_one_holder_that_is_not_the_stages_state_is_not_offered_again() -> None:
    """Nothing shows which end is at fault, so that both are flagged."""
    bench = joining()
    bench.save("a0")
    assert sources(bench, bench.tick(2.25)) == ["a0"]
    bench.send("c0", OTHER_STATE)
    assert sorted(bench.run.statistics.flags) == ["a0", "c0"]
    assert bench.peer("c0").phase is PeerPhase.SYNCING
    commands = bench.tick(1.5)
    assert not bench.sent("c0", AssignStage, commands)
    assert not bench.savers(commands), "b0 may still answer"
    assert sources(bench, bench.save("b0")) == ["b0"]
    bench.ready("c0")
    assert bench.peer("c0").phase is PeerPhase.READY


def test_a_file_that_all_devices_of_one_owner_announced_is_one_owners_file() -> None:
    bench = Bench()
    for device in ("a0", "b0"):
        bench.join(device, 0, owner=PeerId("owner"))
    bench.join("a1", 1)
    bench.one_step()
    bench.request("c0", 0, wanted_stage=0)
    bench.save("a0")
    assert sources(bench, bench.save("b0")) == ["a0", "b0"]
    bench.send("c0", OTHER_STATE)
    assert sorted(bench.run.statistics.flags) == ["a0", "b0", "c0"]
    assert bench.savers(bench.tick(1.5)) == ["a0", "b0"], "there are no others"


def test_a_file_that_several_owners_announced_is_the_stages_state_whatever_a_peer_loads() -> None:
    bench = joining()
    bench.save("a0")
    assert sources(bench, bench.save("b0")) == ["a0", "b0"]
    bench.send("c0", OTHER_STATE)
    assert list(bench.run.statistics.flags) == ["c0"]
    assert sources(bench, bench.tick(1.5)) == ["a0", "b0"]


def test_a_source_that_has_left_is_not_flagged_for_what_a_peer_says_to_have_loaded() -> None:
    bench = joining()
    bench.save("a0")
    assert sources(bench, bench.tick(2.25)) == ["a0"]
    bench.lose("a0")
    bench.send("c0", OTHER_STATE)
    assert list(bench.run.statistics.flags) == ["c0"]


def test_a_holder_whose_snapshot_has_a_wrong_size_is_not_asked_again_at_once() -> None:
    """It would answer at once as well, again and again."""
    bench = joining("a0")
    size = bench.state_bytes(0) - 1
    saved = SnapshotReady(
        version=Version(1), stage=StageIndex(0), item="item-0", bytes=size, sha256=SHA
    )
    assert not bench.savers(bench.send("a0", saved))
    assert list(bench.run.statistics.flags) == ["a0"]
    assert not bench.savers(bench.tick(14.0))
    assert bench.savers(bench.tick(2.0)) == ["a0"]


def test_a_download_that_fails_does_not_make_the_close_wait_longer() -> None:
    bench = joining()
    for holder in ("a0", "b0"):
        bench.save(holder)
    bench.tick(4.0)
    bench.send("c0", SyncFailed(stage=StageIndex(0), version=Version(1), reason="it broke"))
    bench.fill()
    assert bench.run.phase is RunPhase.COLLECT
    bench.tick(bench.manifest.limits.join_hold_seconds - 3.75)
    assert bench.run.phase is RunPhase.CLOSING


def test_a_few_closes_wait_for_a_download_that_starts_over_with_each_step() -> None:
    bench = joining()
    waits: list[bool] = []
    for _ in range(MAX_CLOSE_DELAYS + 1):
        for holder in ("a0", "b0"):
            bench.save(holder)
        bench.fill()
        waits.append(bench.run.phase is RunPhase.COLLECT)
        bench.tick(bench.manifest.limits.join_hold_seconds + 0.5)
        bench.average_all()
        bench.apply_all()
    assert waits == [True] * MAX_CLOSE_DELAYS + [False]
