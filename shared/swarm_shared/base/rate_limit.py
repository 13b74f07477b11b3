"""Token buckets, one per requester: a burst at once, and a rate over the long run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

from swarm_shared.base.clock import Clock, monotonic


class RateLimit:
    """Buckets of at most `max_keys` requesters; beyond that, the longest idle ones are forgotten.

    A requester with that many addresses escapes any limit by address, and must not fill the memory.
    """

    def __init__(
        self,
        burst: float,
        per_second: float,
        max_keys: int = 4096,
        clock: Clock = monotonic,
    ) -> None:
        self._burst = burst
        self._per_second = per_second
        self._max_keys = max_keys
        self._clock = clock
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()

    def take(self, key: Hashable, cost: float = 1.0) -> float:
        """Take `cost` tokens of `key`. Returns 0.0, or the seconds until it may, with nothing
        taken."""
        now = self._clock()
        tokens, at = self._buckets.pop(key, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._per_second)
        allowed = tokens >= cost
        self._buckets[key] = (tokens - cost if allowed else tokens, now)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return 0.0 if allowed else (cost - tokens) / self._per_second
