"""The start of training, and its continuation after a restart of the coordinator."""

from __future__ import annotations

from kits.memory import offers, takes
from kits.swarm_world.event_bench import Bench, joined
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.protocol import AssignStage


def waiting_for(bench: Bench) -> str:
    return str(bench.status().waiting_for)


def test_training_begins_when_every_stage_has_as_many_peers_as_the_organiser_wants() -> None:
    bench = Bench(starting=2)
    bench.join("a0", 0)
    assert waiting_for(bench) == "stages 0 and 1 each need 2 peers"
    bench.join_all("a1", "b0")
    bench.tick(100.0)
    assert bench.run.phase is RunPhase.WAITING
    assert waiting_for(bench) == "stage 1 needs 2 peers"
    bench.join("b1", 1)
    assert bench.run.phase is RunPhase.COLLECT


def test_a_run_that_has_begun_goes_on_with_one_peer_a_stage() -> None:
    bench = joined("a0", "a1", "b0", "b1", starting=2)
    bench.one_step()
    bench.lose("b1")
    bench.tick(1.0)
    assert bench.run.phase is RunPhase.COLLECT


def test_after_a_restart_earlier_peers_are_waited_for_for_a_bounded_time() -> None:
    bench = Bench.restarted(3, starting=2)
    for peer, stage in (("a0", 0), ("b0", 0), ("c0", 0), ("a1", 1)):
        bench.attach(peer, stage=stage, version=3)
    bench.tick(4.0)
    assert bench.run.phase is RunPhase.WAITING
    assert waiting_for(bench) == "stage 1 needs 2 peers; it goes on with fewer in 6 s"
    bench.tick(7.0)
    assert bench.run.phase is RunPhase.COLLECT
    assert bench.step().step == 4


def test_after_a_restart_a_run_goes_on_at_once_when_all_are_back() -> None:
    bench = Bench.restarted(3, starting=2)
    for peer, stage in (("a0", 0), ("b0", 0), ("a1", 1), ("b1", 1)):
        bench.attach(peer, stage=stage, version=3)
    assert bench.run.phase is RunPhase.COLLECT


def test_a_surplus_peer_moves_to_a_stage_that_lacks_one_before_training_begins() -> None:
    bench = Bench.restarted(0, starting=2)
    bench.attach("a1", stage=1, version=0)
    bench.attach("a0", stage=0, version=0)
    bench.join("c0", 0)
    # It held this stage before the restart; another peer has taken its place since.
    bench.attach("b0", stage=0, version=0)
    [moved] = [p for p in ("a0", "b0", "c0") if bench.sent(p, AssignStage)]
    assert [a.stage for a in bench.sent(moved, AssignStage)] == [1]
    assert bench.run.phase is RunPhase.WAITING
    bench.ready(moved)
    assert bench.run.phase is RunPhase.COLLECT


def test_a_peer_that_chose_its_stage_or_does_not_fit_or_is_needed_is_not_moved() -> None:
    bench = Bench.restarted(0, starting=2)
    bench.attach("a1", stage=1, version=0)
    bench.attach("a0", stage=0, version=0, wanted_stage=0)
    bench.attach("b0", stage=0, version=0, memory=offers(50))
    bench.attach("c0", stage=0, version=0, wanted_stage=0)
    bench.tick(30.0)
    assert waiting_for(bench) == "stage 1 needs 2 peers"
    stages = [bench.peer(p).stage for p in ("a0", "b0", "c0", "a1")]
    assert stages == [0, 0, 0, 1]


def test_a_stage_that_no_spare_peer_fits_does_not_keep_one_from_another_stage() -> None:
    bench = Bench.restarted(0, starting=1, stages=3)
    heavy = bench.run.manifest.stages[1].model_copy(update={"memory": takes(10_000)})
    stages = (bench.run.manifest.stages[0], heavy, bench.run.manifest.stages[2])
    bench.run.manifest = bench.run.manifest.model_copy(
        update={
            "stages": stages,
            "limits": bench.run.manifest.limits.model_copy(update={"starting_peers_per_stage": 2}),
        }
    )
    for peer in ("a0", "b0", "c0"):
        bench.attach(peer, stage=0, version=0)
    bench.tick(1.0)
    found = sorted(str(bench.peer(p).stage) for p in ("a0", "b0", "c0"))
    assert found == ["0", "0", "2"]


def test_no_peer_is_moved_while_another_one_downloads_the_stage_that_lacks_one() -> None:
    bench = Bench.restarted(0, starting=2)
    bench.attach("a1", stage=1, version=0)
    bench.request("n1", 1, wanted_stage=1)
    for peer in ("a0", "b0", "c0"):
        bench.attach(peer, stage=0, version=0)
    assert [bench.peer(p).stage for p in ("a0", "b0", "c0")] == [0, 0, 0]
    bench.ready("n1")
    assert bench.run.phase is RunPhase.COLLECT
