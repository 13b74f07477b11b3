"""The coordinator's store on a disk that loses, with its power, what was not synced.

A SIGKILL loses no page of the kernel's cache, so that `synchronous = OFF` would survive it.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from kits.coordinator.kill_lab import run_to_the_end
from kits.coordinator.power_cut_world import DATABASE, Cut, PowerCutWorld, RandomCuts
from kits.power_cut.lab import SYNCED_ONLY, PowerCutDisk, at_every_instant
from kits.swarm_world.facts import Fault, Options
from swarm_coordinator.storage.store import SqliteStore

pytestmark = pytest.mark.process

LONG = Options(stages=2, peers=4, microbatches=2, steps=60, checkpoint_steps=3)
LONGER = replace(LONG, steps=240)
LOSSES = tuple(
    Fault(wait=6.0, kind=kind, target=number, seconds=3.0)
    for number, kind in enumerate(("kill", "kill", "disk", "kill", "crash", "kill", "kill"))
)


@pytest.mark.parametrize("seed", [SYNCED_ONLY, 1], ids=["synced only", "torn"])
def test_a_store_whose_power_is_cut_before_any_operation_forgets_nothing(
    disk: PowerCutDisk, seed: int | None
) -> None:
    """The first start loses its power before its first operation, the next before its second."""
    cuts = iter([*(Cut(after, seed) for after in range(80)), *[Cut()] * 100])
    world = world_on(disk, 1, partial(next, cuts))
    run_to_the_end(world)
    died = world.tally.kills
    print(dict(died))
    assert died["start"] >= 10
    assert died["decision"] >= 40
    assert died["not durable"] >= 10


@pytest.mark.parametrize("seed", [SYNCED_ONLY, 1, 2], ids=["synced only", "torn", "torn, too"])
def test_a_power_cut_while_a_database_is_made_leaves_one_that_opens(
    disk: PowerCutDisk, seed: int | None
) -> None:
    place = disk.place / DATABASE

    def make() -> None:
        assert one_start(place) == 1

    def check(ended: bool) -> None:
        assert one_start(place) >= (2 if ended else 1)

    assert at_every_instant(disk, make, check, [seed], every=3) >= 30


def one_start(place: Path) -> int:
    store = SqliteStore.open(place)
    try:
        return store.next_generation()
    finally:
        store.close()


def world_on(
    disk: PowerCutDisk,
    seed: int,
    next_cut: Callable[[], Cut],
    options: Options = LONG,
    faults: tuple[Fault, ...] = (),
) -> PowerCutWorld:
    """A world with an empty database, which takes a hundred operations to make."""
    SqliteStore.open(disk.place / DATABASE).close()
    disk.sync()
    return PowerCutWorld(options, seed, disk, next_cut, faults)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("faults", [(), LOSSES], ids=["steady", "volunteers die, too"])
@pytest.mark.parametrize("part", range(4))
def test_a_store_whose_power_is_cut_at_random_instants_forgets_nothing(
    disk: PowerCutDisk, part: int, faults: tuple[Fault, ...]
) -> None:
    seed = int(os.environ.get("KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"KILL_SEED={seed}")
    cuts = RandomCuts(random.Random(seed + part), 200)
    world = world_on(disk, seed + part, cuts, LONGER, faults)
    run_to_the_end(world)
    died = world.tally.kills
    print(dict(died))
    assert died["start"] + died["decision"] >= 120
