"""Tables of docs/benchmarks.md with the account of a step. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.pages.markdown import markdown_table
from benchmarks.wan.timeline.account import KINDS

_COLUMNS = ("run", "stage", *KINDS, "to the next stage (link alone)", "back (link alone)")


def timeline_markdown(document: Mapping[str, Any]) -> str:
    """A table per mix with a row per configuration and stage: parts of a step, transfer times."""
    measured = document["steps"] - document["warmup_steps"] - document["cooldown_steps"]
    lines = [
        f"{document['measured_at'][:10]}, load {document['load_before']:.1f} before; medians of "
        f"{measured} steps of one run each, in seconds.",
    ]
    for name, runs in document["mixes"].items():
        rows = [row for one in runs.values() for row in _rows(one)]
        alignment = "l" + "r" * (len(_COLUMNS) - 1)
        lines += ["", f"**{name}**", "", *markdown_table(_COLUMNS, alignment, rows)]
    return "\n".join(lines)


def _rows(one: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for stage, row in enumerate(one["stages"]):
        title = f"{one['title']}: {one['step_seconds']:.2f} s per step" if stage == 0 else ""
        transfers = ["", ""]
        if stage < len(one["borders"]):
            border = one["borders"][stage]
            transfers = [
                f"{_seconds(border[name])} ({least:.2f})"
                for name, least in zip(
                    ("activation", "gradient"), border["least_seconds"], strict=True
                )
            ]
        rows.append([title, str(stage), *(f"{row[kind]:.2f}" for kind in KINDS), *transfers])
    return rows


def _seconds(values: list[float]) -> str:
    return f"{median(values):.2f}" if values else "?"
