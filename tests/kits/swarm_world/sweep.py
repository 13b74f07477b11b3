"""Random worlds, many of them: `python -m kits.swarm_world.sweep 10000 --seed 7`.

A world that goes wrong is printed with as few of its faults as still make it go wrong, and with its
last messages. Zeller and Hildebrandt (2002), "Simplifying and isolating failure-inducing input", is
the general method; here one fault after the other is left out until none can be.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import time
from dataclasses import dataclass

from kits.swarm_world.checks import check_end
from kits.swarm_world.facts import Fault, Moves, Options, Violation
from kits.swarm_world.faults import FAULTS
from kits.swarm_world.world import World

CALM_SECONDS = 700.0
"""Seconds after the last fault within which a run ends; a checkpoint may take most of it."""

MOVING_SHARE = 0.25
"""Share of the drawn worlds in which peers move between stages."""

MOST_FAULTS = 14
FAULT_SECONDS = (0.3, 1.0, 3.0, 7.0, 15.0, 60.0)


@dataclass(frozen=True)
class Course:
    """All that a world is a function of."""

    options: Options
    seed: int
    faults: tuple[Fault, ...] = ()

    def world(self) -> World:
        world = World(self.options, self.seed, self.faults)
        world.later(world.calm_at + 1.0, world.calm)
        return world

    def violation(self) -> str:
        """What goes wrong, with the last messages before it; empty if nothing does."""
        world = self.world()
        try:
            finish(world)
        except Violation as violation:
            return f"{violation}\n\n{world.newest_messages()}"
        return ""

    def shrunk(self) -> Course:
        """The same with as few faults as still go wrong, each at its time."""
        found, place = self, 0
        while place < len(found.faults):
            before, dropped, after = _parts(found.faults, place)
            if after:
                after = (_later(after[0], dropped.wait), *after[1:])
            smaller = Course(found.options, found.seed, before + after)
            if smaller.violation():
                found, place = smaller, 0
            else:
                place += 1
        return found


def _parts(
    faults: tuple[Fault, ...], place: int
) -> tuple[tuple[Fault, ...], Fault, tuple[Fault, ...]]:
    return faults[:place], faults[place], faults[place + 1 :]


def _later(fault: Fault, seconds: float) -> Fault:
    return Fault(fault.wait + seconds, fault.kind, fault.target, fault.seconds)


def finish(world: World) -> None:
    world.run(world.calm_at + CALM_SECONDS)
    check_end(world)


def run_to_the_end(options: Options, seed: int, faults: tuple[Fault, ...] = ()) -> World:
    """A world that has ended as it must; a Violation shows the smallest one that does not."""
    course = Course(options, seed, faults)
    world = course.world()
    try:
        finish(world)
    except Violation:
        raise Violation(described(course)) from None
    return world


def described(course: Course) -> str:
    smallest = course.shrunk()
    return f"{smallest}\n{smallest.violation() or 'it does not go wrong again'}"


def drawn(seed: int) -> Course:
    """A random course."""
    rng = random.Random(seed)
    one_of = rng.choice
    moving = rng.random() < MOVING_SHARE
    options = Options(
        stages=one_of([2, 2, 3] if moving else [1, 2, 2, 3]),
        peers=one_of([4, 6, 8] if moving else [2, 3, 4, 6]),
        microbatches=one_of([3, 6] if moving else [1, 3, 6]),
        steps=one_of([4, 6] if moving else [2, 3, 5]),
        checkpoint_steps=one_of([1, 2, 3, 10]),
        evaluation=one_of([0, 1, 3]),
        tied=one_of([False, True]),
        starting=1 if moving else one_of([1, 1, 2]),
        staleness=one_of([0, 1]),
        audit_share=one_of([0.0, 0.0, 0.3, 1.0]),
        alike=one_of([False, True]),
        check_sums=one_of([False, True]),
        large_gradients=one_of([0, 1, 2]),
        moves=one_of([Moves.THROUGHPUT, Moves.SWARM]) if moving else Moves.NONE,
    )
    faults = tuple(
        Fault(rng.uniform(0.0, 4.0), one_of(FAULTS), rng.randrange(13), one_of(FAULT_SECONDS))
        for _ in range(rng.randrange(MOST_FAULTS + 1))
    )
    return Course(options, rng.getrandbits(32), faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("worlds", type=int)
    parser.add_argument("--seed", type=int, default=secrets.randbits(32))
    parser.add_argument("--stop-at", type=int, default=10, help="wrong worlds to print")
    given = parser.parse_args()
    began, wrong, done = time.process_time(), 0, 0
    print(f"seeds from {given.seed}", flush=True)
    for seed in range(given.seed, given.seed + given.worlds):
        course = drawn(seed)
        done += 1
        if done % 1000 == 0:
            print(f"{done} worlds, {wrong} wrong", flush=True)
        if course.violation():
            wrong += 1
            print(f"\nseed {seed}: {described(course)}", flush=True)
            if wrong == given.stop_at:
                break
    seconds = time.process_time() - began
    print(f"{done} worlds, {wrong} wrong, {done / seconds:.1f} worlds/s of one core")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
