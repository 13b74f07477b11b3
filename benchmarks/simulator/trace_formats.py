"""Converts recordings of machine churn to traces of this project's format.

    python -m benchmarks.simulator.trace_formats FORMAT FILE OUT

Formats: `events` (milliseconds,add|remove,name), `counts` (number of machines as time,count rows,
with times in seconds, in ISO 8601, or as date,time,count), `hours` (the same with times in hours),
`gaps` (JSON with a list of counts and the seconds between them) and `sessions` (one line per user
and week: states and their lengths). Counts have no identities: the machines that leave are drawn
with `--seed`. The recordings are not part of the project.
"""

from __future__ import annotations

import csv
import datetime
import json
import math
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from swarm_coordinator.simulator.trace import TraceEvent, write_trace
from swarm_shared.base.errors import DataError

FORMATS = ("events", "counts", "hours", "gaps", "sessions")
HOUR_SECONDS = 3600.0
WEEK_SECONDS = 7 * 24 * HOUR_SECONDS


def convert(
    form: str, path: Path, seed: int, hours: float = math.inf, users: int | None = None
) -> list[TraceEvent]:
    """Return a recording's changes from second 0 for `hours`, optionally of `users` users only."""
    text = path.read_text(encoding="utf-8")
    rng = random.Random(seed)
    try:
        if form == "events":
            found = list(_events(text))
        elif form == "counts":
            found = list(_from_counts(_count_rows(text), rng))
        elif form == "hours":
            rows = ((HOUR_SECONDS * told, count) for told, count in _count_rows(text))
            found = list(_from_counts(rows, rng))
        elif form == "gaps":
            found = list(_from_counts(_gap_rows(text), rng))
        else:
            found = list(_sessions(text, rng, users))
    except (ValueError, KeyError, IndexError) as error:
        raise DataError(f"{path} is not in the format {form!r}: {error}") from error
    if not found:
        raise DataError(f"{path} holds no change")
    found.sort(key=lambda change: change.seconds)
    began = found[0].seconds
    return [
        TraceEvent(change.seconds - began, change.kind, change.name)
        for change in found
        if change.seconds - began <= hours * HOUR_SECONDS
    ]


def _events(text: str) -> Iterator[TraceEvent]:
    present: set[str] = set()
    for milliseconds, kind, name in csv.reader(text.splitlines()):
        seconds = float(milliseconds) / 1000
        if kind == "add" and name not in present:
            present.add(name)
            yield TraceEvent(seconds, "join", name)
        elif kind == "remove" and name in present:
            present.remove(name)
            yield TraceEvent(seconds, "crash", name)


def _count_rows(text: str) -> Iterator[tuple[float, int]]:
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if not row or not row[-1].isdigit():
            continue  # a header
        if len(row) == 3:
            yield datetime.datetime.fromisoformat(f"{row[0]} {row[1]}").timestamp(), int(row[2])
        elif "T" in row[0]:
            moment = datetime.datetime.fromisoformat(row[0].replace("Z", "+00:00"))
            yield moment.timestamp(), int(row[1])
        else:
            yield float(row[0]), int(row[1])


def _gap_rows(text: str) -> Iterator[tuple[float, int]]:
    document = json.loads(text)
    gap_seconds = float(document["metadata"]["gap_seconds"])
    for index, count in enumerate(document["data"]):
        yield index * gap_seconds, int(count)


def _from_counts(rows: Iterable[tuple[float, int]], rng: random.Random) -> Iterator[TraceEvent]:
    """Yield joins and leaves that reproduce the counts; the machines that leave are drawn."""
    present: list[str] = []
    made, seconds = 0, -math.inf
    for told_seconds, count in rows:
        # A poller whose clock was set back still wrote its rows in order.
        seconds = max(seconds, told_seconds)
        while len(present) < count:
            made += 1
            present.append(f"machine-{made}")
            yield TraceEvent(seconds, "join", present[-1])
        while len(present) > count:
            yield TraceEvent(seconds, "crash", present.pop(rng.randrange(len(present))))


def _sessions(text: str, rng: random.Random, users: int | None) -> Iterator[TraceEvent]:
    """Yield the changes of one drawn week per user, all aligned to their start."""
    weeks: dict[str, list[tuple[int, list[float]]]] = {}
    for line in text.splitlines():
        user, told_state, _epoch, _zone, *words = line.split()
        weeks.setdefault(user, []).append((int(told_state), [float(word) for word in words]))
    chosen = sorted(weeks)
    if users is not None:
        chosen = sorted(rng.sample(chosen, min(users, len(chosen))))
    for user in chosen:
        recorded = weeks[user]
        state, lengths = rng.choice(recorded)
        online, seconds = state == 1, 0.0
        for length in lengths:
            if online:
                yield TraceEvent(seconds, "join", user)
                if seconds + length < WEEK_SECONDS:
                    yield TraceEvent(seconds + length, "crash", user)
                else:
                    break
            seconds += length
            online = not online


@click.command()
@click.argument("form", type=click.Choice(FORMATS), metavar="FORMAT")
@click.argument("source", type=click.Path(path_type=Path, exists=True), metavar="FILE")
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--seed", default=1, show_default=True)
@click.option("--hours", default=math.inf, help="Hours of the trace; the rest is cut.")
@click.option("--users", type=int, help="Number of users to draw from recorded sessions.")
def main(form: str, source: Path, out: Path, seed: int, hours: float, users: int | None) -> None:
    """Convert a recording FILE into a trace OUT."""
    changes = convert(form, source, seed, hours, users)
    write_trace(out, changes, f"converted from {source.name} ({form}, seed {seed})")
    hours = changes[-1].seconds / 3600
    click.echo(f"{out}: {len(changes)} changes over {hours:.1f} hours")


if __name__ == "__main__":
    main()
