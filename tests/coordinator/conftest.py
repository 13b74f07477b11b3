"""Places for a run's database: a file, or a database on a server that the tests start.

And a receiver of traces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from kits.coordinator import postgresql as postgresql_kit
from kits.coordinator.otlp_receiver import OtlpReceiver, otlp_receiver
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


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    """An OTLP/HTTP receiver of this machine, and exporters that try once: for less time than they
    would wait before the second time."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.5")
    with otlp_receiver() as listening:
        yield listening
