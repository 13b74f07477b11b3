"""When a microbatch is late, and the race between those it was sent to.

A peer may answer late because it is slow, because its worker is stuck, or because somebody behind
it is. Whoever sent to it cannot tell, and need not: when the answer takes much longer than answers
usually do, and others have nothing to do, the same tensor goes to one of them as well (the backup
tasks of MapReduce, Dean & Ghemawat 2004). The first answer is taken and the others called off. Two
peers may then have counted the microbatch: the coordinator's table has one of them, and the other
takes it out again at the close of the step (design: the life of a step, Close).

What is usual is estimated as TCP does for its retransmissions (Jacobson 1988): a mean and a mean
deviation of the latest answers.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import trio

from swarm_client.pipeline.edge import EdgeAnswer
from swarm_client.pipeline.errors import MicrobatchAbandoned
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import PeerId

MEAN_WEIGHT = 1 / 8
DEVIATION_WEIGHT = 1 / 4
DEVIATIONS = 4.0

MIN_OVERDUE_SECONDS = 2.0
"""Nothing is late before that; a mask alone takes a reporting interval."""

OVERDUE_SECONDS_PER_STAGE = 1.0
"""More for each stage below: whoever is next to the one that is stuck acts first."""

UNKNOWN_LATENCY_SECONDS = 30.0
"""Before there was any answer: the first microbatch of a large model takes what it takes."""

MAX_HEDGES = 2
"""Of one microbatch at one sender; beyond that it is the step that is slow."""


class LatencyEstimate:
    """How long answers take from one sender to one stage."""

    def __init__(
        self,
        min_seconds: float = MIN_OVERDUE_SECONDS,
        unknown_seconds: float = UNKNOWN_LATENCY_SECONDS,
    ) -> None:
        self._min_seconds = min_seconds
        self._unknown_seconds = unknown_seconds
        self._mean: float | None = None
        self._deviation = 0.0

    def observe(self, seconds: float) -> None:
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += DEVIATION_WEIGHT * (abs(seconds - self._mean) - self._deviation)
        self._mean += MEAN_WEIGHT * (seconds - self._mean)

    def is_expected(self, seconds: float, depth: int) -> bool:
        """Whether an answer through `depth` stages may well take that long."""
        least = self._min_seconds + OVERDUE_SECONDS_PER_STAGE * (depth - 1)
        if self._mean is None:
            return seconds < max(least, self._unknown_seconds)
        return seconds < max(least, self._mean + DEVIATIONS * self._deviation)


class Race:
    """One microbatch on its way to one or more peers of a stage."""

    def __init__(self, started_at: float) -> None:
        self.started_at = started_at
        self.sent_at: dict[PeerId, float] = {}
        """Who has it, and since when."""
        self.hedges = 0
        self.decided = trio.Event()
        self._running = 0
        self._answer: EdgeAnswer | None = None
        self._error: SwarmError | None = None

    def begin(self, nursery: trio.Nursery, runner: Coroutine[Any, Any, None]) -> None:
        self._running += 1
        nursery.start_soon(self._run, runner)

    async def _run(self, runner: Coroutine[Any, Any, None]) -> None:
        try:
            await runner
        except SwarmError as error:
            # The first to fail has tried hardest; it is told if the others fail, too.
            self._error = self._error or error
        finally:
            self._running -= 1
        if self._running == 0:
            self.decided.set()

    def won(self, answer: EdgeAnswer) -> None:
        if self._answer is None:
            self._answer = answer
            self.decided.set()

    def failed(self, error: SwarmError) -> None:
        self._error = error
        self.decided.set()

    def result(self) -> EdgeAnswer:
        if self._answer is not None:
            return self._answer
        raise self._error or MicrobatchAbandoned("nobody answered")
