"""Restoring a backup to a run folder.

Owns restoring the files, and the two measures that make an older state safe for volunteers with a
newer one (docs/decisions, number 0013): a generation above every one that may have been used since
the backup, and a rollback to the backup's checkpoint, which every peer then has to fetch.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import trio

from swarm_coordinator.core.events import RolledBack
from swarm_coordinator.durability.backup import BackupSummary, verify_backup
from swarm_coordinator.durability.run_files import database_location, load_manifest, read_progress
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.connection import PostgresqlLocation
from swarm_coordinator.storage.database import postgresql_driver
from swarm_coordinator.storage.records import generation_floor
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.atomic_file import make_folder, storage_error, sync_folder, sync_tree
from swarm_shared.base.errors import StorageError, SwarmError, UsageError, VersionError
from swarm_shared.base.types import Version
from swarm_shared.identity.signed_manifest import run_id_of

_CARRIED_OVER = ("organiser.key", "admission.token", "tokenizer.json", "port", "data")
"""Files that a backup may lack, and that are then taken from the folder it replaces."""


@dataclass(frozen=True, slots=True)
class RestoredBackup:
    """Result of a restore."""

    summary: BackupSummary
    generation: int
    version: Version
    replaced: Path | None
    """New path of the folder that was replaced."""
    missing: tuple[str, ...]
    """Files that a start needs and that neither the backup nor the replaced folder has."""


def restore_backup(
    backup: Path,
    run_dir: Path,
    *,
    force: bool = False,
    files_only: bool = False,
    now: Callable[[], float] = time.time,
) -> RestoredBackup:
    """Restore the backup to `run_dir`; an existing folder is replaced only with `force`.

    A folder in use is never replaced. With `files_only`, for a standby coordinator, the database on
    a server is left unchanged.
    """
    summary = verify_backup(backup)
    occupied = run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir()))
    if occupied and not force:
        raise UsageError(
            f"{run_dir} exists; --force puts the backup in its place and moves the old folder aside"
        )
    with contextlib.ExitStack() as stack:
        known_generation = 0
        if occupied:
            stack.enter_context(_replaceable(run_dir, summary))
            known_generation = _known_generation(run_dir)
        partial_dir = run_dir.parent / f".{run_dir.name}.restoring-{os.getpid()}"
        try:
            make_folder(run_dir.parent)
            _assemble(backup, summary, partial_dir, run_dir if occupied else None)
            folder = RunFolder(partial_dir)
            location = database_location(folder)
            if files_only:
                if not isinstance(location, PostgresqlLocation):
                    raise UsageError(
                        "this run keeps its database in its folder, so that there are no files "
                        "without it; leave --files-only out"
                    )
                folder.database.unlink(missing_ok=True)
                generation = known_generation
            else:
                if isinstance(location, PostgresqlLocation):
                    known_generation = max(known_generation, _known_generation(partial_dir))
                above = max(summary.generation, known_generation, generation_floor(now()))
                generation = _fence(folder, summary, above)
            if isinstance(location, PostgresqlLocation) and not files_only:
                postgresql_driver().load_backup(location, folder.database, force)
                for path in folder.database_files():
                    path.unlink()
            sync_tree(partial_dir)
            replaced = _swap(partial_dir, run_dir, occupied, now)
        except OSError as error:
            raise storage_error(run_dir, error) from error
        finally:
            shutil.rmtree(partial_dir, ignore_errors=True)
    missing = tuple(name for name in ("organiser.key", "data") if not (run_dir / name).exists())
    return RestoredBackup(summary, generation, summary.checkpoint or Version(0), replaced, missing)


@contextlib.contextmanager
def _replaceable(run_dir: Path, summary: BackupSummary) -> Iterator[None]:
    """Lock the folder while it is replaced; UsageError unless it belongs to the same run."""
    folder = RunFolder(run_dir)
    if not folder.settings.exists() and not folder.manifest.exists():
        raise UsageError(f"{run_dir} is not the folder of a run; choose another name")
    with contextlib.suppress(StorageError, VersionError):
        if run_id_of(load_manifest(folder)) != summary.run:
            raise UsageError(f"{run_dir} holds another run than the backup; choose another name")
    with folder.lock():
        yield


def _known_generation(run_dir: Path) -> int:
    try:
        progress = read_progress(RunFolder(run_dir))
    except SwarmError:
        return 0  # damaged, which is why it is replaced
    return progress.generation if progress is not None else 0


def _assemble(backup: Path, summary: BackupSummary, target: Path, replaced: Path | None) -> None:
    target.mkdir(mode=0o700)
    for saved in summary.files:
        path = target / saved.path
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(backup / saved.path, path)
    for name in _CARRIED_OVER:
        if replaced is not None and (replaced / name).exists() and not (target / name).exists():
            if (replaced / name).is_dir():
                shutil.copytree(replaced / name, target / name)
            else:
                shutil.copy2(replaced / name, target / name)
    for folder in (RunFolder(target).checkpoints, RunFolder(target).log):
        folder.mkdir(exist_ok=True)


def _fence(folder: RunFolder, summary: BackupSummary, above: int) -> int:
    """Roll the run back to the backup's checkpoint, in a new generation; return the generation."""
    store = SqliteStore.open(folder.database)
    try:
        generation = store.next_generation(above)
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(summary.saved_at))
        if summary.version or summary.generation:
            record = RolledBack(
                summary.checkpoint or Version(0), f"restored from the backup of {saved} UTC"
            )
            trio.run(partial(store.write, record))
    finally:
        store.close()
    return generation


def _swap(
    partial_dir: Path, run_dir: Path, occupied: bool, now: Callable[[], float]
) -> Path | None:
    """Replace the folder by two renames; a crash in between leaves both under telling names."""
    aside = None
    if occupied:
        stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime(now()))
        aside = run_dir.with_name(f"{run_dir.name}.before-restore-{stamp}")
        number = 1
        while aside.exists():
            aside = run_dir.with_name(f"{run_dir.name}.before-restore-{stamp}-{number}")
            number += 1
        run_dir.rename(aside)
    elif run_dir.exists():
        run_dir.rmdir()
    partial_dir.rename(run_dir)
    sync_folder(run_dir.parent)
    return aside
