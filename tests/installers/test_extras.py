"""What the wheel asks for is enough: for a volunteer without extras, for an organiser with one."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from kits.installers.tree import make_wheel

pytestmark = [pytest.mark.process, pytest.mark.timeout(300)]

IMPORTING = """
import importlib, json, pkgutil, sys
forbidden, packages = json.loads(sys.argv[1]), sys.argv[2:]

class Forbid:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Forbid())
names = list(packages)
for package in packages:
    module = importlib.import_module(package)
    assert not module.__file__.startswith(sys.prefix), module.__file__
    for found in pkgutil.walk_packages(module.__path__, package + "."):
        if not found.name.endswith("__main__"):
            importlib.import_module(found.name)
            names.append(found.name)
print(json.dumps(names))
"""
"""Imports every module of packages while those of others cannot be imported."""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    with zipfile.ZipFile(make_wheel(folder)) as archive:
        archive.extractall(folder / "unpacked")
    return folder / "unpacked"


def with_what_it_needs(requirement: Requirement, found: set[str]) -> None:
    """Add a package and all that it depends on to `found`."""
    name = canonicalize_name(requirement.name)
    extras = ["", *requirement.extras]
    if name not in found or requirement.extras:
        found.add(name)
        for line in importlib.metadata.requires(name) or ():
            needed = Requirement(line)
            if needed.marker is None or any(needed.marker.evaluate({"extra": e}) for e in extras):
                with_what_it_needs(needed, found)


def modules_beyond(unpacked: Path, extra: str) -> list[str]:
    """Top modules of this environment that an installation with `extra` alone would not have."""
    (place,) = unpacked.glob("*.dist-info")
    needed: set[str] = set()
    for line in importlib.metadata.PathDistribution(place).requires or ():
        requirement = Requirement(line)
        if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
            with_what_it_needs(requirement, needed)
    return [
        module
        for module, owners in importlib.metadata.packages_distributions().items()
        if needed.isdisjoint(map(canonicalize_name, owners)) and not module.startswith("swarm_")
    ]


def imported(unpacked: Path, forbidden: list[str], *packages: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, json.dumps(forbidden), *packages],
        env={**os.environ, "PYTHONPATH": str(unpacked)}, cwd=unpacked,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def test_a_volunteers_program_imports_nothing_that_only_an_extra_brings(unpacked: Path) -> None:
    forbidden = modules_beyond(unpacked, "")
    assert {"fastapi", "starlette", "matplotlib", "psycopg"} <= set(forbidden)
    names = imported(unpacked, forbidden, "swarm_client", "swarm_shared")
    assert len(names) > 200


def test_the_coordinator_imports_nothing_beyond_its_extras(unpacked: Path) -> None:
    forbidden = sorted(
        set(modules_beyond(unpacked, "coordinator")) & set(modules_beyond(unpacked, "postgresql"))
    )
    assert {"fastapi", "pytest"} & set(forbidden) == {"pytest"}
    assert len(imported(unpacked, forbidden, "swarm_coordinator")) > 100


def test_the_coordinator_without_its_extra_says_what_to_install(unpacked: Path) -> None:
    without = (
        "import sys\n"
        "sys.modules['fastapi'] = sys.modules['matplotlib'] = None\n"
        "sys.argv = ['swarm-coordinator', 'status', 'x']\n"
        "from swarm_coordinator.cli.main import main\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", without], env={**os.environ, "PYTHONPATH": str(unpacked)},
        cwd=unpacked, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 3
    assert "pip install 'swarmtrain[coordinator]'" in done.stderr
    assert done.stderr.count("\n") == 1
