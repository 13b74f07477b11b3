"""The account of a step as tables for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from benchmarks.wan.timeline.account import KINDS


def timeline_markdown(document: Mapping[str, Any]) -> str:
    """A table per mix and way, a row per stage; and how long tensors were under way."""
    measured = document["steps"] - document["warmup_steps"] - document["cooldown_steps"]
    lines = [
        f"{document['measured_at'][:10]}, load {document['load_before']:.1f} before; medians of "
        f"{measured} steps of one run each, in seconds.",
    ]
    for name, ways in document["mixes"].items():
        for one in ways.values():
            lines += ["", f"**{name}**, {one['title']}: {one['step_seconds']:.2f} s a step", ""]
            lines += _table(one)
            lines += ["", _borders(one)]
    return "\n".join(lines)


def _table(one: Mapping[str, Any]) -> list[str]:
    lines = [f"| stage | {' | '.join(KINDS)} |", "|---:|" + "---:|" * len(KINDS)]
    for stage, row in enumerate(one["stages"]):
        lines.append(f"| {stage} | {' | '.join(f'{row[kind]:.2f}' for kind in KINDS)} |")
    return lines


def _borders(one: Mapping[str, Any]) -> str:
    """The line's own time beside what it took."""
    said = []
    for index, border in enumerate(one["borders"]):
        there, back = (_seconds(border[name]) for name in ("activation", "gradient"))
        least = border["least_seconds"]
        said.append(
            f"{index} to {index + 1} {there} (the line alone {least[0]:.2f}), back {back} "
            f"({least[1]:.2f})"
        )
    return f"Under way, median: {'; '.join(said)}."


def _seconds(values: list[float]) -> str:
    return f"{median(values):.2f}" if values else "?"
