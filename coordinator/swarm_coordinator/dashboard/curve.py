"""Loss and throughput of any number of steps in a bounded number of points.

When there are too many points, every two neighbours are merged. Each new step therefore costs the
same however long the run is, and the curve is exact at its resolution.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from swarm_coordinator.dashboard.api_models import Curve, CurvePoint

MAX_POINTS = 400
"""Points of a curve: about one per two pixels of the plot."""


@dataclass(frozen=True, slots=True)
class _Bucket:
    first: int
    last: int
    loss_sum: float
    losses: int
    lowest: float
    highest: float
    tokens: int
    seconds: float

    def merged(self, other: _Bucket) -> _Bucket:
        return replace(
            self,
            last=other.last,
            loss_sum=self.loss_sum + other.loss_sum,
            losses=self.losses + other.losses,
            lowest=min(self.lowest, other.lowest),
            highest=max(self.highest, other.highest),
            tokens=self.tokens + other.tokens,
            seconds=self.seconds + other.seconds,
        )

    def point(self) -> CurvePoint:
        known = self.losses > 0
        return CurvePoint(
            first_step=self.first,
            last_step=self.last,
            loss=self.loss_sum / self.losses if known else None,
            lowest_loss=self.lowest if known else None,
            highest_loss=self.highest if known else None,
            tokens_per_second=self.tokens / self.seconds if self.seconds > 0 else None,
        )


@dataclass(slots=True, eq=False)
class CurveBuilder:
    """Takes steps in order; makes a curve of at most `max_points` points."""

    max_points: int = MAX_POINTS
    _width: int = 1
    _in_last: int = 0
    _buckets: list[_Bucket] = field(default_factory=list)

    def add(self, step: int, loss: float | None, tokens: int, seconds: float) -> None:
        one = _Bucket(
            step, step, loss or 0.0, int(loss is not None), math.inf if loss is None else loss,
            -math.inf if loss is None else loss, tokens, seconds,
        )  # fmt: skip
        if len(self._buckets) == self.max_points and self._in_last == self._width:
            self._halve()
        if self._buckets and self._in_last < self._width:
            self._buckets[-1] = self._buckets[-1].merged(one)
            self._in_last += 1
        else:
            self._buckets.append(one)
            self._in_last = 1

    def _halve(self) -> None:
        pairs = [self._buckets[i : i + 2] for i in range(0, len(self._buckets), 2)]
        alone = len(pairs[-1]) == 1
        self._in_last = self._width if alone else 2 * self._width
        self._buckets = [p[0].merged(p[1]) if len(p) == 2 else p[0] for p in pairs]
        self._width *= 2

    def curve(self) -> Curve:
        return Curve(
            steps_per_point=self._width, points=tuple(bucket.point() for bucket in self._buckets)
        )
