"""SWARM's rule, as far as we compare with it."""

from __future__ import annotations

from benchmarks.simulator.swarm_rule import choose_swarm_moves
from kits.memory import offers, takes
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.scheduling.placement import MovePolicy, PeerLoad, StageLoad

STAGES = [StageLoad(StageIndex(i), 1.0, takes(10), 1) for i in range(3)]


def peers(*queues: tuple[int, ...], memory: int = 10) -> list[PeerLoad]:
    """The queues of each stage's peers."""
    return [
        PeerLoad(PeerId(f"{at}-{i}"), StageIndex(at), 1.0, offers(memory), 1.0, queued=queued)
        for at, stage in enumerate(queues)
        for i, queued in enumerate(stage)
    ]


def test_the_shortest_queue_of_the_least_loaded_stage_goes_to_the_most_loaded() -> None:
    (move,) = choose_swarm_moves(STAGES, peers((2, 1), (9, 8), (3, 3)), MovePolicy()).moves
    assert (move.peer, move.source, move.destination) == ("0-1", 0, 1)
    assert move.planned_rate == 1.0


def test_it_moves_even_where_nothing_is_gained() -> None:
    fleet = peers((2, 1), (3, 3), (3, 3))
    first = choose_swarm_moves(STAGES, fleet, MovePolicy(), resting={StageIndex(0)})
    (move,) = first.moves
    assert move.planned_rate < move.pipeline_rate


def test_it_empties_no_stage_and_leaves_equal_loads_alone() -> None:
    assert choose_swarm_moves(STAGES, peers((1,), (9,), (3,)), MovePolicy()).moves == ()
    assert choose_swarm_moves(STAGES, peers((3, 3), (6,), (2, 4)), MovePolicy()).moves == ()
    small = peers((1, 1), (9,), (3,), memory=9)
    assert choose_swarm_moves(STAGES, small, MovePolicy()).moves == ()
