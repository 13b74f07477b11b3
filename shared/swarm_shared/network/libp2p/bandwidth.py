"""Bandwidth limits and byte counts of all connections of a node together, up and down.

Works at the sockets, below all connections, so that every byte is counted once, with its
encryption, whatever stream it belongs to, relayed ones included. A circuit through a relay has no
socket of its own and is counted in the connection to the relay.

The limit is a token bucket that connections take turns at. Each turn is for a small piece, so that
a heartbeat waits for one piece of every other connection and not for everything they have queued.
"""

from __future__ import annotations

import trio

from swarm_shared.base.clock import Clock
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.network.libp2p.uplink_estimate import UplinkEstimate

PIECE_BYTES = 16 * 1024
"""Bytes of one turn: 0.25 s at the lowest limit that a volunteer may set."""
BURST_SECONDS = 0.5
"""Largest lead of a direction that was idle: hardly noticeable, and enough to keep the rate on an
event loop that is blocked for a moment."""


class DirectionLimiter:
    """Counts the bytes of one direction, and delays them once there is a limit."""

    def __init__(self, clock: Clock = trio.current_time) -> None:
        self.bytes = 0
        """Bytes since the node was made."""
        self.line = UplinkEstimate(clock)
        self._clock = clock
        self._limit: int | None = None
        self._bucket: RateLimit | None = None
        self._turns = trio.Lock()
        self._changed = trio.Event()

    @property
    def bytes_per_second(self) -> int | None:
        """The limit; None without one."""
        return self._limit

    @property
    def max_bytes_per_second(self) -> float:
        """The estimated rate of the uplink or the limit, whichever is lower; 0 while neither has
        limited sending. Only sending is measured."""
        line_rate = self.line.bytes_per_second
        return line_rate if self._limit is None else min(line_rate, self._limit)

    def limit(self, bytes_per_second: int | None) -> None:
        """Set the limit, also for waiting callers; None removes it."""
        if bytes_per_second == self._limit:
            return
        self._limit = bytes_per_second
        self._bucket = None
        self.line.forget()
        if bytes_per_second is not None:
            burst = max(PIECE_BYTES, int(BURST_SECONDS * bytes_per_second))
            self._bucket = RateLimit(burst, bytes_per_second, 1, self._clock)
        self._changed.set()
        self._changed = trio.Event()

    def piece(self, size: int) -> int:
        """Return how many of so many bytes to move before `consume` is called for them."""
        return size if self._bucket is None else min(size, PIECE_BYTES)

    async def consume(self, size: int) -> None:
        """Count these bytes, at most a piece, and wait until they may have moved."""
        self.bytes += size
        if self._bucket is None:
            return
        async with self._turns:
            while self._bucket is not None:
                seconds = self._bucket.take("all", min(size, PIECE_BYTES))
                if not seconds:
                    return
                with trio.move_on_after(seconds):
                    await self._changed.wait()


class Bandwidth:
    """The bandwidth of one node, or of several that share an uplink."""

    def __init__(self) -> None:
        self.up = DirectionLimiter()
        self.down = DirectionLimiter()
        self.nodes = 0

    @property
    def own_up_bytes_per_second(self) -> float:
        """One node's share of the uplink; 0 while the uplink has not limited sending."""
        return self.up.max_bytes_per_second / max(1, self.nodes)

    @property
    def expected_up_bytes_per_second(self) -> float:
        """The same before anything was sent: the share of the limit, and 0 without one."""
        limit = self.up.bytes_per_second or 0
        return self.own_up_bytes_per_second or limit / max(1, self.nodes)
