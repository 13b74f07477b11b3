"""Property tests draw other examples in every run, and the same ones from the same seed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.process

PROPERTIES = """
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@pytest.mark.parametrize("number", range(2))
def test_property(number):
    drawn = []

    @settings(max_examples=20)
    @given(st.integers(0, 2**60))
    def attempt(value):
        drawn.append(value)

    attempt()
    Path(f"drawn-{number}").write_text(repr(drawn))
"""

PLUGINS = ("-p", "_hypothesis_pytestplugin", "-p", "xdist.plugin")
"""The others take seconds to load."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Property tests under this project's `conftest.py`."""
    own = Path(__file__).with_name("conftest.py")
    (tmp_path / "conftest.py").write_text(own.read_text())
    (tmp_path / "test_properties.py").write_text(PROPERTIES)
    (tmp_path / "pytest.ini").write_text(f'[pytest]\npythonpath = "{own.parent}"\n')
    return tmp_path


def drawn(folder: Path, *options: str) -> tuple[str, str]:
    """The seed that the header of one run names, and what both tests have drawn."""
    shown = subprocess.run(
        [sys.executable, "-m", "pytest", *PLUGINS, *options],
        cwd=folder, env=os.environ | {"CI": "true", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    [seed] = re.findall(
        r"^hypothesis seed: (\d+) \(repeat with --hypothesis-seed=\1\)$", shown, re.M
    )
    first, second = ((folder / f"drawn-{number}").read_text() for number in range(2))
    assert first == second, "both draw from the run's seed, in whatever process"
    return seed, first


def test_two_runs_draw_other_examples_also_under_ci(folder: Path) -> None:
    first, second = drawn(folder), drawn(folder)
    assert first[0] != second[0]
    assert first[1] != second[1]


def test_a_seed_repeats_a_run_of_several_processes_in_one(folder: Path) -> None:
    seed, examples = drawn(folder, "-n", "2")
    assert drawn(folder, f"--hypothesis-seed={seed}") == (seed, examples)
    assert drawn(folder, "-n", "2", f"--hypothesis-seed={seed}") == (seed, examples)
