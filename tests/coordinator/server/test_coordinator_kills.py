"""A real coordinator, with volunteers over real links, killed by SIGKILL again and again."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pytest
import trio

from kits.coordinator.coordinator_lab import (
    Lab,
    Lasting,
    Process,
    check_nothing_forgotten,
    coordinators,
    lasting_crew,
)
from kits.coordinator.kill_lab import BOUNDARIES
from kits.coordinator.shell_world import make_run
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import history

pytestmark = pytest.mark.process


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "a run", steps=100_000)


async def killed_again_and_again(
    folder: RunFolder, lab: Lab, deaths: list[tuple[str | None, int, float]]
) -> tuple[int, list[Lasting]]:
    """A coordinator per death, and a last one that is stopped in order; the steps applied."""
    manifest = load_manifest(folder)
    crew: list[Lasting] = []
    version = 0
    async with trio.open_nursery() as nursery:
        for boundary, passing, seconds in deaths:
            process = await lab.start(folder, boundary=boundary, passing=passing)
            if not crew:
                process = await until_it_serves(folder, lab, process)
                crew += lasting_crew(await process.serves(), manifest, folder.path)
                for volunteer in crew:
                    nursery.start_soon(volunteer.come_back)
            if boundary is None:
                await trio.sleep(seconds)
                process.kill()
            assert await process.ended() == -signal.SIGKILL, process.text()
            version = check_nothing_forgotten(folder.database, manifest, crew)
        process = await lab.start(folder)
        await process.serves()
        while history(folder.database).restored.version < version + 2:
            await trio.sleep(0.05)
        process.kill(signal.SIGINT)
        assert await process.ended() == 0, process.text()
        nursery.cancel_scope.cancel()
    return check_nothing_forgotten(folder.database, manifest, crew), crew


async def until_it_serves(folder: RunFolder, lab: Lab, process: Process) -> Process:
    """The first one must live long enough to be known."""
    try:
        await process.serves()
    except AssertionError:
        assert await process.ended() == -signal.SIGKILL
        process = await lab.start(folder)
        await process.serves()
        process.kill()
    return process


@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_a_coordinator_that_is_killed_at_the_boundaries_of_its_commits_forgets_nothing(
    folder: RunFolder, boundary: str
) -> None:
    deaths: list[tuple[str | None, int, float]] = [
        (boundary, passing, 0.0) for passing in (9, 1, 2, 3, 4, 5, 6, 8, 11, 16)
    ]
    with coordinators(folder.path / "starts") as lab:
        version, crew = await killed_again_and_again(folder, lab, deaths)
    assert version >= 2
    assert all(volunteer.told for volunteer in crew)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(5))
async def test_a_coordinator_that_is_killed_at_random_instants_forgets_nothing(
    folder: RunFolder, part: int
) -> None:
    seed = int(os.environ.get("KILL_SEED", "0")) or random.SystemRandom().randrange(1, 10**6)
    print(f"KILL_SEED={seed}")
    chance = random.Random(seed + part)
    deaths: list[tuple[str | None, int, float]] = [(None, 1, 0.8)]
    deaths += [(None, 1, chance.random() * 1.2) for _ in range(15)]
    with coordinators(folder.path / "starts") as lab:
        version, _ = await killed_again_and_again(folder, lab, deaths)
    assert version >= 2
