"""A pytest plugin under which a missing tool fails in continuous integration (`CI` is set).

A skipped test is green, so that a machine without PostgreSQL or network namespaces would lose
these tests unnoticed. SWARM_MAY_SKIP names tools that a machine cannot have, with commas.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator

import pytest

MAY_SKIP_VARIABLE = "SWARM_MAY_SKIP"

HARDWARE = re.compile(
    r"needs a GPU|needs a CUDA device|there is a GPU here|this machine has a GPU"
    r"|needs? root|one core leaves no choice|there is no container engine here"
    r"|this (?:machine's )?kernel (?:or container )?(?:does not allow|has no)|the kernel needs"
)
"""Reasons that name what no installation changes: these may always skip."""

TOOLS = {
    "lab": re.compile(r"install_network_lab|miniupnpd needs iptables-legacy"),
    "postgresql": re.compile(r"install_postgresql"),
    "chromium": re.compile(r"install_chromium"),
    "dbus": re.compile(r"install_dbus"),
    "installers": re.compile(r"install_installer_tools|dpkg-deb|cannot use the packages of"),
}


def may_skip(reason: str) -> bool:
    named = [name for name in os.environ.get(MAY_SKIP_VARIABLE, "").split(",") if name]
    if unknown := set(named) - TOOLS.keys():
        raise pytest.UsageError(
            f"{MAY_SKIP_VARIABLE} names {', '.join(sorted(unknown))}; there are {', '.join(TOOLS)}"
        )
    return bool(HARDWARE.search(reason)) or any(TOOLS[name].search(reason) for name in named)


def _fail_if_not_allowed(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail") or not os.environ.get("CI"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    if not may_skip(reason):
        report.outcome = "failed"
        report.longrepr = (
            f"{reason}\nIn continuous integration this is a failure. Install what is missing, or "
            f"name it in {MAY_SKIP_VARIABLE} ({', '.join(TOOLS)}) for a machine that cannot have it"
        )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_not_allowed(report)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_not_allowed(report)
    return report
