"""Where a run's database is: a file in its folder, or a PostgreSQL server that run.toml names.

Owns the choice, and what is done with a database without writing to it. The doors themselves are
`database` (SQLite) and `postgresql`, which is imported only for a run that uses it.
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
    """A database of its own on a server, one per run."""

    url: str
    lease_seconds: float = 5.0

    def __str__(self) -> str:
        """Without the password: it is shown to people and written to logs."""
        return re.sub(r"(//[^/@:]*):[^@]*@", r"\1:…@", self.url)


DatabaseLocation = Path | PostgresqlLocation


def postgresql_driver() -> ModuleType:
    """The door to PostgreSQL; ConfigurationError where its driver is not installed."""
    if importlib.util.find_spec("psycopg") is None:
        raise ConfigurationError(
            "run.toml names a PostgreSQL server, and its driver is not installed; install it with "
            "`pip install swarmtrain[postgresql]`"
        )
    return importlib.import_module("swarm_coordinator.storage.postgresql")


@contextlib.contextmanager
def open_for_reading(place: DatabaseLocation) -> Iterator[Connection]:
    """One moment of the database, whatever is written meanwhile. StorageError when it is damaged.

    Beside a running coordinator as well as without one.
    """
    if isinstance(place, PostgresqlLocation):
        with postgresql_driver().open_for_reading(place) as remote:
            yield remote
        return
    connection = sqlite.open_read_only(place)
    try:
        with sqlite.storage_errors(place):
            connection.execute("BEGIN")
            yield connection
    finally:
        connection.close()


def database_exists(place: DatabaseLocation) -> bool:
    """Whether the run has a database yet."""
    if isinstance(place, PostgresqlLocation):
        return bool(postgresql_driver().database_exists(place))
    return place.exists()


def check_pages(place: DatabaseLocation, *, thorough: bool = True) -> list[str]:
    """What the database itself finds wrong. A PostgreSQL server has its own people for that."""
    if isinstance(place, PostgresqlLocation):
        return []
    return sqlite.check_pages(place, thorough=thorough)


def copy_database(place: DatabaseLocation, target: Path) -> None:
    """A copy of one moment of it, as a file of SQLite's: what a backup holds."""
    if isinstance(place, PostgresqlLocation):
        postgresql_driver().copy_database(place, target)
    else:
        sqlite.copy_database(place, target)
