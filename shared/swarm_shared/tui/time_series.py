"""A bounded series of (time, value), for sparklines and curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

DEFAULT_POINTS = 600
"""Points kept: ten minutes at one a second."""


class TimeSeries:
    """The newest points. A point that is not later than the last one replaces it."""

    def __init__(self, most: int = DEFAULT_POINTS) -> None:
        self._points: deque[tuple[float, float | None]] = deque(maxlen=most)

    def add(self, at: float, value: float | None) -> None:
        if self._points and at <= self._points[-1][0]:
            self._points.pop()
        self._points.append((at, value))

    def values(self) -> list[float | None]:
        return [value for _, value in self._points]

    def points(self) -> list[tuple[float, float]]:
        return [(at, value) for at, value in self._points if value is not None]

    def clear(self) -> None:
        self._points.clear()

    def __len__(self) -> int:
        return len(self._points)

    def __iter__(self) -> Iterator[tuple[float, float | None]]:
        return iter(self._points)
