"""PostgreSQL: connections, the schema, copies, leadership queries, and the meaning of its errors.

Tables and statements are those of SQLite (`storage.schema`, `storage.connection`). Two tables exist
on a server only: the schema version, which SQLite keeps in the head of its file, and `leadership`,
whose one row names the coordinator that may write and until when (`storage.postgresql_store`).
"""

from __future__ import annotations

import contextlib
import functools
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psycopg
from psycopg import errors

from swarm_coordinator.storage import sqlite
from swarm_coordinator.storage.connection import Connection, PostgresqlLocation
from swarm_coordinator.storage.schema import (
    SCHEMA,
    SCHEMA_VERSION,
    TABLES,
    check_version,
    for_postgresql,
)
from swarm_shared.base.errors import StorageError, UsageError

CONNECT_SECONDS = 10
"""Seconds to wait for a connection to the server."""
TCP_TIMEOUT_SECONDS = 20
"""Seconds without an acknowledgement after which a connection to the server counts as lost."""

_OWN_TABLES = """
CREATE TABLE IF NOT EXISTS swarm_format (number BIGINT NOT NULL);
CREATE TABLE IF NOT EXISTS leadership (
    only_row BOOLEAN PRIMARY KEY DEFAULT TRUE CHECK (only_row),
    generation BIGINT NOT NULL,
    holder TEXT NOT NULL,
    backend INTEGER NOT NULL,
    backend_started TIMESTAMPTZ,
    expires_at TIMESTAMPTZ NOT NULL
);
INSERT INTO leadership VALUES (TRUE, 0, '', 0, NULL, '-infinity') ON CONFLICT DO NOTHING;
"""
_SCHEMA_LOCK = 0x5357524D
"""Key of an advisory lock: two coordinators that start at once must not both make the tables."""


class PostgresqlConnection:
    """A `storage.connection.Connection` over psycopg, whose parameters are written `%s`."""

    def __init__(self, raw: psycopg.Connection[tuple[Any, ...]]) -> None:
        self.raw = raw

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Any:
        return self.raw.execute(_to_psycopg(sql), _storable(parameters) or None)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> None:
        with self.raw.cursor() as cursor:
            cursor.executemany(_to_psycopg(sql), list(map(_storable, parameters)))

    def close(self) -> None:
        self.raw.close()


def _storable(values: Sequence[Any]) -> tuple[Any, ...]:
    """The values without NUL characters, which PostgreSQL's texts cannot contain and SQLite's can:
    a peer's name or protocol with one would keep the rows of others out."""
    return tuple(
        value.replace("\0", "\N{REPLACEMENT CHARACTER}") if isinstance(value, str) else value
        for value in values
    )


@functools.lru_cache(maxsize=256)
def _to_psycopg(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode() if "?" in sql else sql.encode()


def connect(location: PostgresqlLocation) -> psycopg.Connection[tuple[Any, ...]]:
    """Connect to the server; StorageError when that fails."""
    with storage_errors(location):
        try:
            raw = psycopg.connect(
                location.url, autocommit=True, connect_timeout=CONNECT_SECONDS,
                application_name="swarm-coordinator", tcp_user_timeout=TCP_TIMEOUT_SECONDS * 1000,
                keepalives_idle=5, keepalives_interval=5, keepalives_count=3,
            )  # fmt: skip
        except psycopg.ProgrammingError as error:
            raise StorageError(
                f"run.toml: [coordinator] store {location} is not the address of a server "
                f"({_first_line(error)})"
            ) from error
    try:
        with storage_errors(location):
            # An acknowledged commit must be on the disk, whatever the server's default is.
            raw.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
            )
            # A frozen command must not keep its lock on `leadership`.
            milliseconds = int(location.lease_seconds * 1000)
            raw.execute(f"SET idle_in_transaction_session_timeout = {milliseconds}")
    except BaseException:
        raw.close()
        raise
    return raw


def open_for_writing(location: PostgresqlLocation) -> PostgresqlConnection:
    """Open a connection for writing; make missing tables."""
    raw = connect(location)
    try:
        with storage_errors(location):
            create_schema(raw, location)
    except BaseException:
        raw.close()
        raise
    return PostgresqlConnection(raw)


def create_schema(raw: psycopg.Connection[tuple[Any, ...]], location: PostgresqlLocation) -> None:
    """Make the tables of an empty database, in one transaction; VersionError for other tables."""
    if _version(raw) == SCHEMA_VERSION:
        return
    with raw.transaction():
        raw.execute("SELECT pg_advisory_xact_lock(%s)", (_SCHEMA_LOCK,))
        version = _version(raw)
        if version:
            # Another coordinator may have made the tables since the first look.
            check_version(version, location)
            return
        raw.execute(_OWN_TABLES)
        raw.execute(for_postgresql(SCHEMA).encode())
        raw.execute("INSERT INTO swarm_format VALUES (%s)", (SCHEMA_VERSION,))


def _version(raw: psycopg.Connection[tuple[Any, ...]]) -> int:
    """Return the schema version of the database; 0 where there are no tables yet."""
    has_tables = raw.execute("SELECT to_regclass('swarm_format') IS NOT NULL").fetchone()
    if has_tables is None or not has_tables[0]:
        return 0
    row = raw.execute("SELECT number FROM swarm_format").fetchone()
    return 0 if row is None else int(row[0])


# ---------------------------------------------------------------- reading and copying


@contextlib.contextmanager
def open_for_reading(location: PostgresqlLocation) -> Iterator[Connection]:
    """Open a consistent snapshot of the database; StorageError when it is empty."""
    with contextlib.closing(connect(location)) as raw, storage_errors(location):
        version = _version(raw)
        if version == 0:
            raise StorageError(f"{location} is empty; the run has not been started yet")
        check_version(version, location)
        raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
        yield PostgresqlConnection(raw)


def database_exists(location: PostgresqlLocation) -> bool:
    """Return whether the run has its tables on the server."""
    with contextlib.closing(connect(location)) as raw, storage_errors(location):
        return _version(raw) > 0


def copy_database(location: PostgresqlLocation, target: Path) -> None:
    """Copy one moment of the database to an SQLite file, the format of every backup."""
    with (
        contextlib.closing(sqlite.open_for_writing(target)) as copy,
        open_for_reading(location) as source,
        sqlite.storage_errors(target),
    ):
        copy.execute("BEGIN IMMEDIATE")
        copy.execute("DELETE FROM journal")
        _copy_rows(source, copy)
        copy.execute("COMMIT")
        copy.execute("PRAGMA journal_mode = DELETE").fetchall()


def load_backup(location: PostgresqlLocation, source: Path, force: bool) -> None:
    """Replace the server's rows by those of a backup, in one transaction.

    UsageError when a coordinator is running, or when there is a run and `force` is not set.
    """
    with (
        contextlib.closing(open_for_writing(location)) as connection,
        contextlib.closing(sqlite.open_read_only(source)) as rows,
        storage_errors(location),
        connection.raw.transaction(),
    ):
        raw = connection.raw
        leader = raw.execute(
            "SELECT holder FROM leadership WHERE expires_at > clock_timestamp() FOR UPDATE"
        ).fetchone()
        if leader is not None:
            raise UsageError(f"{leader[0]} serves the run in {location}; stop it first")
        generations = raw.execute("SELECT count(*) FROM generations").fetchone()
        if generations is not None and generations[0] and not force:
            raise UsageError(f"{location} holds a run already; --force puts the backup there")
        raw.execute(f"TRUNCATE {', '.join(TABLES)}".encode())
        _copy_rows(rows, connection)
        for table in _identity_tables(raw):
            raw.execute(
                f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), "
                f"coalesce((SELECT max(id) FROM {table}), 0) + 1, false)".encode()
            )


def _identity_tables(raw: psycopg.Connection[tuple[Any, ...]]) -> list[str]:
    """Return the tables whose rows the server numbers."""
    rows = raw.execute(
        "SELECT table_name FROM information_schema.columns "
        "WHERE is_identity = 'YES' AND table_schema = current_schema()"
    ).fetchall()
    return [str(row[0]) for row in rows]


def _copy_rows(source: Connection, target: Connection) -> None:
    for table in TABLES:
        rows = source.execute(f"SELECT * FROM {table}").fetchall()
        if rows:
            parameters = ", ".join("?" * len(rows[0]))
            target.executemany(f"INSERT INTO {table} VALUES ({parameters})", rows)


# ---------------------------------------------------------------- leadership

LEADER_QUERY = """
SELECT holder FROM leadership
WHERE expires_at > clock_timestamp()
AND EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = backend AND backend_start = backend_started)
"""
"""The holder of a valid lease. A lease ends when it expires, or with its holder's connection:
without that connection the holder cannot write, and a coordinator that has lost it ends."""

END_FORMER_LEADER = """
SELECT pg_terminate_backend(pid) FROM leadership JOIN pg_stat_activity
ON pid = backend AND backend_start = backend_started
WHERE expires_at <= clock_timestamp() AND pid <> pg_backend_pid()
"""
"""Ends the connection of a leader whose lease has expired, and with it a transaction that a frozen
leader left open. The limit on idle transactions does not see all of those: a pipeline that lacks
its last message counts as active."""


class LeaderWatch:
    """Queries the lease repeatedly, over one connection for as long as that lasts."""

    def __init__(self, location: PostgresqlLocation) -> None:
        self._location = location
        self._raw: psycopg.Connection[tuple[Any, ...]] | None = None

    def leader(self) -> str | None:
        """Return the leader, or None. StorageError while the server cannot be reached."""
        try:
            with storage_errors(self._location):
                if self._raw is None:
                    self._raw = connect(self._location)
                if _version(self._raw) == 0:
                    return None
                row = self._raw.execute(LEADER_QUERY).fetchone()
        except StorageError:
            self.close()
            raise
        return None if row is None else str(row[0])

    def close(self) -> None:
        if self._raw is not None:
            self._raw.close()
            self._raw = None


# ---------------------------------------------------------------- errors


@contextlib.contextmanager
def storage_errors(location: PostgresqlLocation) -> Iterator[None]:
    """Convert errors of the server, and of a local SQLite copy, to a StorageError."""
    try:
        yield
    except psycopg.Error as error:
        raise explain(location, error) from error
    except sqlite3.Error as error:
        raise StorageError(f"the copy of {location} could not be read: {error}") from error


def explain(location: PostgresqlLocation, error: Exception) -> StorageError:
    """Return the server's error as a StorageError with one sentence for the organiser."""
    text = _first_line(error)
    if isinstance(error, errors.DiskFull):
        return StorageError(
            f"the disk of {location} is full; free some space there and start again, nothing that "
            "was acknowledged is lost"
        )
    # Errors while connecting have no class of their own.
    if "no password supplied" in text:
        return StorageError(
            f"{location} asks for a password ({text}); write it into ~/.pgpass, as "
            "HOST:PORT:DATABASE:USER:PASSWORD, and let only yourself read that file (chmod 600)"
        )
    if "authentication failed" in text or "no pg_hba.conf entry" in text:
        return StorageError(f"{location} does not let this user in ({text}); check the address")
    if isinstance(error, psycopg.OperationalError) and "does not exist" in text:
        return StorageError(f"{text}; make the database or the user that {location} names")
    if isinstance(error, errors.InsufficientPrivilege):
        return StorageError(
            f"this user may not write to {location} ({text}); let it own a database for this run"
        )
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return StorageError(
            f"{location} cannot be reached, or ended the connection ({text}); start again when it "
            "is back, nothing that was acknowledged is lost"
        )
    return StorageError(f"the run's database {location} refused a change: {text}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
