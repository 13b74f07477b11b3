"""The one door to PostgreSQL: connections, the schema there, copies, and what errors mean.

The tables are those of SQLite (`schema`), and so are the statements (`sql`). Two more belong to
this server only: the format's number, which SQLite keeps in its file's head, and `leadership`, the
one row that says who may write and until when (`postgresql_store`).
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
from swarm_coordinator.storage.connection import Connection, Rows
from swarm_coordinator.storage.location import PostgresqlLocation
from swarm_coordinator.storage.schema import MIGRATIONS, TABLES, for_postgresql
from swarm_shared.base.errors import StorageError, UsageError, VersionError

CONNECT_SECONDS = 10
TCP_TIMEOUT_SECONDS = 20
"""A server that acknowledges nothing for so long is gone, whatever the connection says."""

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
_MIGRATION_LOCK = 0x5357524D
"""Two coordinators that start at once must not both make the tables."""


class PostgresqlConnection:
    """What `sql.Connection` asks for; parameters are spelt `%s` here."""

    def __init__(self, raw: psycopg.Connection[tuple[Any, ...]]) -> None:
        self.raw = raw

    def execute(self, sql: str, parameters: Sequence[Any] = (), /) -> Rows:
        return self.raw.execute(_to_psycopg(sql), parameters or None)

    def executemany(self, sql: str, parameters: Iterable[Sequence[Any]], /) -> object:
        with self.raw.cursor() as cursor:
            cursor.executemany(_to_psycopg(sql), list(parameters))
        return None

    def close(self) -> None:
        self.raw.close()


@functools.lru_cache(maxsize=256)
def _to_psycopg(sql: str) -> bytes:
    return sql.replace("%", "%%").replace("?", "%s").encode() if "?" in sql else sql.encode()


def connect(place: PostgresqlLocation) -> psycopg.Connection[tuple[Any, ...]]:
    with storage_errors(place):
        try:
            raw = psycopg.connect(
                place.url, autocommit=True, connect_timeout=CONNECT_SECONDS,
                application_name="swarm-coordinator", tcp_user_timeout=TCP_TIMEOUT_SECONDS * 1000,
                keepalives_idle=5, keepalives_interval=5, keepalives_count=3,
            )  # fmt: skip
        except psycopg.ProgrammingError as error:
            raise StorageError(
                f"run.toml: [coordinator] store {place} is no address of a server "
                f"({_first_line(error)})"
            ) from error
    try:
        with storage_errors(place):
            # Whatever the server's default is: a commit that is acknowledged is on the disk.
            raw.execute(
                "SELECT set_config('synchronous_commit', 'on', false) "
                "WHERE current_setting('synchronous_commit') IN ('off', 'local')"
            )
            # A frozen coordinator must not hold the lock on `leadership` for ever.
            milliseconds = int(place.lease_seconds * 1000)
            raw.execute(f"SET idle_in_transaction_session_timeout = {milliseconds}")
    except BaseException:
        raw.close()
        raise
    return raw


def open_for_writing(place: PostgresqlLocation) -> PostgresqlConnection:
    """A connection with the schema brought up to date."""
    raw = connect(place)
    try:
        with storage_errors(place):
            migrate(raw, place)
    except BaseException:
        raw.close()
        raise
    return PostgresqlConnection(raw)


def migrate(
    raw: psycopg.Connection[tuple[Any, ...]],
    place: PostgresqlLocation,
    migrations: tuple[str, ...] = MIGRATIONS,
) -> None:
    """Bring the schema up to date, in one transaction: PostgreSQL can load_backup tables back."""
    if _format(raw) == len(migrations):
        return
    with raw.transaction():
        raw.execute("SELECT pg_advisory_xact_lock(%s)", (_MIGRATION_LOCK,))
        raw.execute(_OWN_TABLES)
        version = _format(raw)
        _check_format(version, place, len(migrations))
        for script in migrations[version:]:
            raw.execute(for_postgresql(script).encode())
        raw.execute("DELETE FROM swarm_format")
        raw.execute("INSERT INTO swarm_format VALUES (%s)", (len(migrations),))


def _format(raw: psycopg.Connection[tuple[Any, ...]]) -> int:
    """0 where there are no tables yet."""
    there = raw.execute("SELECT to_regclass('swarm_format') IS NOT NULL").fetchone()
    if there is None or not there[0]:
        return 0
    row = raw.execute("SELECT number FROM swarm_format").fetchone()
    return 0 if row is None else int(row[0])


def _check_format(version: int, place: PostgresqlLocation, newest: int = len(MIGRATIONS)) -> None:
    if version > newest:
        raise VersionError(
            f"{place} was written by a newer swarm-coordinator (format {version}, this one knows "
            f"{newest}); update this program"
        )


# ---------------------------------------------------------------- reading and copying


@contextlib.contextmanager
def open_for_reading(place: PostgresqlLocation) -> Iterator[Connection]:
    """One moment of the database."""
    raw = connect(place)
    try:
        with storage_errors(place):
            version = _format(raw)
            _check_format(version, place)
            if version == 0:
                raise StorageError(f"{place} is empty; the run has not been started yet")
            if version < len(MIGRATIONS):
                raise VersionError(
                    f"{place} was written by an older swarm-coordinator (format {version}); "
                    "`swarm-coordinator start` brings it up to date"
                )
            raw.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
            yield PostgresqlConnection(raw)
    finally:
        raw.close()


def database_exists(place: PostgresqlLocation) -> bool:
    raw = connect(place)
    try:
        with storage_errors(place):
            return _format(raw) > 0
    finally:
        raw.close()


def copy_database(place: PostgresqlLocation, target: Path) -> None:
    """One moment of it as a file of SQLite's, which every backup holds."""
    copy = sqlite.open_for_writing(target)
    try:
        with open_for_reading(place) as source, sqlite.storage_errors(target):
            _copy_rows(source, copy, "BEGIN IMMEDIATE")
            copy.execute("PRAGMA journal_mode = DELETE").fetchall()
    finally:
        copy.close()


def load_backup(place: PostgresqlLocation, source: Path, force: bool) -> None:
    """Fill the server's database with a backup's rows, in one transaction.

    UsageError when a coordinator is at work there, or when there is a run and `force` is not set.
    """
    connection = open_for_writing(place)
    raw = connection.raw
    rows = sqlite.open_read_only(source)
    try:
        with storage_errors(place), raw.transaction():
            leader = raw.execute(
                "SELECT holder FROM leadership WHERE expires_at > clock_timestamp() FOR UPDATE"
            ).fetchone()
            if leader is not None:
                raise UsageError(f"{leader[0]} serves the run in {place}; stop it first")
            there = raw.execute("SELECT count(*) FROM generations").fetchone()
            if there is not None and there[0] and not force:
                raise UsageError(f"{place} holds a run already; --force puts the backup there")
            raw.execute(f"TRUNCATE {', '.join(TABLES)}".encode())
            _copy_rows(rows, connection, None)
            for table in _identity_tables(raw):
                raw.execute(
                    f"SELECT setval(pg_get_serial_sequence('{table}', 'id'), "
                    f"coalesce((SELECT max(id) FROM {table}), 0) + 1, false)".encode()
                )
    finally:
        rows.close()
        connection.close()


def _identity_tables(raw: psycopg.Connection[tuple[Any, ...]]) -> list[str]:
    """Tables whose rows the server numbers."""
    found = raw.execute(
        "SELECT table_name FROM information_schema.columns "
        "WHERE is_identity = 'YES' AND table_schema = current_schema()"
    ).fetchall()
    return [str(row[0]) for row in found]


def _copy_rows(source: Connection, target: Connection, begin: str | None) -> None:
    if begin is not None:
        target.execute("DELETE FROM journal")
        target.execute(begin)
    for table in TABLES:
        rows = source.execute(f"SELECT * FROM {table}").fetchall()
        if rows:
            marks = ", ".join("?" * len(rows[0]))
            target.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
    if begin is not None:
        target.execute("COMMIT")


# ---------------------------------------------------------------- who leads

LEADER_QUERY = """
SELECT holder FROM leadership
WHERE expires_at > clock_timestamp()
AND EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = backend AND backend_start = backend_started)
"""
"""A lease ends with its time, or with the connection of who holds it: without that one nothing can
be written, and a coordinator that has lost it ends."""


class LeaderWatch:
    """Looks at the lease again and again, over one connection for as long as that lasts."""

    def __init__(self, place: PostgresqlLocation) -> None:
        self._place = place
        self._raw: psycopg.Connection[tuple[Any, ...]] | None = None

    def leader(self) -> str | None:
        """Who leads; None when nobody does. StorageError while the server cannot be had."""
        try:
            with storage_errors(self._place):
                if self._raw is None:
                    self._raw = connect(self._place)
                if _format(self._raw) == 0:
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
def storage_errors(place: PostgresqlLocation) -> Iterator[None]:
    """The server's errors, and those of a copy beside it, as a StorageError."""
    try:
        yield
    except psycopg.Error as error:
        raise explain(place, error) from error
    except sqlite3.Error as error:
        raise StorageError(f"the copy of {place} could not be read: {error}") from error


def explain(place: PostgresqlLocation, error: Exception) -> StorageError:
    """What the server's refusal means to a person, as one sentence."""
    words = _first_line(error)
    if isinstance(error, errors.DiskFull):
        return StorageError(
            f"the disk of {place} is full; free some space there and start again, nothing that "
            "was acknowledged is lost"
        )
    # What ends a connection before it is one comes without a class of its own.
    if "authentication failed" in words or "no pg_hba.conf entry" in words:
        return StorageError(f"{place} does not let this user in ({words}); check the address")
    if isinstance(error, psycopg.OperationalError) and "does not exist" in words:
        return StorageError(f"{words}; make the database or the user that {place} names")
    if isinstance(error, errors.InsufficientPrivilege):
        return StorageError(
            f"this user may not write to {place} ({words}); let it own a database for this run"
        )
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError)):
        return StorageError(
            f"{place} cannot be reached, or ended the connection ({words}); start again when it "
            "is back, nothing that was acknowledged is lost"
        )
    return StorageError(f"the run's database {place} refused a change: {words}")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
