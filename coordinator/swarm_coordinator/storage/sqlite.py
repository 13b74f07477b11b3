"""SQLite: opening, checking and copying a run's database, and the meaning of its errors.

Owns connections and the translation of SQLite's errors into one sentence for the organiser. The
tables are in `storage.schema`, writing in `storage.store` and `storage.records`, reading for people
in `storage.history`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from swarm_coordinator.run_dir.folder import quoted
from swarm_coordinator.storage.schema import SCHEMA, SCHEMA_VERSION, check_version
from swarm_shared.base.errors import StorageError

BUSY_TIMEOUT_SECONDS = 10.0
"""Seconds to wait for a lock. A command that reads holds its lock for milliseconds, so a longer
wait means a fault."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """Open the writer's connection, to be used from one thread only; make missing tables."""
    with storage_errors(path):
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, cached_statements=64
        )
        try:
            for pragma in (
                "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON",
            ):  # fmt: skip
                connection.execute(f"PRAGMA {pragma}").fetchall()
            create_schema(connection, path)
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def open_read_only(path: Path) -> sqlite3.Connection:
    """Open a connection that only reads, whether a coordinator is running or not."""
    if not path.is_file():
        raise StorageError(
            f"there is no run database at {path}, as the run has not been started yet; "
            f"`swarm-coordinator start {quoted(path.parent)}` starts it"
        )
    with storage_errors(path):
        try:
            return _open_reader(path, "mode=ro")
        except sqlite3.OperationalError:
            # The folder may be read-only for this user; SQLite then cannot create the index of the
            # write-ahead log. Without such a log the file alone is the whole database.
            if Path(f"{path}-wal").exists():
                raise
            return _open_reader(path, "immutable=1")


def _open_reader(path: Path, mode: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        f"file:{quote(str(path.resolve()))}?{mode}", uri=True,
        timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None,
    )  # fmt: skip
    try:
        version = schema_version(connection)
        if version == 0:
            raise StorageError(f"{path} is empty; the run has not been started yet")
        check_version(version, path)
    except BaseException:
        connection.close()
        raise
    return connection


def schema_version(connection: sqlite3.Connection) -> int:
    """Return the schema version of the database; 0 for an empty one."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def create_schema(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables of an empty database, in one transaction; VersionError for other tables."""
    version = schema_version(connection)
    if version == 0:
        connection.executescript(
            f"BEGIN IMMEDIATE; {SCHEMA} PRAGMA user_version = {SCHEMA_VERSION}; COMMIT;"
        )
    else:
        check_version(version, path)


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """Find a damaged page at the start, rather than in the middle of a step."""
    result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if result != "ok":
        raise DatabaseDamaged(path, str(result).splitlines()[-1])


def check_pages(path: Path, *, thorough: bool = True) -> list[str]:
    """Return what SQLite finds wrong with pages and references and, if `thorough`, with indices."""
    check = "integrity_check" if thorough else "quick_check"
    with contextlib.closing(open_read_only(path)) as connection, storage_errors(path):
        texts = [str(row[0]) for row in connection.execute(f"PRAGMA {check}(20)")]
        problems = [line for text in texts if text != "ok" for line in text.splitlines()]
        for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchall():
            problems.append(f"table {table}: row {row} refers to a row of {parent} that is lost")
    return problems[:20]


def copy_database(path: Path, target: Path) -> None:
    """Copy one moment of the database, also while a coordinator writes it.

    `target` becomes one complete file without a write-ahead log.
    """
    with (
        contextlib.closing(open_read_only(path)) as source,
        storage_errors(target),
        contextlib.closing(sqlite3.connect(target, isolation_level=None)) as copy,
    ):
        source.backup(copy)
        copy.execute("PRAGMA journal_mode = DELETE").fetchall()


class DatabaseDamaged(StorageError):
    """The file is not a database, or parts of it are lost."""

    def __init__(self, path: Path, detail: str) -> None:
        self.detail = detail
        super().__init__(
            f"the run's database {path} is damaged ({detail}); "
            f"`swarm-coordinator verify {quoted(path.parent)}` shows what the run can "
            f"continue from"
        )


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """Convert SQLite's errors to a StorageError that names the file and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(path, error) from error


def translate(path: Path, error: Exception) -> StorageError:
    """Return SQLite's error as a StorageError with one sentence for the organiser."""
    name = getattr(error, "sqlite_errorname", None) or ""
    if name == "SQLITE_FULL":
        return StorageError(
            f"cannot write {path}: the disk is full; free some space there and start again, "
            f"nothing that was acknowledged is lost"
        )
    if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return DatabaseDamaged(path, str(error))
    if name.startswith("SQLITE_BUSY"):
        return StorageError(
            f"{path} has been locked by another program for {BUSY_TIMEOUT_SECONDS:.0f} s; "
            f"end that program and try again"
        )
    if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM")):
        return StorageError(
            f"cannot open {path} ({error}); make the file and its folder writable, "
            f"or choose another folder"
        )
    if name.startswith("SQLITE_IOERR"):
        return StorageError(
            f"the disk refused to read or write {path} ({error}); check the disk and its free space"
        )
    return StorageError(f"the run's database {path} refused a change: {error}")
