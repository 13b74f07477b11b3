"""When a microbatch is overdue, and the race between the peers it was sent to.

A peer may answer late because it is slow, because its worker hangs, or because a peer behind it
does. The sender cannot distinguish these cases and need not: when an answer takes much longer than
usual and other peers are idle, the same tensor goes to one of them as well (the backup tasks of
MapReduce, Dean & Ghemawat 2004). The first answer is taken and the others are cancelled. Two peers
may then have counted the microbatch: the coordinator's table has one of them, and the other one
removes it at the step close (design: the life of a step, Close).

The usual latency is estimated as TCP does for its retransmissions (Jacobson 1988): a mean and a
mean deviation of the latest answers.
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
"""Weight of the newest answer in the mean."""
DEVIATION_WEIGHT = 1 / 4
"""Weight of the newest answer in the mean deviation."""
DEVIATIONS = 4.0
"""Mean deviations above the mean after which an answer is overdue."""

MIN_OVERDUE_SECONDS = 2.0
"""Seconds before which no answer is overdue; a mask request alone takes a reporting interval."""

OVERDUE_SECONDS_PER_STAGE = 1.0
"""Additional seconds for each stage below, so that the sender next to the peer that hangs acts
first."""

UNKNOWN_LATENCY_SECONDS = 30.0
"""Limit before the first answer: the first microbatch of a large model takes long."""

MAX_HEDGES = 2
"""Maximum number of hedges of one microbatch at one sender; beyond that the step itself is slow."""


class LatencyEstimate:
    """Latency of answers from one stage to one sender."""

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
        """Whether an answer through `depth` stages may take that long."""
        least = self._min_seconds + OVERDUE_SECONDS_PER_STAGE * (depth - 1)
        if self._mean is None:
            return seconds < max(least, self._unknown_seconds)
        return seconds < max(least, self._mean + DEVIATIONS * self._deviation)


class Race:
    """One microbatch in flight to one or more peers of a stage."""

    def __init__(self) -> None:
        self.sent_at: dict[PeerId, float] = {}
        """When it was sent to each peer that has it now."""
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
            # If all attempts fail, raise the first failure: it has retried most often.
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
        raise self._error or MicrobatchAbandoned("no peer answered")
