"""Real runs for the tests of this folder: a coordinator and volunteers, each a process."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from kits.runs.real_run import Run, references_shared_in, runs

_RUNS = pytest.StashKey[list[Run]]()


@pytest.fixture(scope="session", autouse=True)
def shared_references(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each reference is trained once per session, whichever worker needs it first."""
    base = tmp_path_factory.getbasetemp()
    # A worker of pytest-xdist has a folder of its own inside the session's.
    session = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    with references_shared_in(session / "references"):
        yield


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
    """Add the last log lines of its runs to the report of a failure."""
    report = yield
    if report.when == "call" and report.failed:
        for run in item.stash.get(_RUNS, []):
            report.sections.append(("the run", run.describe()))
    return report
