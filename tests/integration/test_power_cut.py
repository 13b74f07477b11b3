"""A run on one machine whose power is cut: the coordinator, its volunteers and their files."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator

import psutil
import pytest

from kits.power_cut.lab import PowerCutDisk
from kits.runs.real_run import PATIENCE_SECONDS, Run, runs
from swarm_coordinator.demo.subprocesses import wait_until
from swarm_coordinator.durability.integrity_check import check_run

pytestmark = [pytest.mark.process, pytest.mark.nightly, pytest.mark.timeout(900)]

STEPS = 12
CUTS = 2


@pytest.fixture
def run(disk: PowerCutDisk) -> Iterator[Run]:
    with runs(disk.place) as make:
        made = make(2, steps=STEPS, limits__starting_peers_per_stage=1, checkpoint__every_steps=3)
        disk.sync()
        yield made


def start(run: Run) -> list[int]:
    """A coordinator and two volunteers; the processes of all of them, except later ones."""
    invite = run.swarm.start_coordinator()
    for _ in range(2):
        run.swarm.start_volunteer(invite)
    return [child.pid for child in run.swarm.children.running()]


def with_children(pids: list[int]) -> list[int]:
    below = [inner.pid for pid in pids for inner in psutil.Process(pid).children(recursive=True)]
    return [*pids, *below]


def test_a_machine_whose_power_is_cut_trains_what_one_process_trains(
    disk: PowerCutDisk, run: Run
) -> None:
    seed = int(os.environ.get("KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed)
    for number in range(CUTS):
        pids = start(run)
        run.wait_for_version(4 * (number + 1))
        known = run.losses()
        for child in run.swarm.children.running():
            run.swarm.expect_exit(child)
        disk.arm(chance.randint(0, 200), with_children(pids), chance.randrange(2**32))
        wait_until(
            lambda: not run.swarm.children.running(), run.swarm.children, PATIENCE_SECONDS, "a cut"
        )
        assert run.swarm.coordinator is not None
        assert run.swarm.coordinator.exit_code() == -signal.SIGKILL
        found = disk.recover()
        print(found)
        assert found.cut_before is not None
        assert check_run(run.folder).findings == ()
        # A step that the test has read was committed.
        assert run.losses()[: len(known)] == known
    start(run)
    run.swarm.watch()
    run.assert_equals_reference()
