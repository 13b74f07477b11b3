"""The one door to SQLite: how the run's database is opened, migrated, copied; what errors mean.

Owns connections, and the translation of SQLite's errors into one sentence for a person. The tables
are in `schema`, what is written in `store` and `records`, what is read by people in `history`.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from swarm_coordinator.run_dir.folder import quoted
from swarm_coordinator.storage.schema import MIGRATIONS
from swarm_shared.base.errors import StorageError, VersionError

BUSY_TIMEOUT_SECONDS = 10.0
"""A reader of a person's command holds its lock for milliseconds; ten seconds are a fault."""


def open_for_writing(path: Path) -> sqlite3.Connection:
    """The writer's connection, with the schema brought up to date. Used from one thread only."""
    with storage_errors(path):
        connection = sqlite3.connect(
            path, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, cached_statements=64
        )
        try:
            for pragma in (
                "journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON",
            ):  # fmt: skip
                connection.execute(f"PRAGMA {pragma}").fetchall()
            migrate(connection, path)
            _check(connection, path)
        except BaseException:
            connection.close()
            raise
    return connection


def open_read_only(path: Path) -> sqlite3.Connection:
    """A connection that only reads: beside a running coordinator as well as without one.

    What an older release has written is read from a copy in memory that is brought up to date.
    """
    if not path.is_file():
        raise StorageError(
            f"there is no run database at {path}; the run has not been started yet, "
            f"or this is not a run folder"
        )
    with storage_errors(path):
        # The writer's folder may be read-only for this user; then SQLite cannot make the index of
        # the write-ahead log. Without such a log the file alone is the whole database.
        modes = ["mode=ro"]
        if not Path(f"{path}-wal").exists():
            modes.append("immutable=1")
        for mode in modes:
            connection = sqlite3.connect(
                f"file:{quote(str(path.resolve()))}?{mode}", uri=True,
                timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None,
            )  # fmt: skip
            try:
                version = schema_version(connection)
                _check_format(version, path)
                if version == 0:
                    raise StorageError(f"{path} is empty; the run has not been started yet")
                return connection if version == len(MIGRATIONS) else _newest(connection, path)
            except BaseException as error:
                connection.close()
                last = mode == modes[-1]
                if last or not isinstance(error, sqlite3.OperationalError):
                    raise
    raise AssertionError("the last mode returns or raises")


def _newest(connection: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    copy = sqlite3.connect(":memory:", isolation_level=None)
    connection.backup(copy)
    connection.close()
    migrate(copy, path)
    return copy


def schema_version(connection: sqlite3.Connection) -> int:
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def migrate(
    connection: sqlite3.Connection, path: Path, migrations: tuple[str, ...] = MIGRATIONS
) -> None:
    """Bring the schema up to date, each migration in one transaction with its version number."""
    version = schema_version(connection)
    _check_format(version, path, len(migrations))
    for number, script in enumerate(migrations[version:], start=version + 1):
        connection.executescript(
            f"BEGIN IMMEDIATE; {script} PRAGMA user_version = {number}; COMMIT;"
        )


def _check_format(version: int, path: Path, newest: int = len(MIGRATIONS)) -> None:
    if version > newest:
        raise VersionError(
            f"{path} was written by a newer swarm-coordinator (format {version}, this one knows "
            f"{newest}); update this program"
        )


def _check(connection: sqlite3.Connection, path: Path) -> None:
    """A damaged page is better met at the start than in the middle of a step."""
    found = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if found != "ok":
        raise DatabaseDamaged(path, str(found).splitlines()[-1])


def check_pages(path: Path, *, thorough: bool = True) -> list[str]:
    """What SQLite itself finds wrong with the file: pages, references and, thorough, indices."""
    check = "integrity_check" if thorough else "quick_check"
    connection = open_read_only(path)
    try:
        with storage_errors(path):
            found = [str(row[0]) for row in connection.execute(f"PRAGMA {check}(20)")]
            problems = [line for text in found if text != "ok" for line in text.splitlines()]
            for table, row, parent, _ in connection.execute("PRAGMA foreign_key_check").fetchall():
                problems.append(
                    f"table {table}: row {row} refers to a row of {parent} that is lost"
                )
    finally:
        connection.close()
    return problems[:20]


def copy_database(path: Path, target: Path) -> None:
    """A copy of one moment of the database, also while a coordinator writes it.

    `target` is one whole file without a log beside it, of the newest format.
    """
    source = open_read_only(path)
    try:
        with storage_errors(target):
            copy = sqlite3.connect(target, isolation_level=None)
            try:
                source.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE").fetchall()
            finally:
                copy.close()
    finally:
        source.close()


def database_files(path: Path) -> list[Path]:
    """The database's file and those that SQLite keeps beside it."""
    return [p for p in (path, Path(f"{path}-wal"), Path(f"{path}-shm")) if p.exists()]


class DatabaseDamaged(StorageError):
    """The file is no database any more, or parts of it are lost."""

    def __init__(self, path: Path, detail: str) -> None:
        self.detail = detail
        super().__init__(
            f"the run's database {path} is damaged ({detail}); "
            f"`swarm-coordinator verify {quoted(path.parent)}` says what the run can go "
            f"on with"
        )


@contextlib.contextmanager
def storage_errors(path: Path) -> Iterator[None]:
    """SQLite's errors as a StorageError that names the file and what to do."""
    try:
        yield
    except sqlite3.Error as error:
        raise translate(path, error) from error


def translate(path: Path, error: Exception) -> StorageError:
    """What SQLite's refusal means to a person, as one sentence."""
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
