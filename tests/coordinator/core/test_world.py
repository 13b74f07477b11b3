"""Whole simulated swarms under churn: in every case a run computes what one machine would.

The coordinator's core and the volunteer's rules are the ones that ship; the world around them is
simulated. It checks itself at every event (`kits.swarm_world.checks`): each microbatch counts once
in each stage of each step, no receipt is without its gradient, replicas apply the same attempts,
nothing is applied before it is durable, every lease ends, and the run goes on while enough peers
are there. A failing world is printed with as few faults as still make it fail, and with its last
messages; options, seed and faults reproduce it exactly.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from typing import Literal

import pytest

from kits.swarm_world.checks import check_end
from kits.swarm_world.facts import Fault, Moves, Options, Violation
from kits.swarm_world.faults import FAULTS, OF_A_PEER
from kits.swarm_world.peer import SimPeer
from kits.swarm_world.sweep import described, drawn, finish, run_to_the_end
from kits.swarm_world.world import World
from swarm_coordinator.core.events import AppliedStep
from swarm_coordinator.core.rules import roster
from swarm_coordinator.core.state.phases import RunPhase


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_a_swarm_without_faults_needs_one_attempt_a_step(
    stages: int, tied: bool, staleness: Literal[0, 1]
) -> None:
    options = Options(
        stages=stages, peers=2 * stages, steps=4, tied=tied, starting=2, staleness=staleness
    )
    for seed in range(2):
        world = World(options, seed)
        world.run()
        check_end(world)
        assert world.counts["abort"] == 0
        assert len(world.store.applied) == 4
        assert 4 <= len(world.attempts) <= 4 * max(1, stages - tied)
        assert (world.counts["lease of a later step"] > 0) is (staleness > 0)


def seeds(worlds: int) -> Iterator[int]:
    """Seeds of so many courses, from a random one on; WORLD_SEED repeats one that has failed."""
    given = os.environ.get("WORLD_SEED")
    first = int(given) if given else secrets.randbits(32)
    return iter(range(first, first + (1 if given else worlds)))


@pytest.mark.parametrize("worlds", [50, pytest.param(1000, marks=pytest.mark.nightly)])
@pytest.mark.timeout(1800)
def test_under_any_faults_every_microbatch_counts_once_and_the_run_ends(worlds: int) -> None:
    for seed in seeds(worlds):
        course = drawn(seed)
        assert not course.violation(), f"WORLD_SEED={seed}: {described(course)}"


@pytest.mark.parametrize(
    ("options", "seed", "faults"),
    [
        (Options(), 0, (Fault(2.0, "kill"), Fault(0.1, "kill", 1), Fault(0.1, "kill", 2))),
        (
            Options(), 1,
            (Fault(3.0, "crash"), Fault(0.5, "crash_between", 3), Fault(6.0, "cut")),
        ),
        (
            Options(stages=3, peers=3, microbatches=1, checkpoint_steps=10, evaluation=0),
            2610313821,
            (
                Fault(2.2, "restart", 6, 7.0), Fault(2.9, "join", 1, 7.0),
                Fault(6.4, "kill", 9, 7.0),
            ),
        ),
        (
            Options(
                stages=3, peers=6, microbatches=6, steps=6, checkpoint_steps=1, evaluation=0,
                moves=Moves.THROUGHPUT,
            ),
            2774317777,
            (Fault(2.4039448067165643, "nan_sum", 1, 0.3),),
        ),
    ],
    ids=[
        "one peer of four is left", "the coordinator dies twice",
        "only a peer that does not hold its own stage can take the lost one",
        "a peer whose partner in an exchange is assigned a stage again gets no source meanwhile",
    ],
)  # fmt: skip
def test_a_run_ends(options: Options, seed: int, faults: tuple[Fault, ...]) -> None:
    run_to_the_end(options, seed, faults)


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", FAULTS)
def test_one_kind_of_fault_again_and_again_does_not_break_a_run(
    kind: str, staleness: Literal[0, 1]
) -> None:
    for seed in range(2):
        faults = tuple(Fault(1.5, kind, seed + i, 2.0) for i in range(6))
        options = Options(steps=4, peers=5, checkpoint_steps=2, staleness=staleness)
        run_to_the_end(options, seed, faults)


def test_a_revoked_peer_that_goes_on_sending_is_turned_away_and_changes_nothing() -> None:
    """Every request checks that no peer serves it for longer than a few seconds."""
    turned_away = 0
    for seed in range(6):
        faults = tuple(Fault(1.3, "revoke", seed + i, 7.0) for i in range(6))
        world = run_to_the_end(Options(steps=4, peers=6), seed, faults)
        turned_away += world.counts["revoked sender turned away"]
    assert turned_away > 0


@pytest.mark.parametrize("at", range(24))
def test_a_coordinator_that_dies_between_any_two_commands_loses_nothing_it_has_sent(
    at: int,
) -> None:
    faults = (Fault(2.0 + 0.1 * (at % 5), "crash_between", at),)
    for staleness in (0, 1):
        options = Options(steps=3, checkpoint_steps=1, staleness=staleness)
        run_to_the_end(options, at, faults)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_whose_coordinator_comes_back_to_fewer_peers_than_it_began_with_ends(
    staleness: Literal[0, 1],
) -> None:
    for seed in range(4):
        faults = (Fault(4.0, "kill", seed), Fault(0.2, "crash", seconds=3.0))
        options = Options(peers=4, starting=2, steps=8, checkpoint_steps=1, staleness=staleness)
        world = run_to_the_end(options, seed, faults)
        assert len(world.store.applied) == 8


@pytest.mark.parametrize("stop_after", [0.5 * half for half in range(25)])
def test_a_run_that_is_stopped_and_started_again_loses_nothing(stop_after: float) -> None:
    (seed,) = seeds(1)
    print(f"WORLD_SEED={seed}")
    world = drawn(seed).world()
    world.run(until=lambda: world.now >= stop_after or world.stopped)
    world.stop()
    asked_at, crashed = world.now, world.run_state is None
    if not crashed:
        world.run(60.0, until=lambda: world.stopped or world.run_state is None)
        assert world.now - asked_at < 35.0
    version = world.store.version
    world.crash(back_after=None)
    world.start_coordinator()
    finish(world)
    assert world.store.version >= version


@pytest.mark.parametrize("after", [0.9, 2.0, 3.0, 4.0, 5.0])
def test_a_stop_stores_the_version_that_was_reached(after: float) -> None:
    world = World(Options(steps=50, checkpoint_steps=100), 5)
    world.run(until=lambda: world.now >= after)
    world.stop()
    world.run(35.0)
    version = world.store.version
    assert version == 0 or version in world.store.checkpoints
    assert world.run_state is not None
    assert world.run_state.phase is RunPhase.STOPPING


def test_volunteers_that_come_and_go_at_every_step_do_not_change_the_losses() -> None:
    quiet = run_to_the_end(Options(steps=8, peers=4, microbatches=6), 1)
    faults = tuple(Fault(0.8, ("join", "leave", "restart")[i % 3], i, 1.0) for i in range(18))
    churned = run_to_the_end(Options(steps=8, peers=6, microbatches=6), 1, faults)
    assert [s.loss for s in quiet.store.applied.values()] == pytest.approx(
        [s.loss for s in churned.store.applied.values()], rel=1e-12
    )


def test_a_world_that_goes_wrong_is_shown_with_the_fewest_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def violate(_peer: SimPeer, _seconds: float) -> None:
        raise Violation("this went wrong")

    monkeypatch.setitem(OF_A_PEER, "cut", violate)
    faults = tuple(Fault(0.4, kind, 1, 1.0) for kind in ("join", "restart", "move", "cut", "leave"))
    with pytest.raises(Violation) as caught:
        run_to_the_end(Options(), 7, faults)
    shown = str(caught.value)
    assert "this went wrong" in shown
    assert f"faults=({Fault(1.6, 'cut', 1, 1.0)},)" in shown
    assert "coordinator -> peer" in shown


def test_the_same_options_seed_and_faults_give_the_same_run() -> None:
    faults = tuple(Fault(1.0, kind, 1, 1.0) for kind in ("kill", "cut", "crash", "leave"))
    first, second = (run_to_the_end(Options(), 7, faults) for _ in range(2))
    assert first.store.records == second.store.records
    assert [r for r in first.store.records if isinstance(r, AppliedStep)]
    assert first.notes == second.notes


# ---- peers that move between stages


def test_a_joining_peer_is_assigned_one_stage_while_another_peer_moves_to_a_lost_one() -> None:
    options = Options(stages=3, microbatches=6, steps=4, checkpoint_steps=3, moves=Moves.THROUGHPUT)
    faults = (
        Fault(1.65, "stick", 3, 0.3),
        Fault(3.07, "kill", 6, 15.0),
        Fault(13.02, "revoke", 2, 60.0),
        Fault(2.37, "small", 8, 15.0),
    )
    run_to_the_end(options, 505329034, faults)


def test_two_peers_that_average_alone_exchange_their_stages() -> None:
    """Both stages of the exchange average in the same close and have the same members."""
    options = Options(
        peers=3, microbatches=6, steps=4, evaluation=0, checkpoint_steps=10,
        moves=Moves.THROUGHPUT,
    )  # fmt: skip
    run_to_the_end(options, 1371, (Fault(3.4, "wedge", 1, 60.0),))


def test_moves_come_about_and_leave_the_losses_as_they_were() -> None:
    made = 0
    still = Options(steps=8, peers=6, stages=3, microbatches=6)
    moved = Options(steps=8, peers=6, stages=3, microbatches=6, moves=Moves.THROUGHPUT)
    for seed in range(4):
        quiet, busy = run_to_the_end(still, seed), run_to_the_end(moved, seed)
        made += sum("switches from stage" in note for note in busy.notes)
        assert [s.loss for s in quiet.store.applied.values()] == pytest.approx(
            [s.loss for s in busy.store.applied.values()], rel=1e-12
        )
    assert made > 0


def test_roster_changes_give_members_the_same_roster_as_whole_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In a large run; every world checks each peer's roster when it is served."""
    monkeypatch.setattr(roster, "SMALL_RUN_PEERS", 0)
    monkeypatch.setattr(roster, "SPACING_PER_PEER_SECONDS", 0.01)
    changes = 0
    for seed in range(6):
        faults = tuple(
            Fault(1.1, ("join", "kill", "cut", "leave", "revoke", "move")[(seed + i) % 6], i, 3.0)
            for i in range(10)
        )
        world = run_to_the_end(Options(steps=5, peers=6), seed, faults)
        changes += world.counts["roster change"]
    assert changes > 0
