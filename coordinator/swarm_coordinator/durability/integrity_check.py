"""Integrity check of a run folder: what is damaged, and what the run can continue from.

Owns the check of every part of the folder (settings, key, manifest, data, database, checkpoints),
the search for the last good version of a damaged part, and the command that restores it. The rows
of a database are checked by `durability.journal_audit`, a checkpoint's hashes by
`run_dir.checkpoint_files`, the files of a backup by `durability.backup`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.durability.backup import find_backup
from swarm_coordinator.durability.journal_audit import StepShape, check_database
from swarm_coordinator.durability.run_files import database_location, load_manifest, load_settings
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.folder import RunFolder, quoted
from swarm_coordinator.storage.location import (
    DatabaseLocation,
    check_pages,
    database_exists,
    open_for_reading,
)
from swarm_coordinator.storage.records import read_checkpoints, read_restored
from swarm_coordinator.storage.sqlite import DatabaseDamaged
from swarm_shared.base.errors import StorageError, SwarmError
from swarm_shared.base.types import Version
from swarm_shared.identity.signed_manifest import run_id_of
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
        problems = "; ".join(finding.problem for finding in self.findings)
        return "; ".join([problems, *self.offers])


def check_run(
    folder: RunFolder, on_verified: Callable[[str], None] = lambda line: None
) -> RunCheck:
    """Check everything. `on_verified` is called with a line for each part that is intact."""
    good: list[str] = []
    findings: list[IntegrityFinding] = []

    def report(line: str) -> None:
        good.append(line)
        on_verified(line)

    manifest = _check_description(folder, report, findings)
    if manifest is not None:
        _check_data(folder, manifest, report, findings)
        known = _check_database(folder, manifest, None, report, findings)
        _check_checkpoints(folder, manifest, known, report, findings)
    return RunCheck(tuple(good), tuple(findings), tuple(_offers(folder, manifest, findings)))


def check_start(folder: RunFolder, manifest: Manifest) -> tuple[CheckpointRecord | None, RunCheck]:
    """Check what a start depends on: the database, and the newest checkpoint on disk.

    The start begins from the verified checkpoint that is returned, so it is hashed only once.
    """
    findings: list[IntegrityFinding] = []
    known = _check_database(folder, manifest, RECENT_DECISIONS, lambda line: None, findings)
    checkpoint = None
    if not findings and known:
        checkpoints = _checkpoint_folder(folder, manifest)
        there = [v for v in checkpoints.versions() if Version(v) in known]
        if there:
            try:
                checkpoint = _checked(checkpoints, Version(there[0]), known)
            except StorageError as error:
                findings.append(IntegrityFinding("checkpoint", str(error), there[0]))
    return checkpoint, RunCheck((), tuple(findings), tuple(_offers(folder, manifest, findings)))


# ---------------------------------------------------------------- the parts


def _check_description(
    folder: RunFolder, report: Callable[[str], None], findings: list[IntegrityFinding]
) -> Manifest | None:
    try:
        load_settings(folder)
        report("run.toml can be read")
    except SwarmError as error:
        findings.append(IntegrityFinding("run.toml", str(error)))
    try:
        manifest = load_manifest(folder)
    except SwarmError as error:
        findings.append(IntegrityFinding("manifest.json", str(error)))
        return None
    report("manifest.json is signed with organiser.key")
    return manifest


def _check_data(
    folder: RunFolder,
    manifest: Manifest,
    report: Callable[[str], None],
    findings: list[IntegrityFinding],
) -> None:
    # Imported here, because a start needs neither numpy nor the tokenizer.
    from swarm_shared.data.shards import verify_shard
    from swarm_shared.data.tokenizer import load_tokenizer

    data = manifest.data
    try:
        load_tokenizer(data.tokenizer, folder.tokenizer, data.tokenizer_sha256)
        for shard in data.shards:
            verify_shard(
                folder.data / shard.name, shard, data.token_bytes, manifest.model.vocabulary_size
            )
    except SwarmError as error:
        findings.append(IntegrityFinding("data", str(error)))
    else:
        report(f"{len(data.shards)} files of training data have the manifest's hashes")


def _check_database(
    folder: RunFolder,
    manifest: Manifest,
    newest: int | None,
    report: Callable[[str], None],
    findings: list[IntegrityFinding],
) -> dict[Version, CheckpointRecord]:
    """Return the checkpoints that the database lists; none when it is damaged."""
    try:
        location = database_location(folder)
    except SwarmError:
        return {}  # run.toml names the database, and has a finding of its own
    try:
        if not database_exists(location):
            report("there is no database yet: the run has not been started")
            return {}
        problems = database_problems(location, step_shape(manifest), newest)
        if not problems:
            with open_for_reading(location) as connection:
                restored = read_restored(connection)
                known = {record.version: record for record in read_checkpoints(connection)}
            report(
                f"the database is whole: {restored.version} steps, generation {restored.generation}"
            )
            return known
        problem = f"the run's database {location} is damaged ({'; '.join(problems)})"
    except DatabaseDamaged as error:
        problem = f"the run's database {location} is damaged ({error.detail})"
    except SwarmError as error:
        problem = str(error)
    findings.append(IntegrityFinding("database", problem))
    return {}


def database_problems(
    location: DatabaseLocation, shape: StepShape | None, newest: int | None = None
) -> list[str]:
    """Return what SQLite's own check or the audit of the journal finds wrong."""
    problems = check_pages(location, thorough=newest is None)
    if problems:
        return problems
    with open_for_reading(location) as connection:
        return check_database(connection, shape, newest)


def step_shape(manifest: Manifest) -> StepShape:
    return StepShape(manifest.stage_count, manifest.training.microbatches_per_step)


def _checkpoint_folder(folder: RunFolder, manifest: Manifest) -> CheckpointFolder:
    return CheckpointFolder(folder.checkpoints, run_id_of(manifest), manifest.stage_count, keep=1)


def _check_checkpoints(
    folder: RunFolder,
    manifest: Manifest,
    known: dict[Version, CheckpointRecord],
    report: Callable[[str], None],
    findings: list[IntegrityFinding],
) -> None:
    checkpoints = _checkpoint_folder(folder, manifest)
    for version in checkpoints.versions():
        try:
            _checked(checkpoints, Version(version), known)
        except StorageError as error:
            if version in checkpoints.versions():  # otherwise it was pruned meanwhile
                findings.append(IntegrityFinding("checkpoint", str(error), version))
        else:
            report(f"the checkpoint of step {version} has the hashes that it was written with")
    there = checkpoints.versions()
    if known and max(known) not in there:
        newest = checkpoints.folder(max(known))
        findings.append(IntegrityFinding("checkpoint", f"the checkpoint {newest} is missing", None))


def _checked(
    checkpoints: CheckpointFolder, version: Version, known: dict[Version, CheckpointRecord]
) -> CheckpointRecord:
    record = checkpoints.verify(version)
    if version in known and record != known[version]:
        raise StorageError(
            f"the checkpoint {checkpoints.folder(version)} is not the one that the database lists"
        )
    return record


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
            yield (
                f"the last good backup is {backup.path}, of step {backup.version}: "
                f"`swarm-coordinator restore {quoted(backup.path)} {run_dir} --force` "
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
    checkpoints = _checkpoint_folder(folder, manifest)
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
    manifest = load_manifest(folder)
    for finding in check.findings:
        if finding.version is not None:
            moved.append(_checkpoint_folder(folder, manifest).set_aside(finding.version))
        elif finding.part == "database":
            moved.extend(folder.set_database_aside())
    return moved


def refuse_damage(check: RunCheck) -> None:
    """Raise StorageError with what is damaged and what the run can continue from, if anything
    is."""
    if check.findings:
        raise StorageError(check.sentence)
