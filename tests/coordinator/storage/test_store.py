"""The store: durable when it says so, append-only, whole after kill -9."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from swarm_coordinator.core.events import (
    AppliedStep,
    CheckpointRecord,
    EvaluationRecord,
    StageShare,
    StoredStage,
)
from swarm_coordinator.storage import sqlite
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.schema import SCHEMA, SCHEMA_VERSION
from swarm_coordinator.storage.sqlite import create_schema, open_for_writing, schema_version
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.errors import StorageError, VersionError
from swarm_shared.base.types import PeerId, StageIndex, Step, Version

ANNA, BERT = PeerId("12D3KooWAnna"), PeerId("12D3KooWBert")


def step(number: int, loss: float = 2.0) -> AppliedStep:
    return AppliedStep(
        step=Step(number), attempt=1, loss=loss, tokens=64, seconds=0.5, global_norm=1.5,
        learning_rate=1e-3,
        shares=(
            StageShare(ANNA, StageIndex(0), 3, 48), StageShare(BERT, StageIndex(0), 1, 16),
            StageShare(BERT, StageIndex(1), 4, 64),
        ),
    )  # fmt: skip


def checkpoint(version: int) -> CheckpointRecord:
    name = f"checkpoints/step-{version:08d}/stage-0.safetensors"
    return CheckpointRecord(Version(version), (StoredStage(StageIndex(0), name, 10, "ab" * 32),))


def write_all(path: Path, *records: object) -> None:
    store = SqliteStore.open(path)
    store.next_generation()

    async def main() -> None:
        for record in records:
            await store.write(record)  # type: ignore[arg-type]

    trio.run(main)
    store.close()


def test_every_commit_waits_for_the_disk(tmp_path: Path) -> None:
    """A killed process loses no page cache, so that only a power cut would show the difference."""
    connection = open_for_writing(tmp_path / "run.sqlite3")
    full = 2
    assert connection.execute("PRAGMA synchronous").fetchone() == (full,)
    assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
    connection.close()


def test_a_number_that_sqlite_cannot_hold_is_an_error_and_the_writer_lives_on(
    tmp_path: Path,
) -> None:
    store = SqliteStore.open(tmp_path / "run.sqlite3")
    store.next_generation()

    async def main() -> None:
        with pytest.raises(StorageError):
            await store.write(EvaluationRecord(Version(1), 1.0, 2**70))
        await store.write(step(1))

    trio.run(main)
    store.close()


def test_a_file_that_is_no_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StorageError, match=r"run\.sqlite3 is damaged .*swarm-coordinator verify"):
        SqliteStore.open(path)
    with pytest.raises(StorageError, match="is damaged"):
        history(path)


def test_a_database_with_a_damaged_page_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, *(step(number) for number in range(1, 200)))
    content = bytearray(path.read_bytes())
    assert len(content) > 5 * 4096
    content[2 * 4096 : -4096] = os.urandom(len(content) - 3 * 4096)
    path.write_bytes(content)
    with pytest.raises(StorageError, match="is damaged"):
        SqliteStore.open(path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1])
def test_a_database_of_another_schema_version_is_refused(tmp_path: Path, version: int) -> None:
    path = tmp_path / "run.sqlite3"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    with pytest.raises(VersionError, match=f"has schema version {version} and .* needs"):
        SqliteStore.open(path)
    with pytest.raises(VersionError, match=f"has schema version {version} and .* needs"):
        history(path)


def test_the_tables_are_made_once_and_keep_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, step(1))
    connection = open_for_writing(path)
    create_schema(connection, path)
    assert schema_version(connection) == SCHEMA_VERSION
    assert connection.execute("SELECT count(*) FROM applied_steps").fetchone()[0] == 1
    connection.close()


def test_each_commit_is_synced_before_it_is_acknowledged(tmp_path: Path) -> None:
    """Also where no power cut can be tested: 2 is FULL, and 1 loses the last commits."""
    connection = open_for_writing(tmp_path / "run.sqlite")
    try:
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert connection.execute("PRAGMA synchronous").fetchone() == (2,)
    finally:
        connection.close()


def test_tables_that_cannot_be_made_leave_an_empty_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.sqlite3"
    monkeypatch.setattr(sqlite, "SCHEMA", f"{SCHEMA} SELECT * FROM nowhere;")
    with pytest.raises(StorageError):
        open_for_writing(path)
    connection = sqlite3.connect(path)
    assert schema_version(connection) == 0
    assert connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0
    connection.close()


def test_a_full_disk_is_one_sentence_and_earlier_steps_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    store = SqliteStore.open(path)
    store.next_generation()
    # SQLite's own limit gives the same SQLITE_FULL as a disk without space.
    store.read(lambda connection: connection.execute("PRAGMA max_page_count = 40").fetchall())

    written = 0

    async def write_until_it_fails() -> None:
        nonlocal written
        for number in range(1, 5000):
            await store.write(step(number))
            written = number

    with pytest.raises(StorageError, match="the disk is full"):
        trio.run(write_until_it_fails)
    store.close()
    assert written > 0
    assert history(path).restored.version == written


_WRITER = """
import sys, trio
from pathlib import Path
from swarm_coordinator.core.events import AppliedStep
from swarm_coordinator.storage.store import SqliteStore
store = SqliteStore.open(Path(sys.argv[1]))
store.next_generation()
async def main():
    first = store.restore().version + 1
    for number in range(first, 10**9):
        await store.write(AppliedStep(number, 1, 2.0, 64, 0.5, 1.0, 1e-3, ()))
        print(number, flush=True)
trio.run(main)
"""


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    acknowledged = 0
    for more in (1, 40, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(more):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        acknowledged = int(rest[-1]) if rest else acknowledged
        # Before any recovery by a writer: a reader must see it as well.
        found = history(path)
        assert found.restored.version >= acknowledged
        assert [s.step for s in found.steps] == list(range(1, found.restored.version + 1))
