"""The duty cycle of a worker: a rest after each computation.

Results are the same, and messages are answered during a rest. The rest owed for other work (an
optimizer step) is distributed over the following computations, so that no rest is much longer than
usual: a worker that is silent for very long counts as hung.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_REST_FACTOR = 2.0
"""Longest rest after a computation, in multiples of the rest that this computation requires."""


class DutyCycle:
    """The rest that a worker owes, and the end of its current rest."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.share = 1.0
        self._clock = clock
        self._owed_seconds = 0.0
        self._rest_ends_at = 0.0

    def change(self, share: float) -> None:
        """Set the share of time spent computing; rest owed under the old share is dropped."""
        if share != self.share:
            self.share = share
            self._owed_seconds = 0.0
            self._rest_ends_at = self._clock()

    def add_work(self, seconds: float) -> None:
        """Add work after which no rest follows at once."""
        self._owed_seconds += seconds * self._rest_per_second

    def computed(self, seconds: float) -> None:
        """Begin the rest after a computation that took so many seconds, with rest still owed."""
        required_rest = seconds * self._rest_per_second
        self._owed_seconds += required_rest
        rest_seconds = min(self._owed_seconds, MAX_REST_FACTOR * required_rest)
        self._owed_seconds -= rest_seconds
        self._rest_ends_at = self._clock() + rest_seconds

    def rest_seconds(self) -> float:
        """Seconds until the next computation may begin."""
        return max(0.0, self._rest_ends_at - self._clock())

    def effective_seconds(self, seconds: float) -> float:
        """The duration of a computation including its rest: the rate that other peers can count
        on."""
        return seconds / self.share

    @property
    def _rest_per_second(self) -> float:
        return 1.0 / self.share - 1.0
