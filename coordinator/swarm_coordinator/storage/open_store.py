"""Opening the store that a run has: the one place that knows both."""

from __future__ import annotations

from swarm_coordinator.storage.location import (
    DatabaseLocation,
    PostgresqlLocation,
    postgresql_driver,
)
from swarm_coordinator.storage.store import SqliteStore, WriterStore
from swarm_shared.base.clock import Clock, wall


def open_store(place: DatabaseLocation, clock: Clock = wall) -> WriterStore:
    """StorageError when it cannot be had."""
    if isinstance(place, PostgresqlLocation):
        postgresql_driver()
        from swarm_coordinator.storage.postgresql_store import PostgresqlStore

        return PostgresqlStore.open(place, clock)
    return SqliteStore.open(place, clock)
