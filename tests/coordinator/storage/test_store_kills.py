"""The coordinator's store killed at every boundary of a commit, and at any instant.

Nothing that was acknowledged is lost, no step that some volunteers applied is forgotten, and the
run ends with what one machine computes. A failing run prints its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import pytest

from kits.coordinator.kill_lab import BOUNDARIES, Kill, KilledWorld, RandomKills, run_to_the_end
from kits.swarm_world.facts import Fault, Options
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.store import open_store

OPTIONS = Options(stages=2, peers=3, microbatches=3, steps=24, checkpoint_steps=2)
LONG = Options(stages=2, peers=4, microbatches=2, steps=60, checkpoint_steps=3)
LOSSES = tuple(
    Fault(wait=6.0, kind=kind, target=number, seconds=3.0)
    for number, kind in enumerate(("kill", "kill", "disk", "kill", "crash", "kill", "kill"))
)
"""Volunteers die meanwhile: whole stages are lost, and the run goes back to checkpoints."""


def world(place: DatabaseLocation, next_kill, seed: int = 1, options: Options = OPTIONS, faults=()):
    return KilledWorld(
        options,
        seed,
        partial(open_store, place),
        partial(open_for_reading, place),
        next_kill,
        faults,
    )


def every_kill(boundary: str, rounds: int) -> Iterator[Kill]:
    """One start dies at the first commit's boundary, the next at the second's, and so on."""
    for _ in range(rounds):
        for passing in range(1, 12):
            yield Kill(boundary, passing)
    while True:
        yield Kill()


def kill_at_every_commit(
    place: DatabaseLocation, boundary: str, rounds: int, options: Options
) -> None:
    kills = every_kill(boundary, rounds)
    killed = world(place, partial(next, kills), options=options)
    run_to_the_end(killed)
    died = killed.tally.kills
    assert died["start"] + died["decision"] >= 10 * rounds, died
    # The commit under way may also be that of a note before or after the decision. At "answered" a
    # decision may be acknowledged before the process dies: then the next one is under way.
    if boundary != "answered":
        assert died["durable" if boundary == "committed" else "not durable"] > 0, died


@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_store_that_is_killed_at_the_boundary_of_a_commit_loses_nothing(
    place: DatabaseLocation, boundary: str
) -> None:
    kill_at_every_commit(place, boundary, 1, OPTIONS)


@pytest.mark.process
@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("boundary", BOUNDARIES)
def test_a_store_that_is_killed_at_every_boundary_of_a_long_run_loses_nothing(
    place: DatabaseLocation, boundary: str
) -> None:
    kill_at_every_commit(place, boundary, 3, LONG)


def test_a_store_that_is_killed_at_some_instants_loses_nothing(place: DatabaseLocation) -> None:
    kill_at_random([place], kills=15, seed=int(os.environ.get("KILL_SEED", "0")) or 7)


@pytest.mark.process
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("kills", "places"), [(20, 1), pytest.param(150, 6, marks=pytest.mark.nightly)]
)
@pytest.mark.parametrize("faults", [(), LOSSES], ids=["steady", "volunteers die, too"])
def test_a_store_that_is_killed_at_random_instants_loses_nothing(
    new_place: Callable[[], DatabaseLocation],
    faults: tuple[Fault, ...],
    kills: int,
    places: int,
) -> None:
    seed = int(os.environ.get("KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    kill_at_random([new_place() for _ in range(places)], kills=kills, seed=seed, faults=faults)


def kill_at_random(
    places: list[DatabaseLocation], kills: int, seed: int, faults: tuple[Fault, ...] = ()
) -> None:
    print(f"KILL_SEED={seed}")
    outcomes: Counter[str] = Counter()
    for number, place in enumerate(places):
        aim = RandomKills(random.Random(seed + number), kills // len(places))
        killed = world(place, aim, seed + number, LONG, faults)
        run_to_the_end(killed)
        outcomes += killed.tally.kills
    died = outcomes["start"] + outcomes["decision"]
    print(f"{len(places)} runs, {died} kills: {dict(outcomes)}")
    assert died >= kills * 0.6, "the run was over before"
