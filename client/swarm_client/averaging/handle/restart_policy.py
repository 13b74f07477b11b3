"""When to restart a running p2pd. Pure: times come from outside.

A restart cuts all of p2pd's links. The policy therefore ignores changes that are soon reverted,
avoids restarts during a round if possible, and limits their number.
"""

from __future__ import annotations

import math

from swarm_shared.base.backoff import backoff_seconds

SETTLE_SECONDS = 2.0
"""Seconds for which changed options must last before they cause a restart."""
LOST_RELAY_SECONDS = 20.0
"""Seconds without a relay after which p2pd is restarted. p2pd reaches its relays within about a
second of its start. It does not reconnect to a relay that it has lost (observed for 200 s), while
the relay may have been away for a moment only."""
MAX_LOST_RELAY_SECONDS = 15 * 60.0
INTERVAL_SECONDS = 60.0
"""Shortest time between two restarts, in seconds."""
PATIENCE_SECONDS = 60.0
"""Longest delay of a restart by consecutive rounds, in seconds."""


class RestartPolicy:
    """The policy of one volunteer; ask it regularly while p2pd runs."""

    def __init__(self) -> None:
        self._restarted_at = -math.inf
        self._differs_since = math.inf
        self._missed_since = math.inf
        self._due_since = math.inf
        self._for_relays = 0
        """Restarts for a lost relay since p2pd last reached all relays."""

    def restart_reason(self, now: float, *, differs: bool, misses_relay: bool, busy: bool) -> str:
        """The reason to restart p2pd now; empty for no restart.

        differs: its options have changed. misses_relay: it is not connected to all of its relays.
        busy: a round is under way.
        """
        self._differs_since = min(self._differs_since, now) if differs else math.inf
        self._missed_since = min(self._missed_since, now) if misses_relay else math.inf
        if not misses_relay:
            self._for_relays = 0
        patience = backoff_seconds(self._for_relays, LOST_RELAY_SECONDS, MAX_LOST_RELAY_SECONDS)
        settled = now - self._differs_since >= SETTLE_SECONDS
        lost = now - self._missed_since >= patience
        if not (settled or lost) or now - self._restarted_at < INTERVAL_SECONDS:
            self._due_since = math.inf
            return ""
        self._due_since = min(self._due_since, now)
        if busy and now - self._due_since < PATIENCE_SECONDS:
            return ""
        self._restarted_at = now
        self._differs_since = self._missed_since = self._due_since = math.inf
        if settled:
            return "the options of p2pd have changed"
        self._for_relays += 1
        return "p2pd has lost its relay"
