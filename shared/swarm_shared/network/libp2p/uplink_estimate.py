"""An estimate of the uplink's rate, measured while it blocks writers.

The number of bytes sent is no measure of an uplink that could carry more. While sockets are full it
is: between two moments at which a socket had room again it took exactly what the uplink carried in
between. Such spans count, unless no writer wanted to send for a good part of them. An uplink that
never blocks a writer stays unknown, which is harmless: it does not limit this peer.

Writes count whole when they end, whatever part of them was sent before the span or waits in the
socket after it, so that spans are joined to windows that are long against a write.
"""

from __future__ import annotations

from collections.abc import Callable

BLOCKED_WRITE_SECONDS = 0.01
"""Duration from which a write counts as blocked: it waited for room in its socket, or for the
volunteer's own limit."""
MAX_IDLE_SHARE = 0.2
"""Share of a span without a writer, beyond which the socket may have run empty."""
WINDOW_SECONDS = 8.0
"""Length up to which spans are joined."""
FIRST_WINDOW_SECONDS = 2.0
"""Length from which the spans of the first window give a provisional estimate."""
RISE_WEIGHT, FALL_WEIGHT = 0.5, 0.25
"""Weights of a window above the estimate, and of one below it: a remote that reads slowly blocks
writers as well, so that the higher rates are the uplink's."""


class UplinkEstimate:
    """The estimate of one direction of a node, over all of its connections."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._writing = 0
        self.forget()

    def forget(self) -> None:
        """Discard the estimate: the limit or the uplink has changed."""
        self._known = 0.0
        self._is_provisional = True  # until the first whole window
        self._room_at: float | None = None
        self._idle_since = self._clock()
        self._idle_seconds = 0.0
        self._bytes = 0
        self._window_bytes = 0
        self._window_seconds = 0.0

    @property
    def bytes_per_second(self) -> float:
        """The estimated rate; 0 while it is unknown."""
        return self._known

    def begin(self) -> float:
        """Record that a writer has something to send. The result is passed to `end`."""
        now = self._clock()
        if not self._writing:
            self._idle_seconds += now - self._idle_since
        self._writing += 1
        return now

    def end(self, begun: float, size: int) -> None:
        """Record that the writer sent this many bytes; 0 when it failed."""
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
        elif self._is_provisional and self._window_seconds >= FIRST_WINDOW_SECONDS:
            self._known = self._window_bytes / self._window_seconds

    def _learn(self, rate: float) -> None:
        """Take the rate of a whole window into the estimate."""
        if self._is_provisional:
            self._known, self._is_provisional = rate, False
        else:
            weight = RISE_WEIGHT if rate > self._known else FALL_WEIGHT
            self._known += weight * (rate - self._known)
