"""What a check-up found: values, their JSON document, their table, the exit code. No I/O.

The exit code is 0 when nothing is a problem (warnings are none), otherwise that of the first
problem in the order of CHECKS, which is the order of causes: a home that cannot be used comes
before a run that refuses this machine. A damaged invite and wrong options are refused before any
check. The codes are those of `swarm_shared.base.errors`:

    1   Python or torch does not work here         8   the network or the coordinator
    3   a key file or preferences are unusable     9   the run refuses this machine
    6   memory or the device                       10  another version is needed
    7   the disk, the home folder                  11  the coordinator breaks the protocol
    14  the device computes wrongly, or its memory does not keep its content
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from enum import StrEnum
from typing import Literal

from pydantic import Field

from swarm_shared.base.errors import SwarmError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.text import printable_line
from swarm_shared.protocol import SOFTWARE_VERSION

DOCUMENT_VERSION = 1
"""Increased when a field changes its meaning or is removed; new fields and new checks do
not count."""

CHECKS = {
    "python": "Python",
    "torch": "PyTorch",
    "gpu": "GPU and driver",
    "device": "Device and memory",
    "self-test": "Self-test",
    "home": "Home folder",
    "disk": "Disk space",
    "p2pd": "hivemind's p2pd",
    "invite": "Invite",
    "coordinator": "Coordinator",
    "version": "Version",
    "admission": "Admission",
    "clock": "Clock",
    "reachability": "Reachability",
    "link": "Link",
    "peers": "Some peers",
}
"""Identifiers for programs, titles for people; in display order."""

NETWORK_CHECKS = ("coordinator", "version", "admission", "clock", "reachability", "link", "peers")

Detail = str | float | int | bool | None


class State(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """It works, worse than it could."""
    PROBLEM = "problem"
    """Joining fails, or achieves nothing."""
    SKIPPED = "skipped"


class Check(FrozenModel):
    id: str
    state: State
    seen: str
    fix: str = ""
    """One sentence, for a reader who does not know what the check is about."""
    exit_code: int = 0
    details: dict[str, Detail] = Field(default_factory=dict)
    """The figures behind `seen`; units are in the names."""


def ok(id: str, seen: str, **details: Detail) -> Check:
    return Check(id=id, state=State.OK, seen=seen, details=details)


def warning(id: str, seen: str, fix: str, **details: Detail) -> Check:
    return Check(id=id, state=State.WARNING, seen=seen, fix=fix, details=details)


def problem(id: str, kind: type[SwarmError], seen: str, fix: str, **details: Detail) -> Check:
    code = kind.exit_code
    return Check(
        id=id, state=State.PROBLEM, seen=seen, fix=fix, exit_code=code, details=details
    )  # fmt: skip


def skipped(id: str, why: str) -> Check:
    return Check(id=id, state=State.SKIPPED, seen=why)


class Results:
    """The results so far; each check has one result, the first."""

    def __init__(self) -> None:
        self._found: dict[str, Check] = {}

    def put(self, *checks: Check) -> None:
        for check in checks:
            assert check.id in CHECKS, "every check has a title"
            self._found.setdefault(check.id, check)

    def skip(self, ids: Iterable[str], why: str) -> None:
        self.put(*(skipped(id, why) for id in ids))

    def replace(self, check: Check) -> None:
        """Replace the check's result with a better informed one."""
        self._found[check.id] = check

    def get(self, id: str) -> Check | None:
        return self._found.get(id)

    def all(self) -> tuple[Check, ...]:
        return tuple(self._found.values())


class Report(FrozenModel):
    """The document of `swarm-client doctor --json`."""

    document: Literal["swarm-client doctor"] = "swarm-client doctor"
    version: int = DOCUMENT_VERSION
    software: str = SOFTWARE_VERSION
    unix_seconds: float
    duration_seconds: float
    state: State
    """The worst state of all checks; skipped ones do not count."""
    exit_code: int
    checks: tuple[Check, ...]

    @classmethod
    def of(cls, checks: Iterable[Check], unix_seconds: float, duration_seconds: float) -> Report:
        """The report in the order of CHECKS; a check without a result was not finished in time."""
        found = {check.id: check for check in checks}
        ordered = tuple(
            found.get(id) or warning(id, "not finished in time", "Run this again.") for id in CHECKS
        )
        states = {check.state for check in ordered}
        worst = [state for state in (State.PROBLEM, State.WARNING, State.OK) if state in states]
        return cls(
            unix_seconds=unix_seconds,
            duration_seconds=duration_seconds,
            state=worst[0] if worst else State.SKIPPED,
            exit_code=next((check.exit_code for check in ordered if check.exit_code), 0),
            checks=ordered,
        )


_STATE_LABELS = {State.OK: "ok", State.WARNING: "WARN", State.PROBLEM: "FAIL", State.SKIPPED: "--"}
_TITLE_COLUMNS = max(len(title) for title in CHECKS.values())
_MARK_COLUMNS = 4
_SHORTEST_LINE = 40


def table(report: Report, columns: int) -> str:
    """One block per check, for a terminal of this width: plain text without colours."""
    indent = " " * (_MARK_COLUMNS + _TITLE_COLUMNS + 4)
    width = max(columns, len(indent) + _SHORTEST_LINE)
    lines: list[str] = []
    for check in report.checks:
        head = (
            f"{_STATE_LABELS[check.state]:>{_MARK_COLUMNS}}  {CHECKS[check.id]:<{_TITLE_COLUMNS}}  "
        )
        lines += _wrapped(check.seen, head, indent, width)
        if check.fix:
            lines += _wrapped(check.fix, f"{indent}-> ", f"{indent}   ", width)
    return "\n".join([*lines, "", summary(report)])


def summary(report: Report) -> str:
    counts = {state: sum(check.state is state for check in report.checks) for state in State}
    parts = [
        _count(counts[State.PROBLEM], "problem"),
        _count(counts[State.WARNING], "warning"),
        f"{counts[State.SKIPPED]} skipped" if counts[State.SKIPPED] else "",
    ]
    counted = ", ".join(part for part in parts if part) or "everything is in order"
    return f"{counted} (checked in {report.duration_seconds:.1f} s)"


def _wrapped(text: str, first: str, rest: str, width: int) -> list[str]:
    # It may quote what the coordinator has said.
    return textwrap.wrap(
        printable_line(text), width, initial_indent=first, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    ) or [first.rstrip()]  # fmt: skip


def _count(number: int, word: str) -> str:
    if not number:
        return ""
    return f"{number} {word}{'' if number == 1 else 's'}"
