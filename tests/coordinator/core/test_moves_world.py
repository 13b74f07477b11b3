"""Peers that are moved between stages all the time, under every fault: each counts once still."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from kits.swarm_world.checks import check_end
from kits.swarm_world.facts import FAULTS, Fault, Options
from kits.swarm_world.world import World
from swarm_coordinator.core.rules import roster
from swarm_coordinator.core.state.moves import RebalancingRule

CALM_SECONDS = 700.0

options_strategy = st.builds(
    Options,
    stages=st.sampled_from([2, 2, 3]),
    peers=st.sampled_from([4, 6, 8]),
    microbatches=st.sampled_from([3, 6]),
    steps=st.sampled_from([4, 6]),
    checkpoint_steps=st.sampled_from([2, 3, 10]),
    tied=st.booleans(),
    moves=st.sampled_from([RebalancingRule.THROUGHPUT, RebalancingRule.SWARM]),
    staleness=st.sampled_from([0, 1]),
)
faults_strategy = st.lists(
    st.builds(
        Fault,
        wait=st.floats(0.0, 4.0),
        kind=st.sampled_from(FAULTS),
        target=st.integers(0, 12),
        seconds=st.sampled_from([0.3, 1.0, 3.0, 7.0, 15.0, 60.0]),
    ),
    max_size=14,
).map(tuple)


def run_to_the_end(options: Options, seed: int, faults: tuple[Fault, ...] = ()) -> World:
    world = World(options, seed, faults)
    world.later(world.calm_at + 1.0, world.calm)
    world.run(world.calm_at + CALM_SECONDS)
    check_end(world)
    return world


@settings(
    deadline=None, max_examples=80, suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate], print_blob=True,
)  # fmt: skip
@given(options_strategy, st.integers(0, 2**32), faults_strategy)
def test_whoever_is_moved_when_every_microbatch_counts_once_and_the_run_ends(
    options: Options, seed: int, faults: tuple[Fault, ...]
) -> None:
    run_to_the_end(options, seed, faults)


def test_a_newcomer_is_given_one_stage_while_a_mover_is_on_its_way_to_a_lost_one() -> None:
    options = Options(
        stages=3, microbatches=6, steps=4, checkpoint_steps=3, moves=RebalancingRule.THROUGHPUT
    )
    faults = (
        Fault(1.65, "stick", 3, 0.3),
        Fault(3.07, "kill", 6, 15.0),
        Fault(13.02, "revoke", 2, 60.0),
        Fault(2.37, "small", 8, 15.0),
    )
    run_to_the_end(options, 505329034, faults)


@pytest.mark.parametrize(
    ("seed", "fault"),
    [(1371, Fault(3.4, "wedge", 1, 60.0)), (8944, Fault(1.5, "block", 1, 15.0))],
)
def test_two_peers_that_average_alone_change_places(seed: int, fault: Fault) -> None:
    """Both stages of the exchange average in the same close and have the same members."""
    options = Options(
        peers=3, microbatches=6, steps=4, evaluation=0, checkpoint_steps=10,
        moves=RebalancingRule.THROUGHPUT,
    )  # fmt: skip
    run_to_the_end(options, seed, (fault,))


def test_moves_come_about_and_leave_the_losses_as_they_were() -> None:
    made = 0
    still = Options(steps=8, peers=6, stages=3, microbatches=6)
    moved = Options(steps=8, peers=6, stages=3, microbatches=6, moves=RebalancingRule.THROUGHPUT)
    for seed in range(4):
        quiet, busy = run_to_the_end(still, seed), run_to_the_end(moved, seed)
        made += sum("goes over from stage" in note for note in busy.notes)
        assert [s.loss for s in quiet.store.applied.values()] == pytest.approx(
            [s.loss for s in busy.store.applied.values()], rel=1e-12
        )
    assert made > 0


def test_changes_of_the_roster_tell_members_what_whole_rosters_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a large run; every world checks what each peer knows when it is served."""
    monkeypatch.setattr(roster, "SMALL_RUN_PEERS", 0)
    monkeypatch.setattr(roster, "SPACING_PER_PEER_SECONDS", 0.01)
    changes = 0
    for seed in range(6):
        faults = tuple(
            Fault(1.1, ("join", "kill", "cut", "leave", "revoke", "move")[(seed + i) % 6], i, 3.0)
            for i in range(10)
        )
        world = run_to_the_end(Options(steps=5, peers=6), seed, faults)
        changes += world.roster_changes
    assert changes > 0
