"""The one door to SQLite: how the run's database is opened, what its tables are, what errors mean.

Owns connections, the schema and its migrations, and the translation of SQLite's errors into one
sentence for a person. What is written is in `store`, what is read by people in `history`.

Rows are appended and never deleted. Two kinds of columns change afterwards: `superseded_by` points
from a step, checkpoint, evaluation or finish to the rollback that took it out of the run's history,
and a time ends a token, an allowance or a ban. Partial unique indices make SQLite itself refuse a
step that counts twice, or a second ban of the same peer.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from swarm_shared.errors import StorageError, VersionError

DATABASE_NAME = "run.sqlite3"

BUSY_TIMEOUT_SECONDS = 10.0
"""A reader of a person's command holds its lock for milliseconds; ten seconds are a fault."""

_SCHEMA_1 = """
CREATE TABLE generations (
    generation INTEGER PRIMARY KEY,
    started_at REAL NOT NULL
) STRICT;

CREATE TABLE peers (
    id INTEGER PRIMARY KEY,
    peer TEXT NOT NULL UNIQUE,
    name TEXT,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL
) STRICT;

CREATE TABLE rollbacks (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL CHECK (version >= 0),
    reason TEXT NOT NULL,
    generation INTEGER NOT NULL REFERENCES generations,
    written_at REAL NOT NULL
) STRICT;

CREATE TABLE applied_steps (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL CHECK (step >= 1),
    attempt INTEGER NOT NULL,
    loss REAL, -- NULL: not a number, the training has diverged
    tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    global_norm REAL,
    learning_rate REAL NOT NULL,
    generation INTEGER NOT NULL REFERENCES generations,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;
CREATE UNIQUE INDEX one_live_row_per_step ON applied_steps (step) WHERE superseded_by IS NULL;

CREATE TABLE shares (
    applied_step INTEGER NOT NULL REFERENCES applied_steps,
    peer INTEGER NOT NULL REFERENCES peers,
    stage INTEGER NOT NULL,
    microbatches INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (applied_step, stage, peer)
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL CHECK (version >= 0),
    generation INTEGER NOT NULL REFERENCES generations,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;

CREATE TABLE checkpoint_stages (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints,
    stage INTEGER NOT NULL,
    item TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    PRIMARY KEY (checkpoint, stage)
) STRICT, WITHOUT ROWID;

CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    heldout_loss REAL,
    tokens INTEGER NOT NULL,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;

CREATE TABLE finishes (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;

CREATE TABLE notes (
    id INTEGER PRIMARY KEY,
    peer INTEGER REFERENCES peers,
    text TEXT NOT NULL,
    written_at REAL NOT NULL
) STRICT;

-- `sent` and `received` are the reporter's last word; the `_before` columns hold the sums of its
-- earlier starts, because a volunteer counts from zero again when its program starts again.
CREATE TABLE links (
    reporter INTEGER NOT NULL REFERENCES peers,
    remote TEXT NOT NULL,
    protocol TEXT NOT NULL,
    sent INTEGER NOT NULL,
    received INTEGER NOT NULL,
    sent_before INTEGER NOT NULL DEFAULT 0,
    received_before INTEGER NOT NULL DEFAULT 0,
    written_at REAL NOT NULL,
    PRIMARY KEY (reporter, remote, protocol)
) STRICT, WITHOUT ROWID;
"""

_SCHEMA_2 = """
CREATE TABLE tokens (
    id INTEGER PRIMARY KEY,
    secret_sha256 TEXT NOT NULL UNIQUE,
    note TEXT NOT NULL,
    uses INTEGER CHECK (uses >= 1), -- NULL: any number of peers
    expires_at REAL,
    created_at REAL NOT NULL,
    revoked_at REAL
) STRICT;

CREATE TABLE members (
    token INTEGER NOT NULL REFERENCES tokens,
    peer TEXT NOT NULL,
    admitted_at REAL NOT NULL,
    PRIMARY KEY (token, peer)
) STRICT, WITHOUT ROWID;

CREATE TABLE allowances (
    id INTEGER PRIMARY KEY,
    peer TEXT NOT NULL,
    added_at REAL NOT NULL,
    removed_at REAL
) STRICT;
CREATE UNIQUE INDEX one_live_allowance_per_peer ON allowances (peer) WHERE removed_at IS NULL;

CREATE TABLE bans (
    id INTEGER PRIMARY KEY,
    peer TEXT NOT NULL,
    reason TEXT NOT NULL,
    banned_at REAL NOT NULL,
    lifted_at REAL
) STRICT;
CREATE UNIQUE INDEX one_live_ban_per_peer ON bans (peer) WHERE lifted_at IS NULL;
"""

ADMISSION_SCHEMA = 2
"""The format since which a database holds tokens, the allow-list and bans."""

MIGRATIONS: tuple[str, ...] = (_SCHEMA_1, _SCHEMA_2)
"""Migration i takes a database from `user_version` i to i + 1; never edit one that was released."""


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
    """A connection that only reads: beside a running coordinator as well as without one."""
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
                return connection
            except BaseException as error:
                connection.close()
                last = mode == modes[-1]
                if last or not isinstance(error, sqlite3.OperationalError):
                    raise
    raise AssertionError("the last mode returns or raises")


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
        raise damaged(path, str(found).splitlines()[-1])


def damaged(path: Path, detail: str) -> StorageError:
    return StorageError(
        f"the run's database {path} is damaged ({detail}); move it away together with the files "
        f"beside it whose names begin alike (mv '{path}' '{path}.damaged'), or put back a copy; "
        f"without it the run goes on from its newest checkpoint; its history, tokens and bans are "
        f"lost"
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
        return damaged(path, str(error))
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
