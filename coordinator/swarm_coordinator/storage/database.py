"""Every use of a run's database that does not write to it, for both kinds of database.

`storage.sqlite` and `storage.postgresql` do the work; the latter is imported only for a run that
uses it.
"""

from __future__ import annotations

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from swarm_coordinator.storage import sqlite
from swarm_coordinator.storage.connection import Connection, DatabaseLocation, PostgresqlLocation
from swarm_shared.base.errors import ConfigurationError


def postgresql_driver() -> ModuleType:
    """Import `storage.postgresql`; ConfigurationError where its driver is not installed."""
    if importlib.util.find_spec("psycopg") is None:
        raise ConfigurationError(
            "run.toml names a PostgreSQL server, and its driver is not installed; install it with "
            "`pip install swarmtrain[postgresql]`"
        )
    return importlib.import_module("swarm_coordinator.storage.postgresql")


@contextlib.contextmanager
def open_for_reading(location: DatabaseLocation) -> Iterator[Connection]:
    """Open a consistent snapshot of the database, whether a coordinator is running or not.

    StorageError when the database is missing or damaged.
    """
    if isinstance(location, PostgresqlLocation):
        with postgresql_driver().open_for_reading(location) as remote:
            yield remote
        return
    opened = contextlib.closing(sqlite.open_read_only(location))
    with opened as connection, sqlite.storage_errors(location):
        connection.execute("BEGIN")
        yield connection


def database_exists(location: DatabaseLocation) -> bool:
    """Return whether the run has a database yet."""
    if isinstance(location, PostgresqlLocation):
        return bool(postgresql_driver().database_exists(location))
    return location.exists()


def check_pages(location: DatabaseLocation, *, thorough: bool = True) -> list[str]:
    """Return what the database's own check finds wrong; nothing is checked on a server."""
    if isinstance(location, PostgresqlLocation):
        return []
    return sqlite.check_pages(location, thorough=thorough)


def copy_database(location: DatabaseLocation, target: Path) -> None:
    """Copy one moment of the database to an SQLite file, the format of every backup."""
    if isinstance(location, PostgresqlLocation):
        postgresql_driver().copy_database(location, target)
    else:
        sqlite.copy_database(location, target)
