"""Backups of a run: making one, whether a coordinator is running or not, and verifying it.

    OUT/backup.json               what was saved when, with the size and hash of every other file
    OUT/run.toml, manifest.json, organiser.key, data/, tokenizer.json, …  as in the run's folder
    OUT/coordinator.sqlite        one moment of the database
    OUT/checkpoints/step-…/       the newest checkpoint that this moment knows, and is whole

Owns the format, and the list of backups in the run folder (`backups.json`). A backup appears under
its name only when it is complete and has been read back. `durability.restore` restores one.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Collection, Iterator
from pathlib import Path, PurePosixPath

from pydantic import Field, ValidationError, field_validator

from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.durability.journal_audit import StepShape, database_problems
from swarm_coordinator.durability.run_files import database_location, load_manifest, load_settings
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder, disk_errors, quoted, read_bytes
from swarm_coordinator.run_dir.initial_states import initial_files
from swarm_coordinator.run_dir.state_files import file_sha256
from swarm_coordinator.storage.connection import PostgresqlLocation
from swarm_coordinator.storage.database import copy_database, database_exists, open_for_reading
from swarm_coordinator.storage.records import LARGEST_GENERATION, read_checkpoints, read_restored
from swarm_shared.base.atomic_file import (
    PRIVATE_MODE,
    make_folder,
    sync_folder,
    sync_tree,
    write_atomically,
)
from swarm_shared.base.errors import (
    ConfigurationError,
    StorageError,
    SwarmError,
    UsageError,
    VersionError,
)
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import RunId, Version
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.protocol import SOFTWARE_VERSION
from swarm_shared.run.manifest import Manifest

MAX_RECORDED_BACKUPS = 50
"""Maximum number of backups listed in the run folder."""
_LATEST_UNIX_SECONDS = 250_000_000_000
"""In the year 9892; a date has at most four digits of a year."""
_ATTEMPTS = 3
"""Attempts to copy a checkpoint: a running coordinator may prune it while it is copied."""
_PLAIN_FILES = ("run.toml", "manifest.json", "tokenizer.json", "port")
_SECRET_FILES = ("organiser.key", "admission.token")


class SavedFile(FrozenModel):
    """One file of a backup, with its path inside the backup."""

    path: str = Field(min_length=1)
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @field_validator("path")
    @classmethod
    def _inside(cls, path: str) -> str:
        """Refuse a path outside the backup: restoring must not write elsewhere."""
        parts = PurePosixPath(path).parts
        if PurePosixPath(path).is_absolute() or ".." in parts or "\\" in path or "\0" in path:
            raise ValueError("must be a path inside the backup")
        return path


class BackupSummary(FrozenModel):
    """The content of backup.json."""

    format: int = Field(ge=1, le=1)
    run: RunId
    name: str
    software: str
    saved_at: float = Field(ge=0, le=_LATEST_UNIX_SECONDS)
    """Unix seconds."""
    version: Version = Field(ge=0)
    generation: int = Field(ge=0, le=LARGEST_GENERATION)
    checkpoint: Version | None
    files: tuple[SavedFile, ...]


# ---------------------------------------------------------------- making one


def make_backup(
    folder: RunFolder, out: Path, *, with_key: bool = True, with_data: bool = True
) -> BackupSummary:
    """Save the run to the new folder `out`, which appears complete or not at all.

    Without the key, it has no password of a database on a server either.
    """
    if out.exists():
        raise UsageError(f"{out} is there already; choose another name for the backup")
    manifest = load_manifest(folder)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    with disk_errors(out):
        make_folder(out.parent)
        partial.mkdir(mode=0o700)
        try:
            summary = _fill(folder, manifest, partial, with_key, with_data)
            content = summary.model_dump_json(indent=1).encode()
            write_atomically(RunFolder(partial).backup_summary, content)
            sync_tree(partial)
            verify_backup(partial)
            partial.rename(out)
            sync_folder(out.parent)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # does nothing after the rename
    _record_backup(folder, out)
    return summary


def _fill(
    folder: RunFolder, manifest: Manifest, target: Path, with_key: bool, with_data: bool
) -> BackupSummary:
    copies = [folder.path / name for name in _PLAIN_FILES]
    copies += [folder.path / name for name in _SECRET_FILES if with_key]
    copies += initial_files(folder, manifest)
    copies += sorted(folder.data.iterdir()) if with_data else []
    for path in copies:
        if path.is_file():
            secret = path.name in _SECRET_FILES
            _copy(path, target / path.relative_to(folder.path), private=secret)
    saved_at, location = time.time(), database_location(folder)
    if isinstance(location, PostgresqlLocation) and not with_key:
        _remove_password(folder, target, location)
    checkpoint, version, generation = None, Version(0), 0
    if database_exists(location):
        for attempt in range(_ATTEMPTS):
            database = RunFolder(target).database
            database.unlink(missing_ok=True)
            copy_database(location, database)
            with open_for_reading(database) as connection:
                restored, records = read_restored(connection), read_checkpoints(connection)
            version, generation = restored.version, restored.generation
            checkpoint = _copy_checkpoint(folder, manifest, records.values(), target)
            if checkpoint is not None or not records:
                break
            if attempt == _ATTEMPTS - 1 and CheckpointFolder.of_run(folder, manifest).versions():
                raise StorageError(
                    f"no checkpoint in {folder.checkpoints} could be copied whole; check "
                    f"them with `swarm-coordinator verify {quoted(folder.path)}`"
                )
    return BackupSummary(
        format=1, run=run_id_of(manifest), name=manifest.name, software=SOFTWARE_VERSION,
        saved_at=saved_at, version=version, generation=generation, checkpoint=checkpoint,
        files=tuple(_file_list(target)),
    )  # fmt: skip


def _remove_password(folder: RunFolder, target: Path, location: PostgresqlLocation) -> None:
    """Rewrite the copy of run.toml without the secrets in the address of its database."""
    copied = RunFolder(target)
    text = copied.settings.read_text(encoding="utf-8-sig")
    copied.settings.write_text(text.replace(location.url, location.public_url), encoding="utf-8")
    if load_settings(copied).coordinator.store != location.public_url:
        raise ConfigurationError(
            f"{folder.settings} has the password of [coordinator] store written with escapes, so "
            "that it cannot be left out of the backup; write it plainly, or into ~/.pgpass"
        )


def _copy_checkpoint(
    folder: RunFolder, manifest: Manifest, records: Collection[CheckpointRecord], target: Path
) -> Version | None:
    """Copy the newest checkpoint that the copied database knows and whose copy verifies."""
    source, copied = (
        CheckpointFolder.of_run(home, manifest) for home in (folder, RunFolder(target))
    )
    for record in records:
        if record.version not in source.versions():
            continue
        into = copied.folder(record.version)
        try:
            for path in sorted(source.folder(record.version).iterdir()):
                _copy(path, into / path.name)
            if copied.verify(record.version) == record:
                return record.version
        except (OSError, StorageError):
            # Damaged, or pruned while it was copied.
            pass
        shutil.rmtree(into, ignore_errors=True)
    return None


def _copy(path: Path, target: Path, private: bool = False) -> None:
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with path.open("rb") as source:
        descriptor = os.open(
            target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_MODE if private else 0o644
        )
        with os.fdopen(descriptor, "wb") as copy:
            shutil.copyfileobj(source, copy)


def _file_list(folder: Path) -> Iterator[SavedFile]:
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        name = str(PurePosixPath(path.relative_to(folder)))
        yield SavedFile(path=name, bytes=path.stat().st_size, sha256=file_sha256(path))


# ---------------------------------------------------------------- verifying one


def is_backup(path: Path) -> bool:
    """Whether a folder is a backup, by the file that describes it."""
    return RunFolder(path).backup_summary.is_file()


def read_summary(path: Path) -> BackupSummary:
    """Read what a backup states of itself.

    UsageError: not a backup; VersionError: of another release; StorageError: damaged.
    """
    summary = RunFolder(path).backup_summary
    if not is_backup(path):
        raise UsageError(
            f"{path} is not a backup (it has no {summary.name}); make one with "
            "`swarm-coordinator backup RUN_DIR OUT`"
        )
    try:
        return BackupSummary.model_validate_json(read_bytes(summary))
    except ValidationError as error:
        if any(detail["loc"] == ("format",) for detail in error.errors()):
            raise VersionError(
                f"the backup {path} is of another release of swarm-coordinator; use the release "
                "that made it"
            ) from error
        raise StorageError(f"the backup {path} is damaged: {summary.name}") from error


def verify_backup(path: Path) -> BackupSummary:
    """Read the whole backup; StorageError names every difference from what was saved."""
    summary = read_summary(path)
    problems: list[str] = []
    for saved in summary.files:
        file = path / saved.path
        try:
            size = file.stat().st_size
            if not file.is_file():  # a pipe or a device, of which a read may never end
                problems.append(f"{saved.path} is not a file")
            elif size != saved.bytes:
                problems.append(f"{saved.path} has {size} bytes and had {saved.bytes}")
            elif file_sha256(file) != saved.sha256:
                problems.append(f"{saved.path} has another hash")
        except OSError as error:
            problems.append(f"{saved.path} cannot be read ({error.strerror})")
    database = RunFolder(path).database
    if not problems and database.exists():
        problems = database_problems(database, _shape(path))
    if problems:
        raise StorageError(
            f"the backup {path} is damaged ({'; '.join(problems[:20])}); take another one"
        )
    return summary


def _shape(path: Path) -> StepShape | None:
    """Return the manifest's step shape; None without the key, which its signature needs."""
    folder = RunFolder(path)
    if not folder.organiser_key.exists():
        return None
    return StepShape.of(load_manifest(folder))


# ---------------------------------------------------------------- the list of backups


def _record_backup(folder: RunFolder, out: Path) -> None:
    paths = [str(out.resolve()), *(str(path) for path in recorded_backups(folder))]
    content = json.dumps(list(dict.fromkeys(paths))[:MAX_RECORDED_BACKUPS], indent=1)
    write_atomically(folder.path / "backups.json", content.encode())


def recorded_backups(folder: RunFolder) -> list[Path]:
    """Return the paths of this run's backups, the newest first, whether they still exist or not."""
    try:
        listed = json.loads((folder.path / "backups.json").read_bytes())
    except (OSError, ValueError):
        return []
    paths = listed if isinstance(listed, list) else []
    return [Path(path) for path in paths if isinstance(path, str)]


def find_backup(folder: RunFolder) -> tuple[Path, BackupSummary] | None:
    """Return the newest backup of this run that exists and verifies, and its path."""
    for path in recorded_backups(folder):
        try:
            return path, verify_backup(path)
        except SwarmError:
            continue  # gone, damaged, or of another release
    return None
