"""Which tests a call of pytest runs, and which skips fail in continuous integration."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kits.skip_policy import may_skip

CHEAP = """
import pytest

def test_unit(): pass

@pytest.mark.process
def test_process(): pass
"""
COSTLY = """
import pytest

pytestmark = pytest.mark.lab

def test_lab(): pass

@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_nightly_lab(): pass
"""
SKIPS = """
import pytest

def test_without_server(): pytest.skip("no server; sh tools/install_postgresql.sh installs one")

@pytest.mark.skipif(True, reason="needs a GPU")
def test_gpu(): pass
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Tests of every tier under this project's plugins."""
    tests = Path(__file__).parent
    for name, text in (("cheap", CHEAP), ("costly", COSTLY), ("skips", SKIPS)):
        (tmp_path / f"test_{name}.py").write_text(text)
    (tmp_path / "pytest.ini").write_text(
        f'[pytest]\npythonpath = "{tests}"\nmarkers =\n    process\n    lab\n    nightly\n'
    )
    return tmp_path


def run(folder: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    plugins = ("xdist.plugin", "pytest_timeout", "kits.tiers", "kits.skip_policy")
    words = [word for plugin in plugins for word in ("-p", plugin)]
    kept = {
        name: value for name, value in os.environ.items() if name not in ("CI", "SWARM_MAY_SKIP")
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", *words, "-rA", *options],
        cwd=folder, capture_output=True, text=True, check=False,
        env=kept | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"} | environment,
    )  # fmt: skip


def passed(folder: Path, *options: str) -> set[str]:
    lines = run(folder, *options).stdout.splitlines()
    names = (line.split("::")[-1] for line in lines if line.startswith("PASSED"))
    return {name.split("@")[0] for name in names}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ((), "unit"),
        (("--tier", "process"), "process"),
        (("--tier", "lab"), "lab"),
        (("--tier", "nightly"), "nightly_lab"),
        (("--tier", "all"), "lab nightly_lab process unit"),
        (("-m", "not process"), "unit"),
        (("-k", "lab"), ""),
        (("test_costly.py",), "lab nightly_lab"),
        (("test_costly.py::test_nightly_lab", "test_cheap.py"), "nightly_lab process unit"),
        (("--tier", "process", "test_cheap.py"), "process"),
        (
            ("--tier", "all", "-n", "2", "--dist", "loadgroup", "test_costly.py"),
            "lab nightly_lab",
        ),
        (("-n", "1", "test_costly.py"), "lab nightly_lab"),
    ],
    ids=lambda words: words if isinstance(words, str) else " ".join(words),
)
def test_options_select_tests_by_cost(
    folder: Path, options: tuple[str, ...], expected: str
) -> None:
    assert passed(folder, *options) == {f"test_{name}" for name in expected.split()}


def test_a_test_with_a_longer_time_limit_runs_first(folder: Path) -> None:
    lines = run(folder, "--tier", "all", "-v").stdout.splitlines()
    first = next(line for line in lines if "PASSED" in line)
    assert "test_nightly_lab" in first


@pytest.mark.parametrize(
    ("environment", "failed"),
    [({}, 0), ({"CI": "true"}, 1), ({"CI": "true", "SWARM_MAY_SKIP": "lab,postgresql"}, 0)],
    ids=["elsewhere", "ci", "ci that may skip"],
)
def test_a_missing_tool_fails_in_continuous_integration(
    folder: Path, environment: dict[str, str], failed: int
) -> None:
    done = run(folder, "test_skips.py", **environment)
    assert (done.returncode, "1 failed" in done.stdout) == (failed, bool(failed)), done.stdout
    assert f"{2 - failed} skipped" in done.stdout


def test_only_names_of_tools_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_MAY_SKIP", "postgres")
    with pytest.raises(pytest.UsageError, match="SWARM_MAY_SKIP names postgres"):
        may_skip("some reason")
