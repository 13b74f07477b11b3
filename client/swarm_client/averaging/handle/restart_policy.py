"""When a p2pd that runs is worth starting again. Pure: times come from outside.

A restart cuts all of p2pd's links, so there is none for what is taken back soon, none in the
middle of a round if that can be helped, and not many of them.
"""

from __future__ import annotations

import math

from swarm_shared.base.backoff import backoff_seconds

SETTLE_SECONDS = 2.0
LOST_RELAY_SECONDS = 20.0
"""p2pd reaches its relays within a second or so of its start. One that it has lost it does not
come back to (watched for 200 s), while the relay may have been away for a moment only."""
MAX_LOST_RELAY_SECONDS = 15 * 60.0
INTERVAL_SECONDS = 60.0
PATIENCE_SECONDS = 60.0
"""How long rounds that follow one another without a gap may hold up a restart."""


class RestartPolicy:
    """Of one volunteer; ask it every now and then while p2pd runs."""

    def __init__(self) -> None:
        self._restarted_at = -math.inf
        self._differs_since = math.inf
        self._missed_since = math.inf
        self._due_since = math.inf
        self._for_relays = 0
        """Restarts for a lost relay since all of them were reached."""

    def restart_reason(self, now: float, *, differs: bool, misses_relay: bool, busy: bool) -> str:
        """Why p2pd is to be started again now; empty when it is not.

        differs: it is to be run in another way than it is. misses_relay: it is not connected to
        all of its relays. busy: a round is under way.
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
            return "p2pd is to be run in another way"
        self._for_relays += 1
        return "p2pd has lost its relay"
