"""Runs `async def` tests under trio, each with a time limit so that a dead-lock names its test.

Property tests draw new examples in every run, also under CI, where Hypothesis would otherwise
repeat the same ones. All of them draw from one seed, which the header of the report names. They
have no deadline: they run beside other work, and how long an example takes says nothing about
what it tests.
"""

from __future__ import annotations

import inspect
import resource
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import trio

from kits.power_cut.lab import PowerCutDisk, power_cut_disk

pytest_plugins = ["kits.tiers", "kits.skip_policy"]

# jeepney, with which D-Bus is asked, is installed on Linux only.
collect_ignore_glob = [] if sys.platform == "linux" else ["**/test_bus_*.py"]

# On top of the profile that Hypothesis loads by itself: under CI that one is derandomized.
hypothesis.settings.register_profile(
    "shared machine", deadline=None, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("shared machine")

_WORKER_SEED = "hypothesis_seed"
"""Key under which pytest-xdist's controller passes the seed to its workers."""

_TEST_SECONDS = 60.0


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Choose the seed before Hypothesis's own plugin reads the option."""
    if config.option.hypothesis_seed is None:
        passed = getattr(config, "workerinput", {}).get(_WORKER_SEED)
        config.option.hypothesis_seed = passed or str(secrets.randbits(32))


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[_WORKER_SEED] = node.config.option.hypothesis_seed


def pytest_report_header(config: pytest.Config) -> str:
    seed = config.option.hypothesis_seed
    return f"hypothesis seed: {seed} (repeat with --hypothesis-seed={seed})"


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Print the seed again beside failures; with `-q` there is no header."""
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(pytest_report_header(config))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    test = partial(pyfuncitem.obj, **{name: pyfuncitem.funcargs[name] for name in names})

    async def main() -> None:
        with trio.fail_after(_TEST_SECONDS):
            await test()

    trio.run(main)
    return True


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[PowerCutDisk]:
    """A file system whose power can be cut."""
    with power_cut_disk(tmp_path / "disk") as mounted:
        yield mounted


@pytest.fixture
def files_no_larger_than() -> Callable[[int], AbstractContextManager[None]]:
    """A context in which the kernel refuses to grow a file beyond so many bytes, like a full disk.

    Not for a whole test: the limit also holds for the file that pytest may write its report to.
    """

    @contextmanager
    def limit(size_bytes: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limit
