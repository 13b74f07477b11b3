"""Which peer is moved to a stage that no peer holds, or that has too few to begin."""

from __future__ import annotations

from typing import Any

import pytest

from kits.memory import offers
from kits.swarm_world.event_bench import Bench
from swarm_coordinator.core.events import RolledBack
from swarm_coordinator.core.state.peers import PeerPhase


def holding(version: int, *names: str, **options: Any) -> Bench:
    """A restarted run whose peers of these names, a letter and the stage, are back."""
    bench = Bench.restarted(version, **options)
    for name in names:
        bench.attach(name, stage=int(name[1:]), version=version)
    return bench


def stages_of(bench: Bench) -> dict[str, int | None]:
    return {peer.peer: peer.stage for peer in bench.run.peers.values()}


def test_a_peer_that_still_downloads_is_moved_before_one_of_several_holders() -> None:
    bench = holding(3, "y0", "z0", "a1", "b1", "c1", checkpoint=2)
    bench.request("x0", 0)
    assert bench.peer("x0").stage == 0
    for peer in ("a1", "b1", "c1"):
        bench.lose(peer)
    bench.tick(25.0)
    assert stages_of(bench) == {"y0": 0, "z0": 0, "x0": 1}


def test_the_last_holder_of_a_stage_is_not_moved_even_if_no_other_peer_can_be() -> None:
    bench = holding(3, "z0", "a1", checkpoint=2)
    bench.request("y0", 0, wanted_stage=0)
    bench.lose("a1")
    bench.tick(25.0)
    assert stages_of(bench) == {"z0": 0, "y0": 0}
    assert bench.peer("z0").phase is PeerPhase.READY


def test_a_peer_that_is_about_to_apply_the_last_step_is_the_holder_that_is_not_moved() -> None:
    bench = holding(3, "b0", checkpoint=3)
    bench.request("a1", 1)
    bench.tick(12.0)
    bench.attach("z1", stage=1, version=2, averaged_attempt=7)
    bench.lose("b0")
    bench.tick(11.0)
    assert stages_of(bench) == {"a1": 0, "z1": 1}
    transfer = bench.peer("z1").transfer
    assert transfer is not None
    assert transfer.missed_apply == 3
    assert not bench.records(RolledBack)


@pytest.mark.parametrize("stays", [{"wanted_stage": 0}, {"memory": offers(99)}], ids=str)
def test_a_peer_that_chose_its_stage_or_is_too_small_for_the_other_stays(
    stays: dict[str, Any],
) -> None:
    bench = holding(3, "y0", "a1", checkpoint=2)
    bench.attach("z0", stage=0, version=3, **stays)
    bench.lose("a1")
    bench.tick(25.0)
    assert stages_of(bench) == {"y0": 1, "z0": 0}


def test_before_training_the_stage_with_the_most_peers_gives_one_up() -> None:
    names = ("a0", "b0", "c0", "d0", "x1", "y1", "z1", "a2")
    bench = holding(0, *names, starting=4, stages=3)
    limits = bench.run.manifest.limits.model_copy(update={"starting_peers_per_stage": 2})
    bench.run.manifest = bench.run.manifest.model_copy(update={"limits": limits})
    bench.event_tick()
    assert stages_of(bench) == {name: int(name[1:]) for name in names} | {"d0": 2}
