"""Time of an all-reduce, from its members' records, and its bound. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.pages.markdown import headed_table
from benchmarks.wan.mixes import Link
from swarm_shared.base.errors import SwarmError


def step_seconds(processes: Sequence[Sequence[Sequence[Any]]], step: int, members: int) -> float:
    """Return the seconds from the first member's start to the last one's end."""
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


def bound_seconds(gradient_bytes: int, lines: Sequence[Link]) -> float:
    """Return the minimum time of an all-reduce of two or more members, each reducing a share.

    A member that reduces the share s moves 1 + s(n-2) vectors each way. A given time therefore
    allows each link a share; the minimum is the time at which the shares add up to one. With equal
    links it is that of 2(n-1)/n vectors.
    """
    rates = [min(line.up_bytes_per_second, line.down_bytes_per_second) for line in lines]
    others = len(rates) - 2
    least, most = gradient_bytes / min(rates), 2 * gradient_bytes / min(rates)
    while most - least > 1e-9 * most:
        middle = (least + most) / 2
        vectors = [middle * rate / gradient_bytes - 1 for rate in rates]
        if sum(min(others, v) for v in vectors) >= others:
            most = middle
        else:
            least = middle
    return most


_DIVISIONS = {"what its line takes": "by link rate", "equally much": "equal shares"}
"""Names in the table for how members divide the reduction."""


def all_reduce_markdown(document: Mapping[str, Any]) -> str:
    """Seconds of an all-reduce over its bound, by links, members, codec and division of work."""
    megabytes = document["rows"][0]["gradient_bytes"] / 1e6
    head = (
        f"{document['measured_at'][:10]}, load {document['load_before']:.1f} before: "
        f"{megabytes:.1f} MB of gradients in float32, medians of {document['steps']} steps of one "
        "run each. Aim 0.70."
    )
    rows = [
        (
            row["link"],
            str(row["members"]),
            row["codec"],
            _DIVISIONS[row["sums"]],
            f"{row['seconds_median']:.2f}",
            f"{row['bound_seconds']:.2f}",
            f"{row['of_bound']:.2f}",
        )
        for row in document["rows"]
    ]
    columns = (
        "links", "members", "codec", "division", "seconds", "bound of float32",
        "bound over seconds",
    )  # fmt: skip
    return headed_table(head, columns, "lrllrrr", rows)
