"""A simulated swarm whose coordinator's store lies on a disk, and the disk's power is cut.

As in `kill_lab`, with more lost: what SQLite had written and not synced.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kits.coordinator.kill_lab import Kill, KilledWorld, OpenStore, StoreProcess
from kits.power_cut.lab import NEVER, SYNCED_ONLY, PowerCutDisk
from kits.swarm_world.facts import Fault, Options
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.store import open_store

DATABASE = "run.sqlite3"


@dataclass(frozen=True)
class Cut:
    """After so many operations of one start; with a seed, some of what was not synced survives."""

    after: int = NEVER
    seed: int | None = SYNCED_ONLY


@dataclass
class RandomCuts:
    """Instants within the first few commits of each start."""

    chance: random.Random
    left: int
    within: int = 100
    """Operations; a start has 23, and a commit 13: two for each page, and a sync."""

    def __call__(self) -> Cut:
        if not self.left:
            return Cut()
        self.left -= 1
        seed = self.chance.choice((SYNCED_ONLY, self.chance.randrange(2**32)))
        return Cut(self.chance.randint(0, self.within), seed)


class PowerCutWorld(KilledWorld):
    """Each start of the store ends with a cut, until `next_cut` has none left."""

    def __init__(
        self,
        options: Options,
        seed: int,
        disk: PowerCutDisk,
        next_cut: Callable[[], Cut],
        faults: tuple[Fault, ...] = (),
    ) -> None:
        self._disk, self._next_cut = disk, next_cut
        place = disk.place / DATABASE
        super().__init__(
            options, seed, partial(open_store, place), partial(open_for_reading, place), Kill,
            faults,
        )  # fmt: skip

    def start_process(self, open_store: OpenStore) -> StoreProcess:
        # The one before may have lost its power while it closed the database.
        self._disk.recover()
        start, go = os.pipe()
        process = StoreProcess(lambda: (os.read(start, 1), open_store())[1], Kill())
        cut = self._next_cut()
        self._disk.arm(cut.after, [process.pid], cut.seed)
        os.write(go, b"!")
        os.close(go)
        os.close(start)
        return process

    def died(self, what: str) -> None:
        super().died(what)
        self._disk.recover()
