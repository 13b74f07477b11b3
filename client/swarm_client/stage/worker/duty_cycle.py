"""A worker that computes a share of the time: it rests after each computation.

What is computed is the same, and messages are answered while it rests. The time of other work (an
optimizer step) is made up for after the computations that follow, so that no rest is much longer
than what the daemon is used to: a worker that is silent for very long counts as hung.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_REST_FACTOR = 2.0
"""Times the rest that a computation calls for by itself."""


class DutyCycle:
    def __init__(self, clock: Callable[[], float]) -> None:
        self.share = 1.0
        self._clock = clock
        self._owed_seconds = 0.0
        self._rest_ends_at = 0.0

    def change(self, share: float) -> None:
        """From now on; what is owed by the old share is forgiven."""
        if share != self.share:
            self.share = share
            self._owed_seconds = 0.0
            self._rest_ends_at = self._clock()

    def add_work(self, seconds: float) -> None:
        """Something that no rest follows at once."""
        self._owed_seconds += seconds * self._rest_per_second

    def computed(self, seconds: float) -> None:
        own = seconds * self._rest_per_second
        self._owed_seconds += own
        rest = min(self._owed_seconds, MAX_REST_FACTOR * own)
        self._owed_seconds -= rest
        self._rest_ends_at = self._clock() + rest

    def rest_seconds(self) -> float:
        """Until the next computation may begin."""
        return max(0.0, self._rest_ends_at - self._clock())

    def effective_seconds(self, seconds: float) -> float:
        """What a computation takes with the rest that it calls for: the rate that others count
        on."""
        return seconds / self.share

    @property
    def _rest_per_second(self) -> float:
        return 1.0 / self.share - 1.0
