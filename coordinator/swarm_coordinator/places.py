"""Where a run's database is: a file in its folder, or a PostgreSQL server that run.toml names.

Owns the choice, and reading for whoever only reads. The doors themselves are `database` (SQLite)
and `postgresql`, which is imported only for a run that uses it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from swarm_coordinator.database import open_read_only, storage_errors
from swarm_coordinator.sql import Connection

Place = Path


@contextlib.contextmanager
def reading(place: Place) -> Iterator[Connection]:
    """One moment of the database, whatever is written meanwhile. StorageError when it is damaged.

    Beside a running coordinator as well as without one.
    """
    connection = open_read_only(place)
    try:
        with storage_errors(place):
            connection.execute("BEGIN")
            yield connection
    finally:
        connection.close()


def is_there(place: Place) -> bool:
    """Whether the run has a database yet."""
    return place.exists()
