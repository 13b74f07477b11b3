"""How busy the stages are, how long a microbatch takes in each, and what was rejected and why.

Part of the pure core. With each heartbeat peers say how long they have computed since the one
before, and for how many microbatches. A word costs the same however long the run is and however
many peers it has: some sums, and one bucket of a histogram whose bounds are fixed. Everything is
kept twice over: since the start, for Prometheus, and for the last minute or two, for people.
What peers say of themselves decides nothing here, so that it is bounded and not proved.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swarm_shared.base.types import StageIndex

RECENT_WINDOW_SECONDS = 60.0
"""What is shown as recent is of the last one to two of these."""

_PER_OCTAVE = 2
BOUNDS: tuple[float, ...] = tuple(0.001 * 2 ** (n / _PER_OCTAVE) for n in range(41))
"""Upper ends of the buckets in seconds, from 1 ms to 17 minutes; longer ones go into one more.
A quantile out of these is right within a fifth."""

MAX_UNREPORTED_SECONDS = 3600.0
"""A microbatch is told when it is done, so that one heartbeat may tell the computing of several
intervals: of an hour at most."""


class Rejection(StrEnum):
    """Why a gradient, a state or a receipt did not count. Fixed words: labels of a metric."""

    NOT_FINITE = "not finite"
    OTHER_AVERAGE = "other average"
    """Averaging gave it another gradient than the rest of its stage."""
    OTHER_PARAMETERS = "other parameters"
    """Its fingerprint is not the others'."""
    NOT_APPLIED = "not applied"
    """It could not take the step that was decided."""
    OTHER_STEP = "receipt: other step"
    NOT_THE_HOLDER = "receipt: not the holder"
    IMPOSSIBLE = "receipt: impossible"
    """A microbatch, a number of tokens or a loss that cannot be."""


@dataclass(slots=True)
class StageUtilisation:
    """Of one stage: sums over its peers."""

    held_seconds: float = 0.0
    """For how long peers held the stage while steps were made."""
    busy_seconds: float = 0.0
    """For how long of that they computed."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """Microbatches, by how long each took."""

    def copy(self) -> StageUtilisation:
        return StageUtilisation(self.held_seconds, self.busy_seconds, list(self.buckets))

    def since(self, before: StageUtilisation) -> StageUtilisation:
        return StageUtilisation(
            self.held_seconds - before.held_seconds,
            self.busy_seconds - before.busy_seconds,
            [now - then for now, then in zip(self.buckets, before.buckets, strict=True)],
        )

    @property
    def idle_share(self) -> float | None:
        """None while nothing is known."""
        if self.held_seconds <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - self.busy_seconds / self.held_seconds))


@dataclass(slots=True)
class LastHeartbeat:
    """Of one peer: what its next heartbeat is measured against."""

    stage: StageIndex | None = None
    """None: the next one says nothing about a stage."""
    at: float = 0.0
    unreported_seconds: float = 0.0
    """Time in which it may have computed what it has not told yet."""


class UtilisationStats:
    """Of one start of the coordinator."""

    def __init__(self, stages: int) -> None:
        self.totals = [StageUtilisation() for _ in range(stages)]
        self.rejected: Counter[Rejection] = Counter()
        self._older = [StageUtilisation() for _ in range(stages)]
        self._newer = [StageUtilisation() for _ in range(stages)]
        self._next_window_at = -math.inf

    def record(
        self,
        last: LastHeartbeat,
        stage: StageIndex,
        busy_seconds: float,
        microbatches: int,
        now: float,
    ) -> None:
        """A peer that holds `stage` while steps are made has computed since its last heartbeat."""
        if last.stage != stage:
            last.stage, last.at, last.unreported_seconds = stage, now, 0.0
            return
        if now >= self._next_window_at:
            self._start_window(now)
        interval = max(0.0, now - last.at)
        last.at = now
        room = min(last.unreported_seconds + interval, MAX_UNREPORTED_SECONDS)
        busy = min(busy_seconds, room)
        last.unreported_seconds = room - busy
        tally = self.totals[stage]
        tally.held_seconds += interval
        tally.busy_seconds += busy
        if microbatches > 0 and busy > 0:
            tally.buckets[bisect_left(BOUNDS, busy / microbatches)] += microbatches

    def recent(self) -> list[StageUtilisation]:
        """By stage, of the last one to two windows."""
        return [now.since(then) for now, then in zip(self.totals, self._older, strict=True)]

    def _start_window(self, now: float) -> None:
        if self._next_window_at > -math.inf:
            self._older = self._newer
        self._newer = [tally.copy() for tally in self.totals]
        self._next_window_at = now + RECENT_WINDOW_SECONDS


def quantile(buckets: Sequence[int], share: float) -> float | None:
    """In seconds, between the bounds of its bucket in proportion; None of nothing."""
    wanted = share * sum(buckets)
    if wanted <= 0:
        return None
    below = 0
    for index, count in enumerate(buckets):
        if count and below + count >= wanted:
            if index == len(BOUNDS):
                return BOUNDS[-1]
            upper = BOUNDS[index]
            return upper * 2 ** (((wanted - below) / count - 1) / _PER_OCTAVE)
        below += count
    raise AssertionError("a share of at most one lies in one of the buckets")
