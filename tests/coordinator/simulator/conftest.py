"""The manifest of a small run of two stages."""

from __future__ import annotations

import pytest

from kits.coordinator.shell_world import make_run
from swarm_coordinator.durability.run_files import load_manifest
from swarm_shared.run.manifest import Manifest


@pytest.fixture(scope="session")
def manifest(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    return load_manifest(make_run(tmp_path_factory.mktemp("simulated") / "run"))
