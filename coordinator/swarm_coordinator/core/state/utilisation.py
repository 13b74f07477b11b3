"""Utilisation of the stages, service times of microbatches, and rejections by reason.

Part of the pure core. Each heartbeat reports the time that its peer has computed since the last
one, and the number of microbatches. Recording one costs the same however long the run and however
many peers it has: a few sums, and one bucket of a histogram with fixed bounds. Everything is kept
since the start, for Prometheus, and for the last one to two minutes, for people. The reports decide
nothing in this core, so they are bounded and not verified.
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
"""Seconds of a window. Rates cover the last one to two windows."""

_PER_OCTAVE = 2
BOUNDS: tuple[float, ...] = tuple(0.001 * 2 ** (n / _PER_OCTAVE) for n in range(41))
"""Upper ends of the histogram's buckets in seconds, from 1 ms to 17 minutes; one more bucket holds
longer times. Quantiles computed from it are accurate within a fifth."""

MAX_UNREPORTED_SECONDS = 3600.0
"""Longest computing time that one heartbeat may report, in seconds. A microbatch is reported when
it is done, so a heartbeat may cover several intervals."""


class Rejection(StrEnum):
    """Why a gradient, a state or a receipt did not count. The values are labels of a metric."""

    NOT_FINITE = "not finite"
    OTHER_AVERAGE = "other average"
    """The peer's averaged gradient differs from the rest of its stage."""
    OTHER_PARAMETERS = "other parameters"
    """The peer's fingerprint differs from the rest of its stage."""
    NOT_APPLIED = "not applied"
    """The peer could not apply the decided step."""
    OTHER_DATA = "receipt: other data"
    """The token ids or targets are not those that the sampler draws."""
    LOST_AUDIT = "lost audit"
    OTHER_STEP = "receipt: other step"
    NOT_THE_HOLDER = "receipt: not the holder"
    IMPOSSIBLE = "receipt: impossible"
    """The microbatch index, number of tokens or loss is out of range."""


@dataclass(slots=True)
class StageUtilisation:
    """Sums over the peers of one stage."""

    held_seconds: float = 0.0
    """Seconds that peers held the stage while steps were made."""
    busy_seconds: float = 0.0
    """Seconds of that time in which they computed."""
    buckets: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS) + 1))
    """Number of microbatches by service time."""

    def copy(self) -> StageUtilisation:
        return StageUtilisation(self.held_seconds, self.busy_seconds, list(self.buckets))

    def since(self, before: StageUtilisation) -> StageUtilisation:
        """The sums since `before`, an earlier copy."""
        return StageUtilisation(
            self.held_seconds - before.held_seconds,
            self.busy_seconds - before.busy_seconds,
            [now - then for now, then in zip(self.buckets, before.buckets, strict=True)],
        )

    @property
    def idle_share(self) -> float | None:
        """Idle fraction of the held time; None without data."""
        if self.held_seconds <= 0:
            return None
        return min(1.0, max(0.0, 1.0 - self.busy_seconds / self.held_seconds))


@dataclass(slots=True)
class LastHeartbeat:
    """One peer's last heartbeat, against which its next one is measured."""

    held: StageIndex | None = None
    """The stage held at the last heartbeat; None: the next one is not attributed to a stage."""
    at: float = 0.0
    unreported_seconds: float = 0.0
    """Seconds in which the peer may have computed work that it has not reported yet."""


class UtilisationStats:
    """Utilisation since one start of the coordinator."""

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
        """Record the computing time reported by a peer that holds `stage` while steps are made."""
        if last.held != stage:
            last.held, last.at, last.unreported_seconds = stage, now, 0.0
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
        """Sums by stage over the last one to two windows."""
        return [now.since(then) for now, then in zip(self.totals, self._older, strict=True)]

    def _start_window(self, now: float) -> None:
        if self._next_window_at > -math.inf:
            self._older = self._newer
        self._newer = [tally.copy() for tally in self.totals]
        self._next_window_at = now + RECENT_WINDOW_SECONDS


def quantile(buckets: Sequence[int], share: float) -> float | None:
    """The service time in seconds below which `share` of the microbatches are, interpolated within
    its bucket; None without data."""
    rank = share * sum(buckets)
    if rank <= 0:
        return None
    below = 0
    for index, count in enumerate(buckets):
        if count and below + count >= rank:
            if index == len(BOUNDS):
                return BOUNDS[-1]
            upper = BOUNDS[index]
            return upper * 2 ** (((rank - below) / count - 1) / _PER_OCTAVE)
        below += count
    raise AssertionError("a share of at most one lies in one of the buckets")
