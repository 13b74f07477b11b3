"""Checkpoints in the run folder: hashed, complete, and never replaced by an incomplete one.

    checkpoints/step-00000050/stage-0.safetensors …   the stages' files, hash-checked by `transfer`
    checkpoints/step-00000050/checkpoint.json         sizes and hashes, written last
    checkpoints/step-00000050.partial/                while it is being fetched
    checkpoints/step-00000050.deleted.partial/        while it is being deleted

A checkpoint appears by renaming its folder, so that it exists completely or not at all. Owns the
folder, its pruning and its verification. The pure core decides when a checkpoint is made
(`core.rules.checkpoints`); `swarm_shared.transfer.transfer` fetches it.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import Field, ValidationError

from swarm_coordinator.core.events import CheckpointRecord, StoredStage
from swarm_coordinator.run_dir.folder import RunFolder, disk_errors
from swarm_coordinator.run_dir.state_files import stage_file_name, verify_file
from swarm_shared.base.atomic_file import sync_folder, write_atomically
from swarm_shared.base.errors import StorageError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import RunId, StageIndex, Version
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.run.manifest import Manifest

SUMMARY_NAME = "checkpoint.json"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_PARTIAL = ".partial"
_ITEM = re.compile(r"checkpoint/(\d{1,15})/(\d{1,6})")
_MAX_SUMMARY_BYTES = 16 * 2**20


class StageFile(FrozenModel):
    """One stage in checkpoint.json."""

    stage: StageIndex = Field(ge=0)
    file: str = Field(pattern=r"^stage-\d{1,6}\.safetensors$")
    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class CheckpointSummary(FrozenModel):
    """The content of checkpoint.json."""

    format: int = Field(ge=1, le=1)
    run: RunId
    version: Version = Field(ge=0)
    stages: tuple[StageFile, ...] = Field(min_length=1)

    def record(self) -> CheckpointRecord:
        return CheckpointRecord(
            self.version,
            tuple(
                StoredStage(s.stage, item_name(self.version, s.stage), s.bytes, s.sha256)
                for s in self.stages
            ),
        )


def item_name(version: int, stage: int) -> str:
    """Return the name under which a volunteer fetches a stored stage."""
    return f"checkpoint/{version}/{stage}"


class CheckpointFolder:
    """The `checkpoints` folder of one run. All methods block on the disk."""

    def __init__(self, root: Path, run: RunId, stages: int, keep: int) -> None:
        self._root = root
        self._run = run
        self._stages = stages
        self._keep = max(1, keep)

    @classmethod
    def of_run(cls, folder: RunFolder, manifest: Manifest, keep: int = 1) -> CheckpointFolder:
        """The checkpoints in a run's folder."""
        return cls(folder.checkpoints, run_id_of(manifest), manifest.stage_count, keep)

    def folder(self, version: int) -> Path:
        return self._root / f"step-{version:08d}"

    def partial_path(self, version: int, stage: int) -> Path:
        """Return the path to which a stage is fetched, and make its folder."""
        folder = self._partial(version)
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        return folder / stage_file_name(stage)

    def complete(
        self, version: Version, files: Mapping[StageIndex, tuple[int, str]]
    ) -> CheckpointRecord:
        """Make the checkpoint of the stages (bytes, sha256) in its partial folder.

        Checkpoints of a higher version are deleted: they belong to a history that was rolled back.
        """
        assert sorted(files) == list(range(self._stages)), "every stage once"
        summary = CheckpointSummary(
            format=1, run=self._run, version=version,
            stages=tuple(
                StageFile(stage=stage, file=stage_file_name(stage), bytes=size, sha256=digest)
                for stage, (size, digest) in sorted(files.items())
            ),
        )  # fmt: skip
        partial, final = self._partial(version), self.folder(version)
        write_atomically(partial / SUMMARY_NAME, summary.model_dump_json(indent=2).encode())
        if final.exists():
            # It belongs to a history that was rolled back.
            self._discard(final)
        with disk_errors(final):
            partial.rename(final)
        sync_folder(self._root)
        for later in (there for there in self.versions() if there > version):
            self._discard(self.folder(later))
        return summary.record()

    def prune(self, newest: Version) -> None:
        """Delete all but the newest `keep` checkpoints up to `newest`.

        Only when the database lists `newest`: after a power cut in between, the run would have no
        checkpoint that both the database and the folder have.
        """
        older = [version for version in self.versions() if version < newest]
        for version in older[self._keep - 1 :]:
            self._discard(self.folder(version))

    def discard_partial(self, version: int) -> None:
        """Delete the partial folder of a checkpoint that failed."""
        shutil.rmtree(self._partial(version), ignore_errors=True)

    def discard_all_partial(self) -> None:
        """Delete checkpoints that an earlier start was fetching or deleting when it ended.

        Of the former, peers hold newer state by now."""
        for folder in self._root.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(folder, ignore_errors=True)

    def path_of(self, item: str) -> Path | None:
        """Return the file of an item name, or None."""
        match = _ITEM.fullmatch(item)
        if match is None:
            return None
        path = self.folder(int(match[1])) / stage_file_name(int(match[2]))
        return path if path.is_file() else None

    def versions(self) -> list[int]:
        """Return the versions of all complete checkpoints, damaged or not, the newest first."""
        found = []
        if self._root.is_dir():
            for path in self._root.iterdir():
                match = _STEP_FOLDER.fullmatch(path.name)
                if match and (path / SUMMARY_NAME).is_file():
                    found.append(int(match[1]))
        return sorted(found, reverse=True)

    def latest_valid(
        self,
        note: Callable[[str], None] = lambda text: None,
        known: Mapping[Version, CheckpointRecord] | None = None,
    ) -> CheckpointRecord | None:
        """Return the newest checkpoint that verifies, or None.

        Damaged ones are skipped, and `note` is called with a sentence about each. With `known` only
        checkpoints of the run's own history are considered.
        """
        for version in self.versions():
            if known is not None and Version(version) not in known:
                continue
            try:
                return self.verify(version, known)
            except StorageError as error:
                note(f"{error}; an older checkpoint is used instead")
        return None

    def verify(
        self, version: int, known: Mapping[Version, CheckpointRecord] | None = None
    ) -> CheckpointRecord:
        """Read and hash every file of one checkpoint; StorageError names what is damaged, or that
        `known` has another one of this version."""
        folder = self.folder(version)
        summary = self._read_summary(folder)
        if summary.version != version or summary.run != self._run:
            raise StorageError(f"the checkpoint {folder} belongs to another run or step")
        if [s.stage for s in summary.stages] != list(range(self._stages)):
            raise StorageError(f"the checkpoint {folder} does not have every stage")
        for stage in summary.stages:
            verify_file(folder / stage.file, stage.bytes, stage.sha256)
        record = summary.record()
        if (known or {}).get(Version(version), record) != record:
            raise StorageError(f"the checkpoint {folder} is not the one that the database lists")
        return record

    def set_aside(self, version: int) -> Path:
        """Rename a damaged checkpoint, so that an older one is used; return its new path."""
        folder = self.folder(version)
        for number in itertools.count():
            aside = folder.with_name(f"damaged-{folder.name}" + (f"-{number}" if number else ""))
            if not aside.exists():
                break
        with disk_errors(folder):
            folder.rename(aside)
        sync_folder(self._root)
        return aside

    def stage_files(self, version: int) -> list[Path]:
        """Return the files of a checkpoint, in the order of the stages."""
        return [self.folder(version) / stage_file_name(stage) for stage in range(self._stages)]

    def _partial(self, version: int) -> Path:
        return self._root / f"step-{version:08d}{_PARTIAL}"

    def _read_summary(self, folder: Path) -> CheckpointSummary:
        path = folder / SUMMARY_NAME
        try:
            with path.open("rb") as file:
                content = file.read(_MAX_SUMMARY_BYTES)
            return CheckpointSummary.model_validate_json(content)
        except OSError as error:
            raise StorageError(f"the checkpoint {folder} cannot be read: {error}") from error
        except ValidationError as error:
            raise StorageError(f"the checkpoint {folder} is damaged: {path.name}") from error

    def _discard(self, folder: Path) -> None:
        # Renamed first: a half-deleted folder is not a checkpoint, and the next start deletes it.
        doomed = folder.with_name(f"{folder.name}.deleted{_PARTIAL}")
        with disk_errors(folder):
            folder.rename(doomed)
        sync_folder(self._root)
        shutil.rmtree(doomed, ignore_errors=True)
