"""When an answer is overdue.

The usual latency is estimated as TCP does for its retransmissions (Jacobson 1988): a mean and a
mean deviation of the latest answers.
"""

from __future__ import annotations

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
        """Record the latency of an answer."""
        if self._mean is None:
            self._mean, self._deviation = seconds, seconds / 2
            return
        self._deviation += DEVIATION_WEIGHT * (abs(seconds - self._mean) - self._deviation)
        self._mean += MEAN_WEIGHT * (seconds - self._mean)

    def limit_seconds(self, depth: int) -> float:
        """Return the seconds after which an answer through `depth` stages is overdue."""
        minimum = self._min_seconds + OVERDUE_SECONDS_PER_STAGE * (depth - 1)
        if self._mean is None:
            return max(minimum, self._unknown_seconds)
        return max(minimum, self._mean + DEVIATIONS * self._deviation)
