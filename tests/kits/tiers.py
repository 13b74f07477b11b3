"""A pytest plugin that selects tests by what they cost: the option `--tier`.

    unit      unmarked tests: no program of the product is started
    process   marked `process`: real programs of the product, or seconds of computing
    lab       marked `lab`: network namespaces or a system that boots, as root
    nightly   marked `nightly`, whatever else they are; the three tiers above leave them out
    all       every test

Without the option, the unit tier runs, and of each file named on the command line every test.
`-k` and `-m` restrict the selection further; they do not replace it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

TIERS = ("unit", "process", "lab", "nightly", "all")

LAB_GROUP = "network lab"
"""The group of tests that build networks of namespaces; two of them cannot run at once."""

GROUP_MARK = "@"
"""What pytest-xdist puts between a node id and the name of its group."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("swarmtrain")
    group.addoption(
        "--tier", choices=TIERS, default=None,
        help="run the tests of this cost (default: unit, and all of each file that is named)",
    )  # fmt: skip


def pytest_report_header(config: pytest.Config) -> str:
    tier = config.getoption("--tier")
    return f"tier: {tier or 'unit, and all of each named file'} (--tier {'|'.join(TIERS)})"


def tier_of(item: pytest.Item) -> str:
    for tier in ("nightly", "lab", "process"):
        if item.get_closest_marker(tier) is not None:
            return tier
    return "unit"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the other tiers, order and group the rest. pytest-xdist reads the groups next."""
    tier = config.getoption("--tier")
    named = _named_files(config) if tier is None else set()
    kept: list[pytest.Item] = []
    deselected: list[pytest.Item] = []
    for item in items:
        wanted = tier == "all" or tier_of(item) == (tier or "unit") or item.path in named
        (kept if wanted else deselected).append(item)
    if deselected:
        config.hook.pytest_deselected(items=deselected)
    # The longest first: no worker is left with a whole run when the other one has ended.
    kept.sort(key=_time_limit, reverse=True)
    for item in kept:
        group = _group_of(item)
        if group is not None and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(group))
    items[:] = kept


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse a worker without groups: it would carry out runs that another worker shares out."""
    wanted = session.config.getoption("loadgroup", False)
    grouped = [item for item in session.items if item.get_closest_marker("xdist_group") is not None]
    if wanted and not all(GROUP_MARK in item.nodeid for item in grouped):
        raise pytest.UsageError(
            "pytest-xdist has formed no groups of tests: the two versions installed do not go "
            "together; install those of pyproject.toml with `make setup-dev`"
        )


def _group_of(item: pytest.Item) -> str | None:
    """Return the group of tests that share a worker: those of a lab, or of a fixture of their file.
    None for a test that either worker may take."""
    if item.get_closest_marker("lab") is not None:
        return LAB_GROUP
    fixtures = getattr(item, "_fixtureinfo").name2fixturedefs  # noqa: B009 (typed nowhere)
    shared = any(one.scope == "module" for known in fixtures.values() for one in known)
    return item.path.stem if shared else None


def _named_files(config: pytest.Config) -> set[Path]:
    """Return the files that the command line names, alone or in a node id."""
    paths = (config.invocation_params.dir / arg.split("::")[0] for arg in config.args)
    return {path.resolve() for path in paths if path.is_file()}


def _time_limit(item: pytest.Item) -> float:
    marker = item.get_closest_marker("timeout")
    return float(marker.args[0]) if marker is not None and marker.args else 0.0
