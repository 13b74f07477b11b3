"""A real coordinator whose run folder lies on a disk that loses what was not synced.

Its volunteers keep their power: a step that some of them applied must not be forgotten.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
from pathlib import Path

import pytest
import trio

from kits.coordinator.coordinator_lab import (
    Lab,
    Lasting,
    check_nothing_forgotten,
    coordinators,
    lasting_crew,
)
from kits.coordinator.power_cut_world import Cut, RandomCuts
from kits.coordinator.shell_world import loss_of, make_run
from kits.power_cut.lab import PowerCutDisk
from swarm_coordinator.durability.integrity_check import check_run
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.records import read_checkpoints
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.run.manifest import Manifest

pytestmark = [pytest.mark.process, pytest.mark.timeout(400)]

STEPS = 30
OPERATIONS_OF_A_START = 250
"""About eight steps and four checkpoints."""


@pytest.fixture
def folder(disk: PowerCutDisk, tmp_path: Path) -> RunFolder:
    """A run that keeps one checkpoint: none is left over when that one is lost."""
    template = make_run(tmp_path / "a run", steps=STEPS, checkpoint__keep=1)
    shutil.copytree(template.path, disk.place / "a run")
    disk.sync()
    return RunFolder.open(disk.place / "a run")


def check_checkpoint(folder: RunFolder, manifest: Manifest) -> None:
    """The newest one that the database lists has its files, with their hashes."""
    with open_for_reading(folder.database) as connection:
        listed = read_checkpoints(connection)
    for version in list(listed)[:1]:
        stored = CheckpointFolder(
            folder.checkpoints, run_id_of(manifest), manifest.stage_count, keep=1
        )
        assert stored.verify(version) == listed[version]


async def lose_power(
    disk: PowerCutDisk, folder: RunFolder, lab: Lab, crew: list[Lasting], cut: Cut
) -> bool:
    """One start that ends with a cut, unless the run ends first; whether it goes on."""
    manifest = load_manifest(folder)
    process = await lab.start(folder)
    disk.arm(cut.after, [process.pid], cut.seed)
    code = await process.ended()
    found = disk.recover()
    if found.cut_before is None:
        assert code == 0, process.text()
        return False
    assert code == -signal.SIGKILL, process.text()
    check_nothing_forgotten(folder.database, manifest, crew)
    check_checkpoint(folder, manifest)
    assert check_run(folder).findings == ()
    # A coordinator that is started on a finished run does not end by itself.
    return not history(folder.database).restored.finished


async def run_under_cuts(
    disk: PowerCutDisk, folder: RunFolder, starts: Path, cuts: RandomCuts
) -> int:
    """From the first start to the end of the run; the number of cuts."""
    manifest = load_manifest(folder)
    count = 0
    with coordinators(starts) as lab:
        async with trio.open_nursery() as nursery:
            process = await lab.start(folder)
            crew = lasting_crew(await process.serves(), manifest, starts)
            process.kill()
            await process.ended()
            disk.sync()
            for volunteer in crew:
                nursery.start_soon(volunteer.come_back)
            while await lose_power(disk, folder, lab, crew, cuts()):
                count += 1
            nursery.cancel_scope.cancel()
    assert all(volunteer.told for volunteer in crew)
    assert check_nothing_forgotten(folder.database, manifest, crew) == STEPS
    check_checkpoint(folder, manifest)
    steps = [(step.step, step.loss) for step in history(folder.database).steps]
    assert steps == [(number, loss_of(number)) for number in range(1, STEPS + 1)]
    return count


def test_a_coordinator_whose_power_is_cut_forgets_nothing_and_ends_its_run(
    disk: PowerCutDisk, folder: RunFolder, tmp_path: Path
) -> None:
    cuts = RandomCuts(random.Random(7), 6, within=OPERATIONS_OF_A_START)
    assert trio.run(run_under_cuts, disk, folder, tmp_path / "starts", cuts) >= 4


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(6))
def test_a_coordinator_whose_power_is_cut_at_random_instants_forgets_nothing(
    disk: PowerCutDisk, folder: RunFolder, tmp_path: Path, part: int
) -> None:
    seed = int(os.environ.get("KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"KILL_SEED={seed}")
    cuts = RandomCuts(random.Random(seed + part), 20, within=OPERATIONS_OF_A_START)
    assert trio.run(run_under_cuts, disk, folder, tmp_path / "starts", cuts) >= 4
