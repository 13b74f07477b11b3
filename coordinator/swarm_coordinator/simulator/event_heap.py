"""The virtual clock: scheduled actions in the order of their time."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

Action = Callable[[], object]


class EventHeap:
    """Actions in the order of their time; at equal times, in the order of their scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action]] = []
        self._order = itertools.count()

    def at(self, seconds: float, action: Action) -> None:
        heapq.heappush(self._heap, (max(self.now, seconds), next(self._order), action))

    def later(self, delay_seconds: float, action: Action) -> None:
        self.at(self.now + delay_seconds, action)

    def run_until(self, end_seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Run the actions up to and including `end_seconds`, or until `stopped`."""
        while self._heap and self._heap[0][0] <= end_seconds and not stopped():
            self.now, _, action = heapq.heappop(self._heap)
            action()
        if not stopped():
            self.now = max(self.now, end_seconds)
