"""Real runs for the tests of this folder: a coordinator and volunteers, each a process."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.runs.real_run import Run, runs

_RUNS = pytest.StashKey[list[Run]]()


@pytest.fixture
def make_run(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Callable[..., Run]]:
    """Make a run folder (its path has a space) and end every process of it afterwards."""
    made = request.node.stash[_RUNS] = []
    with runs(tmp_path) as make:

        def keep(*words: Any, **named: Any) -> Run:
            made.append(make(*words, **named))
            return made[-1]

        yield keep


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With a failure comes what the processes of its runs said last."""
    report = yield
    if report.when == "call" and report.failed:
        for run in item.stash.get(_RUNS, []):
            report.sections.append(("the run", run.describe()))
    return report
