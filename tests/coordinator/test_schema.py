"""Databases of every release so far are opened, read and carried on with."""

from __future__ import annotations

import re
import sqlite3
from pathlib import Path

import pytest
import trio

from swarm_coordinator.core.events import AppliedStep
from swarm_coordinator.storage.history import history
from swarm_coordinator.storage.schema import MIGRATIONS, TABLES
from swarm_coordinator.storage.sqlite import (
    migrate,
    open_for_writing,
    open_read_only,
    schema_version,
)
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.types import PeerId, Step

ROWS = {
    1: """
INSERT INTO generations VALUES (1, 10.0), (2, 20.0);
INSERT INTO peers VALUES (1, '12D3KooWAnna', 'anna', 11.0, 25.0);
INSERT INTO applied_steps VALUES (1, 1, 5, 3.0, 64, 0.5, 1.5, 0.001, 1, 12.0, NULL);
INSERT INTO applied_steps VALUES (2, 2, 6, 2.5, 64, 0.5, 1.5, 0.001, 1, 13.0, NULL);
INSERT INTO shares VALUES (2, 1, 0, 4, 64);
INSERT INTO rollbacks VALUES (1, 2, 'every peer of stage 0 is gone', 1, 15.0);
INSERT INTO applied_steps VALUES (3, 3, 7, 9.0, 64, 0.5, 1.5, 0.001, 1, 14.0, 1);
INSERT INTO checkpoints VALUES (1, 2, 1, 13.5, NULL);
INSERT INTO checkpoint_stages VALUES (1, 0, 'checkpoint/2/0', 10, 'abababab');
INSERT INTO notes VALUES (1, 1, 'hello', 11.5);
INSERT INTO links VALUES (1, '12D3KooWBert', '/stage', 100, 50, 20, 10, 16.0);
""",
    2: """
INSERT INTO tokens VALUES (1, 'secret hash', 'for friends', 5, NULL, 10.0, NULL);
INSERT INTO members VALUES (1, '12D3KooWAnna', 11.0);
INSERT INTO bans VALUES (1, '12D3KooWBert', 'noise', 17.0, NULL);
""",
    3: "",
    4: "INSERT INTO teams VALUES (1, 'the team');",
    5: "INSERT INTO owners VALUES (1, '', '');",
    6: "INSERT INTO step_attempts VALUES (2, 0, 5), (2, 1, 6);",
}
"""What a run of each release would have written into the tables that the release added."""


def released(path: Path, version: int) -> sqlite3.Connection:
    """A database as the release with that format left it."""
    connection = sqlite3.connect(path, isolation_level=None)
    connection.execute("PRAGMA journal_mode = WAL")
    for number, script in enumerate(MIGRATIONS[:version], start=1):
        connection.executescript(script + f"PRAGMA user_version = {number};" + ROWS[number])
    return connection


def shape(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Tables and indices, whatever the order in which they were made."""
    return {
        (name, re.sub(r"\s+", " ", re.sub(r"--.*", "", sql)))
        for name, sql in connection.execute(
            "SELECT name, sql FROM sqlite_master WHERE sql NOT NULL"
        )
    }


def content(connection: sqlite3.Connection) -> dict[str, list[tuple[object, ...]]]:
    tables = [row[0] for row in connection.execute("SELECT name FROM sqlite_master")]
    return {
        table: sorted(connection.execute(f"SELECT * FROM {table}").fetchall(), key=repr)
        for table in TABLES if table in tables and table != "journal"
    }  # fmt: skip


EVERY_OLDER = pytest.mark.parametrize("version", range(1, len(MIGRATIONS)))


def test_there_are_rows_for_every_format() -> None:
    assert list(ROWS) == list(range(1, len(MIGRATIONS) + 1))


@EVERY_OLDER
def test_an_older_database_becomes_one_of_today_and_keeps_every_row(
    tmp_path: Path, version: int
) -> None:
    old = released(tmp_path / "old.sqlite3", version)
    before = content(old)
    old.close()
    migrated = open_for_writing(tmp_path / "old.sqlite3")
    fresh = open_for_writing(tmp_path / "new.sqlite3")
    assert schema_version(migrated) == len(MIGRATIONS)
    assert shape(migrated) == shape(fresh)
    assert {table: rows for table, rows in content(migrated).items() if table in before} == before
    migrated.close()
    fresh.close()


@EVERY_OLDER
def test_a_run_of_an_older_release_goes_on(tmp_path: Path, version: int) -> None:
    path = tmp_path / "run.sqlite3"
    released(path, version).close()
    store = SqliteStore.open(path)
    assert store.next_generation() == 3
    restored = store.restore()
    assert (restored.version, restored.generation) == (2, 3)
    assert restored.last_applied is not None
    assert [share.peer for share in restored.last_applied.shares] == ["12D3KooWAnna"]
    assert (PeerId("12D3KooWBert") in store.admission().bans) == (version >= 2)
    trio.run(store.write, AppliedStep(Step(3), 8, 2.0, 64, 0.5, 1.0, 1e-3, ()))
    store.close()
    assert [(s.step, s.loss) for s in history(path).steps] == [(1, 3.0), (2, 2.5), (3, 2.0)]


@EVERY_OLDER
def test_commands_read_an_older_database_and_leave_it_as_it_is(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "run.sqlite3"
    released(path, version).close()
    before = path.read_bytes()
    assert [s.step for s in history(path).steps] == [1, 2]
    connection = open_read_only(path)
    assert schema_version(connection) == len(MIGRATIONS)
    connection.close()
    assert path.read_bytes() == before


def test_every_table_is_listed(tmp_path: Path) -> None:
    connection = open_for_writing(tmp_path / "run.sqlite3")
    found = {row[0] for row in connection.execute(
        "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite_%'"
    )}  # fmt: skip
    connection.close()
    assert found == set(TABLES)


@EVERY_OLDER
def test_a_failing_migration_leaves_an_older_database_as_it_was(
    tmp_path: Path, version: int
) -> None:
    path = tmp_path / "run.sqlite3"
    connection = released(path, version)
    before, tables = content(connection), shape(connection)
    bad = (*MIGRATIONS[:version], "CREATE TABLE more (id INTEGER); SELECT * FROM nowhere;")
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, path, bad)
    connection.close()
    connection = sqlite3.connect(path)
    assert schema_version(connection) == version
    assert (content(connection), shape(connection)) == (before, tables)
    connection.close()
