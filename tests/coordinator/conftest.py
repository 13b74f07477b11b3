"""Run folders, places for a run's database (a file, or a server that the tests start), and a
receiver of traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kits.coordinator import postgresql as postgresql_kit
from kits.coordinator.otlp_receiver import OtlpReceiver, otlp_receiver
from kits.coordinator.shell_world import make_run
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.store import Store, open_store


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    """A run that was never started."""
    return make_run(tmp_path / "a run")


@pytest.fixture
def token_run(tmp_path: Path) -> RunFolder:
    """One that admits bearers of a token."""
    return make_run(tmp_path / "a run", admission__mode="token")


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


@pytest.fixture
def store(place: DatabaseLocation) -> Iterator[Store]:
    """The store of a coordinator that has started."""
    opened = open_store(place)
    opened.next_generation()
    yield opened
    opened.close()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """An OTLP/HTTP receiver of this machine, and exporters that try once: for less time than they
    would wait before the second time."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with otlp_receiver() as listening:
        yield listening
