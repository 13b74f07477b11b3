"""Integrity check of a run folder: what is damaged, and what the run can continue from.

Owns the check of every part of the folder (settings, key, manifest, data, database, checkpoints),
the search for the last good version of a damaged part, and the command that restores it. The rows
of a database are checked by `durability.journal_audit`, a checkpoint's hashes by
`run_dir.checkpoint_files`, the files of a backup by `durability.backup`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.durability.backup import find_backup
from swarm_coordinator.durability.journal_audit import StepShape, database_problems
from swarm_coordinator.durability.run_files import database_location, load_manifest, load_settings
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.run_dir.initial_states import verify_initial_states
from swarm_coordinator.storage.database import database_exists, open_for_reading
from swarm_coordinator.storage.records import read_checkpoints, read_restored
from swarm_coordinator.storage.sqlite import DatabaseDamaged
from swarm_shared.base.errors import StorageError, SwarmError, VersionError
from swarm_shared.base.types import Version
from swarm_shared.run.manifest import Manifest

RECENT_DECISIONS = 1000
"""Number of last journal entries that a start reads again; `verify` reads all of them."""


@dataclass(frozen=True, slots=True)
class IntegrityFinding:
    """A part of the run folder that is not as it was written."""

    part: str
    """`database`, `checkpoint`, or the file's name."""
    problem: str
    version: int | None = None
    """Version of a damaged checkpoint."""


@dataclass(frozen=True, slots=True)
class RunCheck:
    """Result of a check."""

    good: tuple[str, ...]
    findings: tuple[IntegrityFinding, ...]
    offers: tuple[str, ...]
    """What the run can continue from, each with its command."""

    @property
    def sentence(self) -> str:
        """All findings and offers as one sentence."""
        problems = "; ".join(finding.problem for finding in self.findings)
        return "; ".join([problems, *self.offers])


def check_run(
    folder: RunFolder, on_verified: Callable[[str], None] = lambda line: None
) -> RunCheck:
    """Check everything. `on_verified` is called with a line for each part that is intact."""
    inspection = _Inspection(folder, on_verified)
    manifest = inspection.check_description()
    if manifest is not None:
        inspection.check_data(manifest)
        records = inspection.check_database(manifest, None)
        inspection.check_initial_states(manifest)
        inspection.check_checkpoints(manifest, records)
    return inspection.result(manifest)


def check_start(folder: RunFolder, manifest: Manifest) -> tuple[CheckpointRecord | None, RunCheck]:
    """Check what a start depends on: the database, and the newest checkpoint on disk or, before
    there is one, the states of version 0. These have what is frozen where adapters are trained, so
    that every newcomer needs them.

    The start begins from the verified checkpoint that is returned, so it is hashed only once.
    """
    inspection = _Inspection(folder, lambda line: None)
    records = inspection.check_database(manifest, RECENT_DECISIONS)
    checkpoints = CheckpointFolder.of_run(folder, manifest)
    checkpoint = None
    for version in [v for v in checkpoints.versions() if Version(v) in records][:1]:
        with inspection.finding("checkpoint", version):
            checkpoint = checkpoints.verify(version, records)
    if not records or manifest.model.has_adapters:
        inspection.check_initial_states(manifest)
    return checkpoint, inspection.result(manifest)


# ---------------------------------------------------------------- the parts


class _Inspection:
    """A check in progress, and what it has found so far."""

    def __init__(self, folder: RunFolder, on_verified: Callable[[str], None]) -> None:
        self._folder = folder
        self._on_verified = on_verified
        self._good: list[str] = []
        self._findings: list[IntegrityFinding] = []

    def result(self, manifest: Manifest | None) -> RunCheck:
        offers = _offers(self._folder, manifest, self._findings)
        return RunCheck(tuple(self._good), tuple(self._findings), tuple(offers))

    @contextlib.contextmanager
    def finding(self, part: str, version: int | None = None) -> Iterator[None]:
        """Make a finding of an error of the block. What another release has written is whole."""
        try:
            yield
        except VersionError:
            raise
        except SwarmError as error:
            self._findings.append(IntegrityFinding(part, str(error), version))

    def _report(self, line: str) -> None:
        self._good.append(line)
        self._on_verified(line)

    def check_description(self) -> Manifest | None:
        with self.finding("run.toml"):
            load_settings(self._folder)
            self._report("run.toml can be read")
        with self.finding("manifest.json"):
            manifest = load_manifest(self._folder)
            self._report("manifest.json is signed with organiser.key")
            return manifest
        return None

    def check_data(self, manifest: Manifest) -> None:
        # Imported here, because a start needs neither numpy nor the tokenizer.
        from swarm_shared.data.shards import check_tree, verify_shard
        from swarm_shared.data.tokenizer import load_tokenizer

        folder, data = self._folder, manifest.data
        with self.finding("data"):
            load_tokenizer(data.tokenizer, folder.tokenizer, data.tokenizer_sha256)
            for shard in data.shards:
                path, ids = folder.data / shard.name, manifest.model.vocabulary_size
                tree = verify_shard(path, shard, data.token_bytes, ids)
                check_tree(path, tree)
            self._report(f"{len(data.shards)} files of training data have the manifest's hashes")

    def check_database(
        self, manifest: Manifest, newest: int | None
    ) -> dict[Version, CheckpointRecord]:
        """Return the checkpoints that the database lists; none when it is damaged."""
        try:
            location = database_location(self._folder)
        except SwarmError:
            return {}  # run.toml names the database, and has a finding of its own
        with self.finding("database"):
            if not database_exists(location):
                self._report("there is no database yet: the run has not been started")
                return {}
            try:
                problems = database_problems(location, StepShape.of(manifest), newest)
            except DatabaseDamaged as error:
                problems = [error.detail]
            if problems:
                raise StorageError(
                    f"the run's database {location} is damaged ({'; '.join(problems)})"
                )
            with open_for_reading(location) as connection:
                restored, records = read_restored(connection), read_checkpoints(connection)
            self._report(
                f"the database is whole: {restored.version} steps, generation {restored.generation}"
            )
            return records
        return {}

    def check_initial_states(self, manifest: Manifest) -> None:
        if not manifest.initial:
            return
        with self.finding("initial"):
            verify_initial_states(self._folder, manifest)
            self._report(f"{len(manifest.initial)} states of version 0 have the manifest's hashes")

    def check_checkpoints(
        self, manifest: Manifest, records: dict[Version, CheckpointRecord]
    ) -> None:
        checkpoints = CheckpointFolder.of_run(self._folder, manifest)
        for version in checkpoints.versions():
            with self.finding("checkpoint", version):
                try:
                    checkpoints.verify(version, records)
                except StorageError:
                    if version not in checkpoints.versions():
                        continue  # it was pruned meanwhile
                    raise
                self._report(
                    f"the checkpoint of step {version} has the hashes that it was written with"
                )
        if records and max(records) not in checkpoints.versions():
            newest = checkpoints.folder(max(records))
            self._findings.append(
                IntegrityFinding("checkpoint", f"the checkpoint {newest} is missing")
            )


# ---------------------------------------------------------------- what to continue from


def _offers(
    folder: RunFolder, manifest: Manifest | None, findings: list[IntegrityFinding]
) -> Iterator[str]:
    damaged = {finding.part for finding in findings}
    if not damaged:
        return
    run_dir = quoted(folder.path)
    set_aside = f"`swarm-coordinator verify {run_dir} --set-aside`"
    if damaged - {"checkpoint"}:
        backup = find_backup(folder)
        if backup is not None:
            path, summary = backup
            yield (
                f"the last good backup is {path}, of step {summary.version}: "
                f"`swarm-coordinator restore {quoted(path)} {run_dir} --force` "
                "restores it"
            )
        else:
            yield "no backup of this run is known here that could be restored"
    good = None if manifest is None else _last_good(folder, manifest, findings)
    if "database" in damaged:
        after = "its beginning" if good is None else f"its checkpoint of step {good}"
        yield (
            f"{set_aside} moves the database away; without it the run continues from {after}, and "
            "its history, tokens and bans are lost"
        )
    elif any(finding.version is not None for finding in findings):
        what = "none is left" if good is None else f"the last good one is that of step {good}"
        yield (
            f"{what}; {set_aside} moves the damaged one away, and the next start continues "
            "without it"
        )


def _last_good(
    folder: RunFolder, manifest: Manifest, findings: list[IntegrityFinding]
) -> int | None:
    checkpoints = CheckpointFolder.of_run(folder, manifest)
    bad = {finding.version for finding in findings}
    for version in checkpoints.versions():
        if version not in bad:
            try:
                checkpoints.verify(version)
            except StorageError:
                continue
            return version
    return None


def set_aside(folder: RunFolder, check: RunCheck) -> list[Path]:
    """Move damaged parts that the run can do without aside; return their new paths."""
    moved: list[Path] = []
    checkpoints = CheckpointFolder.of_run(folder, load_manifest(folder))
    for finding in check.findings:
        if finding.version is not None:
            moved.append(checkpoints.set_aside(finding.version))
        elif finding.part == "database":
            moved.extend(folder.set_database_aside())
    return moved


def refuse_damage(check: RunCheck) -> None:
    """Raise StorageError with what is damaged and what the run can continue from, if anything
    is."""
    if check.findings:
        raise StorageError(check.sentence)
