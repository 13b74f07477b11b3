"""Synthetic arrivals and departures, for `--trace` without a recording.

    steady              every machine joins within the first minute and stays
    home                volunteers at home: sessions of hours, absences with a daily cycle; most
                        leave properly, some are switched off
    spot                rented machines that are reclaimed, several at once, and replaced after a
                        while

Parameters follow the name: `spot:losses_per_hour=0.6,bulk=3`. The defaults of `home` give the
availability of BOINC's hosts (81 % of the time running, 83 % of that connected, 84 % of that
allowed to compute: Anderson and Fedak, CCGrid 2006), with sessions of a few hours and a daily
cycle; those of `spot` give the losses of the preemptible machines in Bamboo (Thorpe et al., NSDI
2023), about 0.6 per machine and hour, in bulk. The shapes are assumptions.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_coordinator.simulator.trace import TraceEvent, TraceEventKind
from swarm_shared.base.errors import UsageError

HOUR = 3600.0
DAY_HOURS = 24.0
PEAK_HOUR = 20.0
"""Local time of day, in hours, at which most volunteers join."""
FIRST_MINUTE = 60.0
"""Seconds over which the initial joins are spread."""


class ChurnModel(Protocol):
    def changes(
        self, names: Sequence[str], hours: float, rng: random.Random
    ) -> list[TraceEvent]: ...


@dataclass(frozen=True, slots=True)
class SteadyChurn:
    def changes(self, names: Sequence[str], hours: float, rng: random.Random) -> list[TraceEvent]:
        found = [TraceEvent(rng.uniform(0, FIRST_MINUTE), "join", name) for name in names]
        return sorted(found, key=lambda change: change.seconds)


@dataclass(frozen=True, slots=True)
class HomeChurn:
    on_hours: float = 5.0
    """Mean length of a session; exponential, so that many are short."""
    availability: float = 0.56
    """Fraction of the time that a volunteer is present."""
    daily: float = 0.6
    """Relative increase of the joining rate in the evening over the average; 0: no cycle."""
    crash: float = 0.2
    """Fraction of the sessions that end without a Goodbye."""
    time_zones: float = 8.0
    """Hours over which the volunteers' time zones are spread."""

    def changes(self, names: Sequence[str], hours: float, rng: random.Random) -> list[TraceEvent]:
        found: list[TraceEvent] = []
        off_hours = self.on_hours * (1 - self.availability) / self.availability
        for name in names:
            zone = rng.uniform(0, self.time_zones)
            here = rng.random() < self.availability
            at = (
                rng.uniform(0, FIRST_MINUTE / HOUR)
                if here
                else self._return(0.0, off_hours, zone, rng)
            )
            while at < hours:
                found.append(TraceEvent(at * HOUR, "join", name))
                # The shortest sessions end while joining, as real ones do.
                at += rng.expovariate(1 / self.on_hours)
                if at >= hours:
                    break
                kind: TraceEventKind = "crash" if rng.random() < self.crash else "leave"
                found.append(TraceEvent(at * HOUR, kind, name))
                at = self._return(at, off_hours, zone, rng)
        return sorted(found, key=lambda change: (change.seconds, change.name))

    def _return(self, at: float, off_hours: float, zone: float, rng: random.Random) -> float:
        """Time of the next join after an absence: a Poisson process whose rate follows the day."""
        highest = (1 + self.daily) / off_hours
        while True:
            at += rng.expovariate(highest)
            local = (at + zone) % DAY_HOURS
            cycle = 1 + self.daily * math.cos(2 * math.pi * (local - PEAK_HOUR) / DAY_HOURS)
            if rng.random() * (1 + self.daily) <= cycle:
                return at


@dataclass(frozen=True, slots=True)
class SpotChurn:
    losses_per_hour: float = 0.6
    """Losses per machine and hour."""
    bulk: float = 2.5
    """Mean number of machines reclaimed at once; geometric."""
    replaced_minutes: float = 15.0
    """Mean minutes until a replacement machine joins; exponential."""

    def changes(self, names: Sequence[str], hours: float, rng: random.Random) -> list[TraceEvent]:
        found = [TraceEvent(rng.uniform(0, FIRST_MINUTE), "join", name) for name in names]
        joins = [(change.seconds, change.name) for change in found]
        heapq.heapify(joins)
        present: list[str] = []
        now, end = 0.0, hours * HOUR
        while True:
            rate = self.losses_per_hour * len(present) / self.bulk / HOUR
            loss_at = now + rng.expovariate(rate) if rate else math.inf
            if joins and joins[0][0] <= loss_at:
                now, name = heapq.heappop(joins)
                present.append(name)
                continue
            if loss_at >= end:
                break
            now = loss_at
            for _ in range(min(len(present), _geometric(self.bulk, rng))):
                name = present.pop(rng.randrange(len(present)))
                found.append(TraceEvent(now, "crash", name))
                back = now + rng.expovariate(1 / (60 * self.replaced_minutes))
                if back < end:
                    found.append(TraceEvent(back, "join", name))
                    heapq.heappush(joins, (back, name))
        return sorted(found, key=lambda change: change.seconds)


def _geometric(mean: float, rng: random.Random) -> int:
    """Draw from 1, 2, 3, … with the given mean."""
    count = 1
    while rng.random() >= 1 / mean:
        count += 1
    return count


MODELS: dict[str, type[SteadyChurn] | type[HomeChurn] | type[SpotChurn]] = {
    "steady": SteadyChurn,
    "home": HomeChurn,
    "spot": SpotChurn,
}


BOUNDS: dict[str, tuple[float, float]] = {
    "on_hours": (0.001, math.inf),
    "availability": (0.001, 0.999),
    "daily": (0.0, 1.0),
    "crash": (0.0, 1.0),
    "time_zones": (0.0, 24.0),
    "bulk": (1.0, math.inf),
    "replaced_minutes": (0.001, math.inf),
}
"""Allowed ranges of parameters; all other parameters are numbers from 0."""


def churn_model(text: str) -> ChurnModel:
    """Parse a model's name and parameters; UsageError lists the valid ones."""
    name, _, rest = text.partition(":")
    kind = MODELS.get(name)
    if kind is None:
        raise UsageError(
            f"there is no trace and no model {text!r}; models are {', '.join(MODELS)}, and a "
            "recording is a file"
        )
    known = {field.name for field in dataclasses.fields(kind)}
    values: dict[str, float] = {}
    for part in filter(None, rest.split(",")):
        key, _, spelt = part.partition("=")
        try:
            value = float(spelt)
        except ValueError:
            value = math.nan
        if key not in known or not (math.isfinite(value) and value >= 0):
            raise UsageError(
                f"{part!r} is no parameter of {name}; it has {', '.join(sorted(known)) or 'none'}, "
                "each a number from 0"
            )
        lowest, highest = BOUNDS.get(key, (0.0, math.inf))
        if not lowest <= value <= highest:
            raise UsageError(f"{key} must be {_between(lowest, highest)}, not {value:g}")
        values[key] = value
    return kind(**values)


def _between(lowest: float, highest: float) -> str:
    return f"at least {lowest:g}" if math.isinf(highest) else f"from {lowest:g} to {highest:g}"
