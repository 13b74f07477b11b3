"""Checkpoints on disk: whole or not there, verified, pruned, never lost to a failed one."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.run_dir.checkpoint_files import SUMMARY_NAME, CheckpointFolder, item_name
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import RunId, StageIndex, Version

RUN = RunId("ab" * 32)


def content_of(version: int, stage: int) -> bytes:
    return f"stage {stage} at {version}".encode()


def folder_at(path: Path, keep: int = 2) -> CheckpointFolder:
    return CheckpointFolder(path / "checkpoints", RUN, stages=2, keep=keep)


def store(folder: CheckpointFolder, version: int) -> CheckpointRecord:
    files = {}
    for stage in (StageIndex(0), StageIndex(1)):
        content = content_of(version, stage)
        folder.partial_path(version, stage).write_bytes(content)
        files[stage] = (len(content), hashlib.sha256(content).hexdigest())
    return folder.complete(Version(version), files)


def test_a_stored_checkpoint_is_found_with_its_hashes(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    record = store(folder, 20)
    assert folder.latest_valid() == record
    assert [s.item for s in record.stages] == ["checkpoint/20/0", "checkpoint/20/1"]
    path = folder.path_of(item_name(20, 1))
    assert path is not None
    assert path.read_bytes() == content_of(20, 1)
    summary = json.loads((folder.folder(20) / SUMMARY_NAME).read_text())
    assert summary["version"] == 20
    assert [s["bytes"] for s in summary["stages"]] == [len(content_of(20, 0))] * 2


def test_there_is_none_in_a_new_run(tmp_path: Path) -> None:
    assert folder_at(tmp_path).latest_valid() is None
    assert folder_at(tmp_path).versions() == []


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    folder = folder_at(tmp_path, keep=2)
    for version in (10, 20, 30, 40):
        store(folder, version)
    assert folder.versions() == [40, 30, 20, 10]
    folder.prune(Version(40))
    assert folder.versions() == [40, 30]
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == [
        "step-00000030", "step-00000040",
    ]  # fmt: skip


def test_the_newest_stays_however_few_are_kept(tmp_path: Path) -> None:
    folder = folder_at(tmp_path, keep=0)
    store(folder, 10)
    store(folder, 20)
    folder.prune(Version(20))
    assert folder.versions() == [20]


@pytest.mark.parametrize("damage", ["bytes", "size", "missing", "summary"])
def test_a_damaged_checkpoint_is_skipped_and_named(tmp_path: Path, damage: str) -> None:
    folder = folder_at(tmp_path)
    older = store(folder, 10)
    store(folder, 20)
    victim = folder.stage_files(20)[1]
    if damage == "bytes":
        victim.write_bytes(b"X" + content_of(20, 1)[1:])
    elif damage == "size":
        victim.write_bytes(content_of(20, 1) + b"X")
    elif damage == "missing":
        victim.unlink()
    else:
        (folder.folder(20) / SUMMARY_NAME).write_text("{")
    notes: list[str] = []
    assert folder.latest_valid(notes.append) == older
    assert len(notes) == 1
    assert "step-00000020" in notes[0]
    assert "an older checkpoint is used" in notes[0]


def test_a_checkpoint_without_its_summary_is_none(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    older = store(folder, 10)
    store(folder, 20)
    (folder.folder(20) / SUMMARY_NAME).unlink()
    assert folder.latest_valid() == older


def test_a_checkpoint_of_another_run_is_not_taken(tmp_path: Path) -> None:
    store(folder_at(tmp_path), 10)
    other = CheckpointFolder(tmp_path / "checkpoints", RunId("cd" * 32), stages=2, keep=2)
    notes: list[str] = []
    assert other.latest_valid(notes.append) is None
    assert "another run" in notes[0]


def test_only_those_of_the_runs_own_history_count(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    known = store(folder, 10)
    store(folder, 20)
    assert folder.latest_valid(known={known.version: known}) == known
    notes: list[str] = []
    changed = CheckpointRecord(Version(10), ())
    assert folder.latest_valid(notes.append, {Version(10): changed}) is None
    assert "not the one that the database lists" in notes[0]


def test_a_version_written_again_after_a_rollback_replaces_the_old_one(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    for version in (10, 20, 30):
        store(folder, version)
    # Rolled back to 10: 20 and 30 belong to a history that is no more.
    again = store(folder, 20)
    assert folder.versions() == [20, 10]
    assert folder.latest_valid() == again


def test_a_failed_checkpoint_leaves_the_older_one_and_frees_its_space(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    older = store(folder, 10)
    folder.partial_path(20, 0).write_bytes(b"half of it")
    assert folder.latest_valid() == older
    folder.discard_partial(20)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000010"]


def test_what_an_earlier_start_left_is_cleared(tmp_path: Path) -> None:
    folder = folder_at(tmp_path)
    store(folder, 10)
    folder.partial_path(20, 0).write_bytes(b"half of it")
    folder.partial_path(30, 1).write_bytes(b"half of it")
    folder.discard_all_partial()
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["step-00000010"]


def test_a_folder_that_cannot_be_made_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match="cannot write"):
        folder_at(tmp_path).partial_path(20, 0)


@pytest.mark.parametrize(
    "item", ["checkpoint/20/2", "checkpoint/20/../0", "checkpoint/-1/0", "checkpoint/20", "x", ""]
)
def test_only_stored_stages_have_a_path(tmp_path: Path, item: str) -> None:
    folder = folder_at(tmp_path)
    store(folder, 20)
    assert folder.path_of(item) is None
