"""How many bytes a second the connections of a node carry together, up and down.

Sits under all connections, at the sockets, so that every byte is counted once: with its
encryption, whatever stream it belongs to, and those that are carried for others. A circuit through
a relay has no socket of its own and is counted in the connection to the relay.

A token bucket that is shared in turns. Each turn is for a small piece, so that a heartbeat waits
for a piece of every other connection and not for what they have queued.
"""

from __future__ import annotations

import trio

from swarm_shared.base.clock import Clock
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.network.libp2p.uplink_estimate import UplinkEstimate

PIECE_BYTES = 16 * 1024
"""Taken in one turn: 0.25 s at the lowest limit that a volunteer may set."""
BURST_SECONDS = 0.5
"""How far a direction that was idle may be ahead: hardly noticeable, and enough to keep the rate on
an event loop that others hold up for a moment."""


class DirectionLimiter:
    """Bytes one way, counted; and held back once there is a limit."""

    def __init__(self, clock: Clock = trio.current_time) -> None:
        self.bytes = 0
        """Since the node was made."""
        self.line = UplinkEstimate(clock)
        self._clock = clock
        self._limit: int | None = None
        self._bucket: RateLimit | None = None
        self._turns = trio.Lock()
        self._changed = trio.Event()

    @property
    def bytes_per_second(self) -> int | None:
        return self._limit

    @property
    def max_bytes_per_second(self) -> float:
        """What the line or the limit was seen to allow; 0 while neither has held anybody up. Only
        sending is measured."""
        known = self.line.bytes_per_second
        return known if self._limit is None else min(known, self._limit)

    def limit(self, bytes_per_second: int | None) -> None:
        """From now on, also for those who wait; None: no limit."""
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
        """How much of so many bytes to move before `consume` is called for them."""
        return size if self._bucket is None else min(size, PIECE_BYTES)

    async def consume(self, size: int) -> None:
        """Count these bytes, no more than a piece of them, and wait until they may have moved."""
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
    """Of one node, or of several that share a line."""

    def __init__(self) -> None:
        self.up = DirectionLimiter()
        self.down = DirectionLimiter()
        self.nodes = 0

    @property
    def own_up_bytes_per_second(self) -> float:
        """What one of the nodes can count on; 0 while the line has held nobody up."""
        return self.up.max_bytes_per_second / max(1, self.nodes)
