"""The trace format of machines' arrivals and departures: reading and writing.

A text file. The first line is `swarmtrain-trace 1`; each other line is an event,

    SECONDS join|leave|crash NAME

ordered by time from 0; blank lines and lines that begin with # are ignored. `leave` is a volunteer
that announces its departure and goes when it may; `crash` is one that is lost without notice. A
name may join again after it has left.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from swarm_shared.base.atomic_file import write_atomically
from swarm_shared.base.errors import DataError

HEADER = "swarmtrain-trace 1"
TraceEventKind = Literal["join", "leave", "crash"]
KINDS: tuple[TraceEventKind, ...] = get_args(TraceEventKind)


@dataclass(frozen=True, slots=True)
class TraceEvent:
    """One arrival or departure."""

    seconds: float
    kind: TraceEventKind
    name: str


def read_trace(path: Path) -> list[TraceEvent]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"the trace {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise DataError(f"the trace {path} is not UTF-8 text (at byte {error.start})") from error
    return parse_trace(text, str(path))


def parse_trace(text: str, where: str) -> list[TraceEvent]:
    """Parse the events; DataError names the wrong line."""
    lines = text.splitlines()
    if not lines or lines[0].strip() != HEADER:
        raise DataError(f"{where} is not a trace: its first line must be {HEADER!r}")
    changes: list[TraceEvent] = []
    present: set[str] = set()
    for number, line in enumerate(lines[1:], start=2):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        change = _parse_line(line, f"{where}, line {number}")
        if changes and change.seconds < changes[-1].seconds:
            raise DataError(f"{where}, line {number}: time goes backwards; sort the lines by it")
        if (change.kind == "join") == (change.name in present):
            there = "is there already" if change.kind == "join" else "is not there"
            raise DataError(f"{where}, line {number}: {change.name} {there}")
        (present.add if change.kind == "join" else present.remove)(change.name)
        changes.append(change)
    return changes


def _parse_line(line: str, place: str) -> TraceEvent:
    parts = line.split()
    if len(parts) != 3:
        raise DataError(f"{place}: it must be SECONDS KIND NAME, not {line.strip()[:80]!r}")
    try:
        seconds = float(parts[0])
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise DataError(f"{place}: {parts[0]!r} is not a number of seconds from 0")
    for kind in KINDS:
        if parts[1] == kind:
            return TraceEvent(seconds, kind, parts[2])
    raise DataError(f"{place}: {parts[1]!r} is none of {', '.join(KINDS)}")


def trace_text(changes: Iterable[TraceEvent], comment: str = "") -> str:
    lines = [HEADER, *(f"# {line}" for line in comment.splitlines())]
    lines.extend(f"{change.seconds:.3f} {change.kind} {change.name}" for change in changes)
    return "\n".join(lines) + "\n"


def write_trace(path: Path, changes: Iterable[TraceEvent], comment: str = "") -> None:
    write_atomically(path, trace_text(changes, comment).encode())
