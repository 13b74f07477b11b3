"""verify, backup and restore: what is broken is named, and the last good one is what it was."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import trio

from kits.coordinator.run import flip_byte, one_start, put_checkpoint, step, with_a_past
from kits.coordinator.shell_world import make_run
from swarm_coordinator.cli.main import run
from swarm_coordinator.durability import restore
from swarm_coordinator.durability.backup import make_backup, recorded_backups, verify_backup
from swarm_coordinator.durability.restore import restore_backup
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.records import LARGEST_GENERATION, generation_floor
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.errors import StorageError, UsageError

DAY_UNIX_SECONDS = 1_800_000_000.0


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("template") / "a run"
    with_a_past(make_run(path, steps=50))
    return path


@pytest.fixture
def folder(template: Path, tmp_path: Path) -> RunFolder:
    shutil.copytree(template, tmp_path / "a run")
    return RunFolder.open(tmp_path / "a run")


def says(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    code = run([str(word) for word in words])
    out, error = capsys.readouterr()
    return code, out, error


# ---------------------------------------------------------------- verify


def test_a_run_that_nobody_touched_is_found_whole(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, error = says(capsys, "verify", folder.path)
    assert (code, error) == (0, "")
    for part in ("run.toml", "manifest.json", "training data", "5 steps, generation 2",
                 "checkpoint of step 4", "checkpoint of step 2"):  # fmt: skip
        assert part in out
    document = json.loads(says(capsys, "verify", folder.path, "--json")[1])
    assert (document["good"], document["damaged"]) == (True, [])


def newest_stage(folder: RunFolder) -> Path:
    return folder.checkpoints / "step-00000004" / "stage-1.safetensors"


def overwrite_pages(folder: RunFolder) -> None:
    content = bytearray(folder.database.read_bytes())
    content[3 * 4096 : 6 * 4096] = b"\xa5" * (3 * 4096)
    folder.database.write_bytes(content)


def change_a_loss(folder: RunFolder) -> None:
    connection = sqlite3.connect(folder.database, isolation_level=None)
    connection.execute("UPDATE applied_steps SET loss = 1.0 WHERE step = 3")
    connection.close()


DAMAGES: list[tuple[Callable[[RunFolder], object], str, list[str]]] = [
    (lambda f: flip_byte(newest_stage(f)), "checkpoint",
     ["step-00000004/stage-1.safetensors is damaged (its hash is wrong)", "that of step 2"]),
    (lambda f: newest_stage(f).write_bytes(b"short"), "checkpoint",
     ["stage-1.safetensors is damaged (its size is wrong)", "that of step 2"]),
    (lambda f: newest_stage(f).unlink(), "checkpoint", ["cannot be read", "that of step 2"]),
    (lambda f: (f.checkpoints / "step-00000004" / "checkpoint.json").write_text("{"),
     "checkpoint", ["is damaged: checkpoint.json", "that of step 2"]),
    (overwrite_pages, "database", ["coordinator.sqlite is damaged", "from its checkpoint of step"]),
    (change_a_loss, "database", ["table applied_steps: row 3 is not what was written"]),
    (lambda f: f.database.write_bytes(b"x" * 9000), "database", ["is damaged"]),
    (lambda f: flip_byte(f.manifest), "manifest.json", ["manifest.json is damaged"]),
    (lambda f: f.organiser_key.unlink(), "manifest.json", ["lost its organiser.key"]),
    (lambda f: f.settings.write_text("[run]\nnmae = 1"), "run.toml", ["no setting 'nmae'"]),
    (lambda f: flip_byte(next(f.data.glob("*.tokens"))), "data", ["is damaged"]),
    (lambda f: flip_byte(next(f.data.glob("*.tree")), 3), "data", ["tree is damaged; delete it"]),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "part", "words"), DAMAGES)
def test_what_is_damaged_is_named_with_what_to_go_on_with(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], damage, part, words
) -> None:
    damage(folder)
    code, out, error = says(capsys, "verify", folder.path)
    assert code == 7
    assert "DAMAGED: " in out
    for word in words:
        assert word in error
    document = json.loads(says(capsys, "verify", folder.path, "--json")[1])
    assert part in {found["part"] for found in document["damaged"]}


@pytest.mark.parametrize("damage", [DAMAGES[0][0], DAMAGES[3][0], overwrite_pages, change_a_loss])
def test_a_start_refuses_a_damaged_run_with_the_same_words(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], damage
) -> None:
    make_backup(folder, folder.path.parent / "saved")
    damage(folder)
    code, out, error = says(capsys, "start", folder.path)
    assert code == 7
    assert "serving" not in out
    assert "is damaged" in error
    assert "--set-aside" in error


def test_a_damaged_checkpoint_that_is_set_aside_is_gone_from_the_runs_way(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_byte(newest_stage(folder))
    code, out, error = says(capsys, "verify", folder.path, "--set-aside")
    assert (code, error) == (0, ""), error
    assert "damaged-step-00000004" in out
    assert sorted(p.name for p in folder.checkpoints.iterdir()) == [
        "damaged-step-00000004", "step-00000002",
    ]  # fmt: skip


def test_a_damaged_database_that_is_set_aside_is_kept_beside_the_run(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    overwrite_pages(folder)
    content = folder.database.read_bytes()
    code, _, error = says(capsys, "verify", folder.path, "--set-aside")
    assert (code, error) == (0, ""), error
    assert not folder.database.exists()
    assert (folder.path / "damaged-1-coordinator.sqlite").read_bytes() == content
    assert says(capsys, "verify", folder.path)[0] == 0


def test_what_a_run_cannot_do_without_is_not_set_aside(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = next(folder.data.glob("*.tokens"))
    flip_byte(shard)
    assert says(capsys, "verify", folder.path, "--set-aside")[0] == 7
    assert shard.exists()


def test_the_newest_backup_that_is_whole_is_offered(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("first", "second", "third"):
        make_backup(folder, folder.path.parent / name)
    flip_byte(folder.path.parent / "third" / "coordinator.sqlite", 5000)
    overwrite_pages(folder)
    _, _, error = says(capsys, "verify", folder.path)
    assert "the last good backup is" in error
    assert "second" in error
    assert "--force` restores it" in error
    offer = error[error.index("`swarm-coordinator restore") + 1 :]
    words = shlex.split(offer[: offer.index("`")])
    assert says(capsys, *words[1:])[0] == 0
    assert says(capsys, "verify", folder.path)[0] == 0


# ---------------------------------------------------------------- backup


def test_a_backup_holds_the_run_and_is_whole(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.path.parent / "saved"
    code, said, error = says(capsys, "backup", folder.path, out)
    assert (code, error) == (0, "")
    assert "at step 5 with the checkpoint of step 4" in said
    summary = verify_backup(out)
    assert (summary.version, summary.generation, summary.checkpoint) == (5, 2, 4)
    assert not (out / "checkpoints" / "step-00000002").exists()
    assert (out / "organiser.key").stat().st_mode & 0o777 == 0o600
    assert history(RunFolder(out).database) == history(folder.database)
    assert [p.name for p in out.parent.iterdir() if p.name.startswith(".")] == []
    assert recorded_backups(folder) == [out.resolve()]
    code, said, _ = says(capsys, "verify", out)
    assert (code, "the backup is whole" in said) == (0, True)
    assert says(capsys, "backup", folder.path, out)[0] == 2


def test_a_backup_without_key_and_data_is_one_and_says_so(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.path.parent / "saved"
    code, said, _ = says(capsys, "backup", folder.path, out, "--no-key", "--no-data")
    assert code == 0
    assert "organiser.key is not in the backup" in said
    assert not (out / "organiser.key").exists()
    assert not (out / "data").exists()
    verify_backup(out)


@pytest.mark.parametrize("with_key", [True, False])
@pytest.mark.parametrize("command", ["start", "refresh", "token create"])
def test_a_backup_is_kept_as_it_is(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], command: str, with_key: bool
) -> None:
    """Served from its backup, a run would give out numbers that volunteers have seen already."""
    out = folder.path.parent / "saved"
    make_backup(folder, out, with_key=with_key)
    code, _, error = says(capsys, *command.split(), out)
    assert (code, "swarm-coordinator restore" in error) == (2, True), error
    verify_backup(out)


def test_a_backup_of_another_release_is_not_damaged(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    out = folder.path.parent / "saved"
    make_backup(folder, out)
    text = (out / "backup.json").read_text()
    (out / "backup.json").write_text(text.replace('"format": 1', '"format": 2'))
    code, _, error = says(capsys, "verify", out)
    assert (code, "is of another release" in error) == (10, True), error
    folder.database.write_bytes(b"x" * 9000)
    code, _, error = says(capsys, "verify", folder.path)
    assert (code, "no backup of this run is known here" in error) == (7, True), error


def test_a_backup_cannot_lead_out_of_its_folder(folder: RunFolder) -> None:
    out = folder.path.parent / "saved"
    make_backup(folder, out)
    text = (out / "backup.json").read_text()
    for name in ("../port", "/etc/passwd", "data/../../port"):
        (out / "backup.json").write_text(text.replace('"port"', f'"{name}"').replace(
            '"run.toml"', f'"{name}"'
        ))  # fmt: skip
        with pytest.raises(StorageError, match=r"is damaged: backup\.json"):
            verify_backup(out)


@pytest.mark.parametrize(
    "name", ["coordinator.sqlite", "manifest.json", "checkpoints/step-00000004/stage-0.safetensors"]
)
def test_a_damaged_backup_is_named_and_not_taken(
    folder: RunFolder, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    out = folder.path.parent / "saved"
    make_backup(folder, out)
    flip_byte(out / name)
    for words in (["verify", out], ["restore", out, folder.path.parent / "new"]):
        code, _, error = says(capsys, *words)
        assert (code, f"{name} has another hash" in error) == (7, True), error
    assert not (folder.path.parent / "new").exists()


@pytest.mark.parametrize("name", ["pipe", "device"])
def test_a_backup_with_what_is_no_file_is_refused_at_once(folder: RunFolder, name: str) -> None:
    """A foreign backup may have a pipe, or a link to a device: a read of it never ends."""
    out = folder.path.parent / "saved"
    make_backup(folder, out)
    os.mkfifo(out / "pipe")
    (out / "device").symlink_to("/dev/zero")
    summary = json.loads((out / "backup.json").read_text())
    empty = {"path": name, "bytes": 0, "sha256": hashlib.sha256().hexdigest()}
    summary["files"].append(empty)
    (out / "backup.json").write_text(json.dumps(summary))
    code = "import sys; from swarm_coordinator.cli.main import run; sys.exit(run(sys.argv[1:]))"
    words = [sys.executable, "-c", code, "verify", str(out)]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=30)
    assert refused.returncode == 7
    assert f"{name} is not a file" in refused.stderr


@pytest.mark.parametrize("saved_at", ["1e300", "NaN", "-1"])
def test_a_backup_of_no_date_is_refused(folder: RunFolder, saved_at: str) -> None:
    out = folder.path.parent / "saved"
    make_backup(folder, out)
    text = (out / "backup.json").read_text()
    wrong = re.sub(r'"saved_at": ?[\d.]+', f'"saved_at": {saved_at}', text)
    assert wrong != text
    (out / "backup.json").write_text(wrong)
    with pytest.raises(StorageError, match=r"is damaged: backup\.json"):
        verify_backup(out)


def test_a_checkpoint_that_is_damaged_is_not_what_is_saved(folder: RunFolder) -> None:
    flip_byte(newest_stage(folder))
    assert make_backup(folder, folder.path.parent / "saved").checkpoint == 2


def test_a_backup_that_fails_leaves_nothing(
    folder: RunFolder, files_no_larger_than: Callable[[int], object]
) -> None:
    out = folder.path.parent / "saved"
    with files_no_larger_than(8192), pytest.raises(StorageError):  # type: ignore[attr-defined]
        make_backup(folder, out)
    assert sorted(p.name for p in out.parent.iterdir()) == ["a run"]


def test_a_backup_beside_a_writing_coordinator_is_one_moment_of_it(folder: RunFolder) -> None:
    """Steps and checkpoints go on, old ones are pruned, and each backup is whole in itself."""
    store = SqliteStore.open(folder.database)
    store.next_generation()
    stop = threading.Event()

    async def train() -> None:
        number = 5
        while not stop.is_set():
            number += 1
            await store.write(step(number))
            if number % 3 == 0:
                record = await trio.to_thread.run_sync(partial(put_checkpoint, folder, number))
                await store.write(record)

    thread = threading.Thread(target=lambda: trio.run(train))
    thread.start()
    try:
        found = [make_backup(folder, folder.path.parent / f"saved-{n}") for n in range(4)]
    finally:
        stop.set()
        thread.join()
        store.close()
    for summary in found:
        assert summary.checkpoint is not None
        assert summary.checkpoint <= summary.version
    assert [s.version for s in found] == sorted(s.version for s in found)


# ---------------------------------------------------------------- restore


def test_a_restored_run_goes_on_from_its_checkpoint_behind_a_fence(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, new = folder.path.parent / "saved", folder.path.parent / "new"
    make_backup(folder, saved)
    code, said, error = says(capsys, "restore", saved, new)
    assert (code, error) == (0, "")
    assert "continues from its checkpoint of step 4" in said
    assert says(capsys, "verify", new)[0] == 0
    found = history(RunFolder(new).database).restored
    assert (found.version, found.rolled_back, found.on_current_history) == (4, True, frozenset())
    assert found.checkpoint is not None
    assert found.checkpoint.version == 4
    assert found.generation > history(folder.database).restored.generation + 1000
    next_one = one_start(RunFolder(new), step(5, attempt=99))
    assert next_one == found.generation + 1


def test_no_generation_is_given_twice_however_often_a_backup_is_restored(
    folder: RunFolder,
) -> None:
    saved = folder.path.parent / "saved"
    make_backup(folder, saved)
    given = {1, 2}
    now = DAY_UNIX_SECONDS
    for attempt in range(4):
        # Of a lost machine nothing is known but the backup; time passes, starts take seconds.
        new = folder.path.parent / f"new-{attempt}"
        starts = [restore_backup(saved, new, now=partial(float, now)).generation]
        starts += [one_start(RunFolder(new)) for _ in range(3)]
        assert not given & set(starts)
        given |= set(starts)
        now += 5.0


def test_a_restore_in_place_is_above_what_the_folder_knows_whatever_the_clock_says(
    folder: RunFolder,
) -> None:
    saved = folder.path.parent / "saved"
    make_backup(folder, saved)
    ahead = restore_backup(saved, folder.path, force=True, now=lambda: DAY_UNIX_SECONDS).generation
    one_start(folder)
    again = restore_backup(saved, folder.path, force=True, now=lambda: 0.0).generation
    assert again > ahead + 1


def test_generations_leave_room_for_the_numbers_made_of_them() -> None:
    assert generation_floor(0.0) == 0
    assert (LARGEST_GENERATION + 1) * 2**24 <= 2**53
    assert LARGEST_GENERATION - generation_floor(1e12) >= 10**6, "of starts after a wrong clock"


def test_a_restore_replaces_nothing_unasked_and_keeps_what_it_replaced(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = folder.path.parent / "saved"
    make_backup(folder, saved)
    one_start(folder, step(6))
    code, _, error = says(capsys, "restore", saved, folder.path)
    assert (code, "--force" in error) == (2, True)
    assert history(folder.database).restored.version == 6
    code, said, _ = says(capsys, "restore", saved, folder.path, "--force")
    assert code == 0
    (aside,) = [p for p in folder.path.parent.iterdir() if "before-restore" in p.name]
    assert str(aside) in said
    assert history(RunFolder(aside).database).restored.version == 6
    assert history(folder.database).restored.version == 4


def test_a_restore_refuses_another_run_a_strange_folder_and_one_in_use(
    folder: RunFolder, tmp_path: Path
) -> None:
    saved = tmp_path / "saved"
    make_backup(folder, saved)
    other = make_run(tmp_path / "another run")
    with pytest.raises(UsageError, match="another run"):
        restore_backup(saved, other.path, force=True)
    (tmp_path / "photographs").mkdir()
    (tmp_path / "photographs" / "me.jpg").write_bytes(b"")
    with pytest.raises(UsageError, match="not the folder of a run"):
        restore_backup(saved, tmp_path / "photographs", force=True)
    with folder.lock(), pytest.raises(UsageError, match="stop that one first"):
        restore_backup(saved, folder.path, force=True)
    assert history(folder.database).restored.version == 5


def test_what_a_backup_was_made_without_comes_from_the_folder_that_it_replaces(
    folder: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    saved, new = folder.path.parent / "saved", folder.path.parent / "new"
    make_backup(folder, saved, with_key=False, with_data=False)
    restore_backup(saved, folder.path, force=True)
    assert says(capsys, "verify", folder.path)[0] == 0
    _, said, _ = says(capsys, "restore", saved, new)
    assert "put organiser.key back" in said
    assert "put data back" in said


def test_a_restore_that_fails_leaves_what_was_there(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = folder.path.parent / "saved"
    make_backup(folder, saved)
    one_start(folder, step(6))

    def full(*_: object) -> int:
        raise StorageError("the disk is full")

    monkeypatch.setattr(restore, "_fence", full)
    with pytest.raises(StorageError):
        restore_backup(saved, folder.path, force=True)
    assert history(folder.database).restored.version == 6
    assert sorted(p.name for p in folder.path.parent.iterdir()) == ["a run", "saved"]
