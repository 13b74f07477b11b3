"""Comparison of counts with the baseline, with messages for the differences."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.counts.instructions import Cost
from swarm_shared.base.errors import StorageError

TOLERANCE = 0.03
"""Accepted relative growth of instructions and calls. Counts of the same code are identical (a test
checks this); the margin covers differences between the compilers of Python's patch versions."""

VERSION = 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """Messages of a comparison: `worse` fails the check, `notes` do not."""

    worse: tuple[str, ...]
    notes: tuple[str, ...]


def document_of(
    sizes: Mapping[str, int], costs: Mapping[str, Cost], machine: Mapping[str, Any]
) -> dict[str, Any]:
    return {
        "version": VERSION,
        "python": platform.python_version(),
        "implementation": platform.python_implementation(),
        "packages": machine["packages"],
        "bytes": dict(sizes),
        "instructions": {name: asdict(cost) for name, cost in costs.items()},
    }


def compare(now: Mapping[str, Any], baseline: Mapping[str, Any]) -> Verdict:
    """Compare counts: bytes must be equal, instructions and calls may grow by TOLERANCE."""
    if baseline.get("version") != VERSION:
        raise StorageError(
            f"the baseline is of form {baseline.get('version')!r}, and {VERSION} is known here; "
            "make it again with --accept"
        )
    worse, notes = _compare_bytes(now["bytes"], baseline["bytes"])
    if _bytecode(now) != _bytecode(baseline):
        notes.append(
            f"instructions are not compared: this is {_bytecode(now)}, and the baseline was "
            f"counted with {_bytecode(baseline)}"
        )
        return Verdict(tuple(worse), tuple(notes))
    for name, cost in now["instructions"].items():
        before = baseline["instructions"].get(name)
        if before is None:
            worse.append(f"{name}: is not in the baseline")
            continue
        for unit, count in cost.items():
            sentence = f"{name}: {count:,} {unit}, {before[unit]:,} in the baseline"
            growth = count / before[unit] - 1 if before[unit] else float(count > 0)
            if count > before[unit] * (1 + TOLERANCE):
                worse.append(f"{sentence} ({growth:+.1%}, {TOLERANCE:.0%} allowed)")
            elif count < before[unit] * (1 - TOLERANCE):
                notes.append(f"{sentence} ({growth:+.1%}); accept it, so that it stays so")
    worse += _gone(now["instructions"], baseline["instructions"])
    return Verdict(tuple(worse), tuple(notes))


def _compare_bytes(
    now: Mapping[str, int], before: Mapping[str, int]
) -> tuple[list[str], list[str]]:
    worse = [
        f"{name}: {size:,} bytes, {before[name]:,} in the baseline ({size - before[name]:+,})"
        for name, size in now.items()
        if name in before and size != before[name]
    ]
    worse += [f"{name}: is not in the baseline" for name in now if name not in before]
    return worse + _gone(now, before), []


def _gone(now: Mapping[str, Any], before: Mapping[str, Any]) -> list[str]:
    return [f"{name}: is in the baseline and not counted any more" for name in before.keys() - now]


def _bytecode(document: Mapping[str, Any]) -> str:
    """Return the Python version whose bytecode was counted."""
    minor = ".".join(str(document["python"]).split(".")[:2])
    return f"{document['implementation']} {minor}"
