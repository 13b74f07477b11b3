"""Stragglers at the end of a step: leased a second time, the first receipt counts."""

from __future__ import annotations

import math

import pytest

from kits.swarm_world.checks import check_end
from kits.swarm_world.event_bench import Bench, joined
from kits.swarm_world.facts import Fault, Options, train_loss
from kits.swarm_world.world import World
from swarm_coordinator.core.events import AppliedStep, Command
from swarm_coordinator.core.state.phases import RunPhase
from swarm_shared.base.types import MicrobatchIndex

# ---------------------------------------------------------------- one rule at a time


def mostly_done(**options: int) -> Bench:
    """Two trainers, four microbatches, of which one is left in both stages after two seconds."""
    bench = joined("a0", "a1", microbatches=4, **options)
    bench.tick(2.0)
    bench.report("a0", 0, 1, 2)
    bench.report("a1", 0, 1, 2)
    return bench


def granted(bench: Bench, commands: list[Command]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {"a0": [], "a1": []}
    for peer, leased in bench.leased(commands):
        found[peer].append(leased.microbatch)
    return found


def test_what_lags_when_most_is_done_is_given_to_another_trainer_too() -> None:
    bench = mostly_done()
    first = bench.step().leases[3].trainer
    other = "a1" if first == "a0" else "a0"
    assert granted(bench, bench.tick(1.0)) == {"a0": [], "a1": []}
    commands = bench.tick(6.0)
    assert granted(bench, commands) == {first: [], other: [3]}
    assert [leased.accumulate for _, leased in bench.leased(commands)] == [(0, 1)]
    assert granted(bench, bench.tick(6.0)) == {"a0": [], "a1": []}  # once is enough


def test_nothing_is_hedged_while_much_is_still_open() -> None:
    bench = joined("a0", "a1", microbatches=4)
    bench.report("a0", 0, 1)
    bench.report("a1", 0, 1)
    assert granted(bench, bench.tick(15.0)) == {"a0": [], "a1": []}


def test_a_second_lease_takes_the_place_of_a_first_one_that_failed() -> None:
    bench = mostly_done()
    bench.tick(7.0)
    first, second = bench.step().leases[3], bench.step().speculative_leases[3]
    bench.resolve(first.trainer, 3, first.lease, ok=False, reason="nobody answers")
    assert bench.step().leases[3] == second
    assert not bench.step().speculative_leases
    assert granted(bench, bench.tick(6.0))[first.trainer] == [3]  # it lags again, at another peer


def test_a_second_lease_takes_the_place_of_that_of_a_trainer_that_died() -> None:
    bench = mostly_done()
    bench.join("b0", 0)
    bench.join("b1", 1)
    bench.tick(7.0)
    first, second = bench.step().leases[3], bench.step().speculative_leases[3]
    bench.lose(first.trainer)
    assert bench.step().leases[3] == second
    bench.lose(second.trainer)
    assert not bench.step().speculative_leases


@pytest.mark.parametrize("wrong", ["lease", "trainer"])
def test_an_answer_that_is_not_of_the_second_lease_leaves_it_in_flight(wrong: str) -> None:
    bench = mostly_done()
    bench.tick(7.0)
    second = bench.step().speculative_leases[3]
    first = bench.step().leases[3]
    trainer = second.trainer if wrong == "lease" else first.trainer
    number = second.lease if wrong == "trainer" else first.lease
    bench.resolve(trainer, 3, number, ok=False, reason="stale")
    assert bench.step().speculative_leases[3] == second
    assert bench.step().leases[3] == first


def test_what_still_lags_when_its_second_lease_has_failed_is_given_to_another_trainer_again() -> (
    None
):
    bench = mostly_done()
    bench.tick(7.0)
    first, second = bench.step().leases[3], bench.step().speculative_leases[3]
    bench.resolve(second.trainer, 3, second.lease, ok=False, reason="nobody answers")
    assert bench.step().leases[3] == first
    assert granted(bench, bench.tick(1.0)) == {first.trainer: [], second.trainer: [3]}


def test_the_first_receipt_counts_and_the_other_is_not_committed() -> None:
    bench = mostly_done()
    bench.join("b0", 0)
    bench.report("b0", 3)
    bench.report("a0", 3)
    bench.report("a1", 3)
    bench.tick(1.0)
    assert bench.run.phase is RunPhase.CLOSING
    assert bench.close_of("b0").committed == (3,)
    assert bench.close_of("a0").committed == (0, 1, 2)


def test_a_held_out_microbatch_is_hedged_and_the_first_answer_is_taken() -> None:
    bench = joined("a0", "a1", evaluation=4, steps=1)
    bench.one_step()
    assert bench.run.phase is RunPhase.EVALUATING
    for peer in ("a0", "a1"):
        bench.report(peer, 2, 3, 4)
    bench.tick(5.0)
    second = bench.step().speculative_leases[MicrobatchIndex(5)]
    assert second.trainer != bench.step().leases[MicrobatchIndex(5)].trainer
    receipts = tuple(bench.receipt(peer, 5) for peer in ("a0", "a1"))
    bench.resolve(second.trainer, 5, second.lease, receipts=receipts)
    losses = [train_loss(2, microbatch) for microbatch in range(2, 6)]
    assert bench.run.history.heldout_loss == math.fsum(losses) / 16


# ---------------------------------------------------------------- whole swarms


def longest_step(options: Options, seed: int, faults: tuple[Fault, ...]) -> tuple[float, int]:
    """Virtual seconds of the slowest step, and the number of hedged microbatches."""
    world = World(options, seed, faults)
    world.run(2000.0)
    check_end(world)
    steps = [record for record in world.store.records if isinstance(record, AppliedStep)]
    return max(step.seconds for step in steps), world.counts["hedge"]


@pytest.mark.parametrize("kind", ["slow", "stall", "stick"])
@pytest.mark.parametrize("seed", range(3))
def test_a_peer_that_is_slow_or_stuck_never_holds_a_step_hostage(kind: str, seed: int) -> None:
    """A slow peer takes a hundred times as long for good; a stalled one drives nothing for good."""
    options = Options(stages=2, peers=6, steps=6, microbatches=6)
    calm, _ = longest_step(options, seed, ())
    seconds, _ = longest_step(options, seed, (Fault(2.5, kind, seed, 500.0),))
    assert calm < 3.0
    assert seconds < 20.0


def test_hedged_microbatches_are_counted_once() -> None:
    hedges = 0
    for seed in range(6):
        faults = tuple(Fault(1.0, "slow", seed + i, 4.0) for i in range(4))
        hedges += longest_step(Options(peers=6, steps=4, microbatches=6), seed, faults)[1]
    assert hedges > 5
