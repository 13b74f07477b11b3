"""What a line takes, learnt while it holds its writers up.

How many bytes leave says nothing about a line that could carry more. While sockets are full it
does: between two moments at which a socket had room again it took exactly what the line carried
away meanwhile. Such spans count, unless nobody wanted to write for a good part of them. A line
that never holds anybody up stays unknown, which is as well: it is not what limits this peer.
"""

from __future__ import annotations

from collections.abc import Callable

BLOCKED_WRITE_SECONDS = 0.01
"""A write that takes longer waited for room in its socket, or for the volunteer's own limit."""
MAX_IDLE_SHARE = 0.2
"""Share of a span in which nobody wrote; beyond it the socket may have run empty."""
WINDOW_SECONDS = 2.0
"""Spans are put together until they are so long: one alone can be of a few pieces."""
RISE_WEIGHT, FALL_WEIGHT = 0.5, 0.1
"""Weights of a window that is above what was known, and of one below it: whoever reads slowly
at the other end holds us up as well, so that the higher rates are the line's."""


class UplinkEstimate:
    """One direction of a node, over all of its connections."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._writing = 0
        self.forget()

    def forget(self) -> None:
        """The line is another one from now on."""
        self._known = 0.0
        self._room_at: float | None = None
        self._idle_since = self._clock()
        self._idle_seconds = 0.0
        self._bytes = 0
        self._window_bytes = 0
        self._window_seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """0 while it is unknown."""
        return self._known

    def begin(self) -> float:
        """A writer has something to send. What this gives is to be given to `end`."""
        now = self._clock()
        if not self._writing:
            self._idle_seconds += now - self._idle_since
        self._writing += 1
        return now

    def end(self, begun: float, size: int) -> None:
        """It could hand over this many bytes; 0 when it failed."""
        now = self._clock()
        self._writing -= 1
        if not self._writing:
            self._idle_since = now
        self._bytes += size
        if size and now - begun >= BLOCKED_WRITE_SECONDS:
            self._has_room(now)

    def _has_room(self, now: float) -> None:
        if self._room_at is not None:
            elapsed = now - self._room_at
            if self._idle_seconds <= MAX_IDLE_SHARE * elapsed:
                self._window_bytes += self._bytes
                self._window_seconds += elapsed
        self._room_at, self._bytes, self._idle_seconds = now, 0, 0.0
        if self._window_seconds >= WINDOW_SECONDS:
            self._learn(self._window_bytes / self._window_seconds)
            self._window_bytes, self._window_seconds = 0, 0.0

    def _learn(self, rate: float) -> None:
        if not self._known:
            self._known = rate
        else:
            weight = RISE_WEIGHT if rate > self._known else FALL_WEIGHT
            self._known += weight * (rate - self._known)
