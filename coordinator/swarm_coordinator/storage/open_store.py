"""Opening the store of a run; the only module that imports both kinds of store."""

from __future__ import annotations

from swarm_coordinator.storage.database import postgresql_driver
from swarm_coordinator.storage.location import DatabaseLocation, PostgresqlLocation
from swarm_coordinator.storage.store import SqliteStore, Store
from swarm_shared.base.clock import Clock, wall


def open_store(location: DatabaseLocation, clock: Clock = wall) -> Store:
    """Open the store at `location`; StorageError when it cannot be opened."""
    if isinstance(location, PostgresqlLocation):
        postgresql_driver()
        from swarm_coordinator.storage.postgresql_store import PostgresqlStore

        return PostgresqlStore.open(location, clock)
    return SqliteStore.open(location, clock)
