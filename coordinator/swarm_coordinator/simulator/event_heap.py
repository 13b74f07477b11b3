"""The virtual clock: scheduled actions in the order of their time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[], object]


class EventHeap:
    """Actions in the order of their time; at equal times, in the order of their scheduling.

    The heap has each time once: what thousands of members do at the same time costs one entry.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.done = 0
        self._times: list[float] = []
        self._due: dict[float, list[Action]] = {}

    def at(self, seconds: float, action: Action) -> None:
        seconds = max(self.now, seconds)
        actions = self._due.get(seconds)
        if actions is None:
            self._due[seconds] = [action]
            heapq.heappush(self._times, seconds)
        else:
            actions.append(action)

    def later(self, delay_seconds: float, action: Action) -> None:
        self.at(self.now + delay_seconds, action)

    def run_until(self, end_seconds: float, stopped: Callable[[], bool] = lambda: False) -> None:
        """Run the actions up to and including `end_seconds`, or until `stopped`."""
        while self._times and self._times[0] <= end_seconds:
            self.now = self._times[0]
            for action in self._due[self.now]:  # which may append to the same list
                if stopped():
                    return
                self.done += 1
                action()
            del self._due[heapq.heappop(self._times)]
        self.now = max(self.now, end_seconds)
