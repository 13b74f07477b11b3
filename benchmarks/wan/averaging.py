"""How long an average takes beside its bound, from what its members wrote down. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.wan.mixes import Link
from swarm_shared.errors import SwarmError


def step_seconds(processes: Sequence[Sequence[Sequence[Any]]], step: int, members: int) -> float:
    """From the first member's begin to the last one's end."""
    spans = [
        (event[4], event[5])
        for events in processes
        for event in events
        if event[0] == "reduce" and event[2] == step
    ]
    if len(spans) != members:
        raise SwarmError(f"in step {step} {len(spans)} of {members} members averaged")
    seconds: float = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return seconds


def bound_seconds(gradient_bytes: int, members: int, link: Link) -> float:
    rate = min(link.up_bytes_per_second, link.down_bytes_per_second)
    return 2 * (members - 1) / members * gradient_bytes / rate


def all_reduce_markdown(document: Mapping[str, Any]) -> str:
    """A row per line, size and codec."""
    megabytes = document["rows"][0]["gradient_bytes"] / 1e6
    lines = [
        f"{document['measured_at'][:10]}, load {document['load_before']:.1f} before: "
        f"{megabytes:.1f} MB of gradients in float32, medians of {document['steps']} steps of one "
        "run each. Aim 0.70.",
        "",
        "| lines | members | codec | seconds | the bound of float32 | bound over seconds |",
        "|---|---:|---|---:|---:|---:|",
    ]
    for row in document["rows"]:
        lines.append(
            f"| {row['link']} | {row['members']} | {row['codec']} | {row['seconds_median']:.2f} "
            f"| {row['bound_seconds']:.2f} | {row['of_bound']:.2f} |"
        )
    return "\n".join(lines)
