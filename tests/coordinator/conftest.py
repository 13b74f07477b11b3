"""Places for a run's database: a file, or a database on a server that the tests start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kits.coordinator import postgresql as postgresql_kit
from swarm_coordinator.storage.connection import DatabaseLocation


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgresql_kit.Server]:
    with postgresql_kit.server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], DatabaseLocation]:
    """Each call another one."""
    if request.param == "sqlite":
        numbers = count(1)
        return lambda: tmp_path / f"run-{next(numbers)}.sqlite3"
    server: postgresql_kit.Server = request.getfixturevalue("postgresql")
    return server.place


@pytest.fixture
def place(new_place: Callable[[], DatabaseLocation]) -> DatabaseLocation:
    return new_place()
