"""What is particular to SQLite: its file, its schema, its damages, a disk that is full."""

from __future__ import annotations

import os
import sqlite3
from pathlib import Path

import pytest
import trio

from kits.coordinator.run import one_start_at, step
from swarm_coordinator.core.events import EvaluationRecord
from swarm_coordinator.storage import sqlite
from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.schema import SCHEMA, SCHEMA_VERSION
from swarm_coordinator.storage.sqlite import create_schema, open_for_writing, schema_version
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.errors import StorageError, VersionError
from swarm_shared.base.types import Version


def test_every_commit_waits_for_the_disk(tmp_path: Path) -> None:
    """A killed process loses no page cache: only a power cut would show the difference."""
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


def test_an_unforeseen_error_is_reported_and_the_writer_lives_on(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "run.sqlite3")

    def fail(connection: Connection) -> None:
        raise TypeError("unforeseen")

    with pytest.raises(StorageError, match="unforeseen") as failure:
        store.read(fail)
    assert isinstance(failure.value.__cause__, TypeError)
    assert store.next_generation() == 1
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
    one_start_at(path, *(step(number) for number in range(1, 200)))
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
    one_start_at(path, step(1))
    connection = open_for_writing(path)
    create_schema(connection, path)
    assert schema_version(connection) == SCHEMA_VERSION
    assert connection.execute("SELECT count(*) FROM applied_steps").fetchone()[0] == 1
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
