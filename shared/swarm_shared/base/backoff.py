"""Exponential back-off: pauses that double with every failure in a row, up to a maximum."""

from __future__ import annotations

import random

MAX_DOUBLINGS = 30
"""Bound of the exponent; failures are counted for days and would overflow a float."""


def backoff_seconds(earlier_failures: int, first_seconds: float, max_seconds: float) -> float:
    """Return the pause after a failure that `earlier_failures` preceded in a row."""
    doublings = max(0, min(earlier_failures, MAX_DOUBLINGS))
    return min(max_seconds, first_seconds * 2.0**doublings)


def with_jitter(seconds: float, share: float) -> float:
    """Change a pause at random by at most `share` of it, so that peers do not retry in step."""
    return seconds * random.uniform(1 - share, 1 + share)


class Backoff:
    """The pauses of one retry loop."""

    def __init__(self, first_seconds: float, max_seconds: float) -> None:
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self.seconds = first_seconds
        """The next pause."""

    def reset(self) -> None:
        """Start again at the first pause; the last attempt succeeded."""
        self.seconds = self._first_seconds

    def next(self) -> float:
        """Return the pause to make now, and double the one after it."""
        seconds = self.seconds
        self.seconds = min(self._max_seconds, 2 * seconds)
        return seconds
