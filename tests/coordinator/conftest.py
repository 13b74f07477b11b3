"""Makes the simulated world (`swarm_world`, `swarm_peer`) importable by the tests beside it, and
gives tests a place for a run's database: a file, or a database on a server of the tests' own."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parent)
if FOLDER not in sys.path:
    # pytest's importlib mode puts no test folder on the path.
    sys.path.append(FOLDER)

import postgresql_kit  # noqa: E402

from swarm_coordinator.storage.location import Place  # noqa: E402


@pytest.fixture(scope="session")
def postgresql() -> Iterator[postgresql_kit.Server]:
    with postgresql_kit.server() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def new_place(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Place]:
    """Each call another one."""
    if request.param == "sqlite":
        numbers = count(1)
        return lambda: tmp_path / f"run-{next(numbers)}.sqlite3"
    server: postgresql_kit.Server = request.getfixturevalue("postgresql")
    return server.place


@pytest.fixture
def place(new_place: Callable[[], Place]) -> Place:
    return new_place()
