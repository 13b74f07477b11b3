"""Real runs for the tests of this folder: a coordinator and volunteers, each a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from integration.real_run import Run, runs


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Make a run folder (its path has a space) and end every process of it afterwards."""
    with runs(tmp_path) as make:
        yield make
