"""Power cuts while a run, a checkpoint or a backup is made: each appears whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
from functools import partial
from pathlib import Path

import pytest

from kits.coordinator.run import (
    STAGES,
    checkpoints_of,
    flip_byte,
    one_start,
    step,
    with_a_past,
    write,
)
from kits.coordinator.shell_world import make_run
from kits.power_cut.lab import (
    FEW_SEEDS,
    NEVER,
    SYNCED_ONLY,
    PowerCutDisk,
    at_every_instant,
    interrupted,
)
from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.durability.backup import find_backup, make_backup, verify_backup
from swarm_coordinator.durability.integrity_check import check_run, set_aside
from swarm_coordinator.durability.restore import restore_backup
from swarm_coordinator.run_creation.initialise import initialise_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.records import read_checkpoints
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.transfer.part_file import PartFile

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

few_or_all = pytest.mark.parametrize(
    ("seeds", "every"),
    [(FEW_SEEDS, 9), pytest.param(range(100, 106), 1, marks=pytest.mark.nightly)],
    ids=["few", "all"],
)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "a run"
    with_a_past(make_run(path, steps=50))
    return path


@pytest.fixture
def folder(template: Path, disk: PowerCutDisk) -> RunFolder:
    shutil.copytree(template, disk.place / "a run")
    disk.sync()
    return RunFolder.open(disk.place / "a run")


def fetch_checkpoint(folder: RunFolder, version: int) -> CheckpointRecord:
    """Store a checkpoint by the same way on which a coordinator fetches it."""
    checkpoints = checkpoints_of(folder, keep=1)
    files: dict[StageIndex, tuple[int, str]] = {}
    for stage in range(STAGES):
        content = f"stage {stage} at {version};".encode() * 1000
        digest = hashlib.sha256(content).hexdigest()
        path = checkpoints.partial_path(version, stage)
        part = PartFile(path, f"state/{version}/{stage}", len(content), digest)
        part.open()
        part.write(0, content, digest)
        assert part.finish()
        files[StageIndex(stage)] = (len(content), digest)
    return checkpoints.complete(Version(version), files)


def test_the_run_of_these_tests_is_whole(folder: RunFolder) -> None:
    assert check_run(folder).findings == ()


@pytest.mark.parametrize(
    ("seeds", "every"),
    [((SYNCED_ONLY, 2), 9), pytest.param((100, 101, 102), 5, marks=pytest.mark.nightly)],
    ids=["few", "all"],
)
def test_a_run_is_made_whole_or_not_at_all(
    tmp_path: Path, disk: PowerCutDisk, seeds: tuple[int | None, ...], every: int
) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for index in range(40):
        (text / f"{index}.txt").write_text(f"document {index}: " + "some words of text. " * 40)
    place = disk.place / "runs" / "a run"

    def check(ended: bool) -> None:
        assert place.exists() or not ended
        if place.exists():
            assert check_run(RunFolder.open(place)).findings == ()

    make = partial(initialise_run, place, "tiny", str(text), 2)
    assert at_every_instant(disk, make, check, seeds, every) > 5 * len(seeds)


@few_or_all
def test_a_checkpoint_is_complete_or_not_there(
    disk: PowerCutDisk, folder: RunFolder, seeds: tuple[int | None, ...], every: int
) -> None:
    def fetch() -> None:
        one_start(folder, step(6), fetch_checkpoint(folder, 6))
        checkpoints_of(folder, keep=1).prune(Version(6))

    def check(ended: bool) -> None:
        assert check_run(folder).findings == ()
        with open_for_reading(folder.database) as connection:
            known = read_checkpoints(connection)
        newest = checkpoints_of(folder).latest_valid(known=known)
        assert newest is not None
        assert newest.version == max(known)
        assert not ended or newest.version == 6

    assert at_every_instant(disk, fetch, check, seeds, every) > 8 * len(seeds)


@pytest.mark.parametrize(
    "seeds",
    [(*FEW_SEEDS, 4, 5, 6, 7), pytest.param(range(100, 160), marks=pytest.mark.nightly)],
    ids=["few", "many"],
)
def test_a_checkpoint_is_deleted_whole_or_not_at_all(
    disk: PowerCutDisk, folder: RunFolder, seeds: tuple[int | None, ...]
) -> None:
    checkpoints = checkpoints_of(folder, keep=1)

    def check(ended: bool) -> None:
        assert check_run(folder).findings == ()
        assert checkpoints.versions() in ([[4]] if ended else [[4], [4, 2]])
        # As the next start does; nothing is left that takes space for good.
        checkpoints.discard_all_partial()
        assert len(list(folder.checkpoints.iterdir())) == len(checkpoints.versions())

    prune = partial(checkpoints.prune, Version(4))
    assert at_every_instant(disk, prune, check, seeds) >= 4 * len(seeds)


@few_or_all
def test_a_backup_is_complete_or_not_there(
    disk: PowerCutDisk, folder: RunFolder, seeds: tuple[int | None, ...], every: int
) -> None:
    out = disk.place / "backups" / "one"

    def check(ended: bool) -> None:
        assert out.exists() or not ended
        if out.exists():
            assert verify_backup(out).version == 5
        if ended:
            found = find_backup(folder)
            assert found is not None
            assert found[0] == out

    make = partial(make_backup, folder, out)
    assert at_every_instant(disk, make, check, seeds, every) > 8 * len(seeds)


@few_or_all
@pytest.mark.parametrize(
    "what",
    ["a new folder", pytest.param("a folder that is replaced", marks=pytest.mark.nightly)],
)
def test_a_backup_is_restored_whole_or_the_folder_is_what_it_was(
    disk: PowerCutDisk, folder: RunFolder, seeds: tuple[int | None, ...], every: int, what: str
) -> None:
    backup = disk.place / "backup"
    make_backup(folder, backup, with_data=False, with_key=False)
    replaced = what == "a folder that is replaced"
    place = folder.path if replaced else disk.place / "new" / "run"

    def restored(path: Path) -> bool:
        return history(RunFolder(path).database).restored.rolled_back

    def whole(path: Path) -> bool:
        problems = {finding.part for finding in check_run(RunFolder(path)).findings}
        # The backup has neither; they are taken from the folder that is replaced.
        return problems <= (set() if replaced else {"manifest.json", "data"})

    def check(ended: bool) -> None:
        aside = list(place.parent.glob(f"{place.name}.before-restore-*"))
        assert all(whole(path) and not restored(path) for path in aside)
        if place.exists():
            assert whole(place)
            assert not ended or restored(place)
        else:
            assert not ended
            assert bool(aside) == replaced

    restore = partial(restore_backup, backup, place, force=replaced)
    assert at_every_instant(disk, restore, check, seeds, every) > 8 * len(seeds)


def test_a_damaged_database_is_moved_aside_before_its_log(
    disk: PowerCutDisk, folder: RunFolder
) -> None:
    def write_and_die() -> None:
        store = SqliteStore.open(folder.database)
        store.next_generation()
        write(store, step(6))

    # Without closing the database, so that its log stays.
    assert interrupted(disk, write_and_die, NEVER, SYNCED_ONLY).cut_before is None
    flip_byte(folder.database, 3 * 4096)
    assert check_run(folder).findings != ()
    log = Path(f"{folder.database}-wal")
    assert log.stat().st_size > 0

    def check(ended: bool) -> None:
        if folder.database.exists():
            assert not ended
            assert log.stat().st_size > 0
            return
        assert not (ended and log.exists())
        store = SqliteStore.open(folder.database)
        try:
            assert (store.next_generation(), store.restore().version) == (1, 0)
        finally:
            store.close()

    def move() -> None:
        set_aside(folder, check_run(folder))

    assert at_every_instant(disk, move, check, FEW_SEEDS) > 20
