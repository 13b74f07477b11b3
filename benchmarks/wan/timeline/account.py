"""Breakdown of a step into computing and causes of waiting, from volunteers' records. Pure.

A machine's step runs from the end of one apply to the end of the next, and is divided completely:

    computing    the device works (with staleness also during a step close)
    filling      no tensor of the step has arrived yet: earlier stages have it
    between      idle between computations: all tensors are in transfer or at other stages
    draining     its last gradient is done: other stages compute, or the close has not arrived
    averaging    from the close to the norm of the averaged gradient
    deciding     from there to the order to apply: slowest other stage, coordinator, links
    applying     the optimizer's step
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

KINDS = ("computing", "filling", "between", "draining", "averaging", "deciding", "applying")


@dataclass(frozen=True, slots=True)
class Event:
    what: str
    """One of forward, backward, prepare, norm, apply, or send with the destination stage."""
    stage: int
    step: int
    microbatch: int
    begin: float
    end: float
    seconds: float
    """Seconds of computing, which ended with the event."""


@dataclass(frozen=True, slots=True)
class Travel:
    """Transfer seconds of each microbatch over one boundary, from sending to arrival."""

    activation: tuple[float, ...]
    gradient: tuple[float, ...]


def machine_account(events: Sequence[Event], steps: Iterable[int]) -> dict[str, float]:
    """Return the median seconds of each kind over `steps` at one machine."""
    found = [account(events, step) for step in steps]
    return {kind: median(one[kind] for one in found) for kind in KINDS}


def account(events: Sequence[Event], step: int) -> dict[str, float]:
    """Return the seconds of each kind in one step; they sum to the step."""
    begin = max(e.end for e in events if e.what == "apply" and e.step == step - 1)
    applied = [e for e in events if e.what == "apply" and e.step == step]
    end = max(e.end for e in applied)
    told = min(e.begin for e in events if e.what == "prepare" and e.step == step)
    averaged = max(e.end for e in events if e.what == "norm" and e.step == step)
    busy = computing_spans(events, begin, end)
    idle = gaps(busy, begin, end)
    closing = {
        "averaging": (told, averaged),
        "deciding": (averaged, max(e.begin for e in applied)),
        "applying": (max(e.begin for e in applied), end),
    }
    seconds = dict.fromkeys(KINDS, 0.0)
    seconds["computing"] = sum(to - start for start, to in busy)
    for kind, span in closing.items():
        seconds[kind] = sum(overlap(one, span) for one in idle)
    # Work on the next step is not part of this one: with staleness it overlaps the close.
    own = [e for e in events if e.what in ("forward", "backward") and e.step == step]
    first = min((e.end - e.seconds for e in own), default=told)
    last = max((e.end for e in own), default=told)
    open_idle = [(start, min(to, told)) for start, to in idle if start < told]
    seconds["filling"] = sum(overlap(one, (begin, first)) for one in open_idle)
    seconds["between"] = sum(overlap(one, (max(begin, first), last)) for one in open_idle)
    seconds["draining"] = sum(overlap(one, (max(begin, last), told)) for one in open_idle)
    return seconds


def travels(machines: Sequence[Sequence[Event]], stage: int, steps: Iterable[int]) -> Travel:
    """Return the transfers between `stage` and the next one, over all their machines.

    A microbatch with a hedged request is sent twice; the first arrival counts.
    """
    wanted = set(steps)
    sent: dict[tuple[int, int], Event] = {}
    came: dict[tuple[int, int], Event] = {}
    returned: dict[tuple[int, int], Event] = {}
    last = stage + 1 == max(e.stage for events in machines for e in events if e.what == "apply")
    for event in (e for events in machines for e in events if e.step in wanted):
        key = (event.step, event.microbatch)
        if event.what == "send" and event.stage == stage + 1:
            sent[key] = event
        elif event.stage == stage + 1 and event.what == "forward":
            came[key] = min(came.get(key, event), event, key=lambda e: e.begin)
        if event.stage == stage + 1 and event.what == ("forward" if last else "backward"):
            returned[key] = min(returned.get(key, event), event, key=lambda e: e.end)
    return Travel(
        activation=tuple(came[key].begin - one.begin for key, one in sent.items() if key in came),
        gradient=tuple(one.end - returned[key].end for key, one in sent.items() if key in returned),
    )


def computing_spans(events: Sequence[Event], begin: float, end: float) -> list[tuple[float, float]]:
    """Return the spans in which the device worked, sorted and disjoint, clipped to the window."""
    spans = sorted(
        (max(begin, e.end - e.seconds), min(end, e.end))
        for e in events
        if e.what in ("forward", "backward") and e.end > begin and e.end - e.seconds < end
    )
    merged: list[tuple[float, float]] = []
    for start, to in spans:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], to))
        else:
            merged.append((start, to))
    return merged


def gaps(
    spans: Sequence[tuple[float, float]], begin: float, end: float
) -> list[tuple[float, float]]:
    """Return the gaps between the spans, from begin to end."""
    edges = [begin, *(edge for span in spans for edge in span), end]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b > a]


def overlap(one: tuple[float, float], other: tuple[float, float]) -> float:
    return max(0.0, min(one[1], other[1]) - max(one[0], other[0]))


def by_stage(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over the machines of a stage."""
    return {kind: sum(row[kind] for row in rows) / len(rows) for kind in KINDS}
