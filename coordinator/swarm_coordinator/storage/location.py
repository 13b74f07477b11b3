"""Where a run's database is: a file in the run folder, or a PostgreSQL server named in run.toml.

Owns that choice, and every use of a database that does not write to it. `storage.sqlite` and
`storage.postgresql` do the work; the latter is imported only for a run that uses it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from swarm_coordinator.storage import sqlite
from swarm_coordinator.storage.connection import Connection
from swarm_shared.base.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class PostgresqlLocation:
    """A database on a server; each run has its own."""

    url: str
    lease_seconds: float = 5.0

    def __str__(self) -> str:
        """Return the address without its password, for messages and logs."""
        return re.sub(r"(//[^/@:]*):[^@]*@", r"\1:…@", self.url)


DatabaseLocation = Path | PostgresqlLocation


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
    connection = sqlite.open_read_only(location)
    try:
        with sqlite.storage_errors(location):
            connection.execute("BEGIN")
            yield connection
    finally:
        connection.close()


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
