"""Shortest expected delay: which peer of the next stage receives the next microbatch.

The peer that would be done first is chosen, from each peer's time per microbatch and the number of
this sender's microbatches that it has not answered. (This is the rule of the Linux Virtual Server's
scheduler of this name, with measured rates for weights.) SWARM's own wiring is interleaved weighted
round-robin (Ryabinin et al. 2023, arXiv 2301.11913, section 3.2 and algorithm 1), which counts what
was sent and not what came back; decision 0029 gives the reason for the difference. As in SWARM, a
failing peer is banned with decaying back-off, but the stage never becomes empty.

Pure: time is passed in, equal delays take turns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.types import PeerId

EMA_WEIGHT = 0.3
"""Weight of the newest observation: about the last five microbatches count."""

IDLE_HALF_LIFE_SECONDS = 5.0
"""Half-life of the estimate of a peer with nothing in flight. One slow moment would otherwise keep
a peer without work, and so without a new measurement."""

MIN_SERVICE_SECONDS = 1e-6
"""Lower bound of a service-time estimate; avoids division by zero."""

REFUSAL_PAUSE_SECONDS = 0.2
"""Pause of a peer that refused; longer than senders wait before they choose again, or they would
choose the same peer."""

FIRST_BAN_SECONDS = 1.0
"""Ban after a first failure; doubles with each further one."""
MAX_BAN_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Observation:
    """The measurements that one microbatch gives of the peer that computed it."""

    service_seconds: float
    """Computing time of its device, without queueing."""
    uplink_seconds: float = 0.0
    """Seconds its uplink takes per microbatch (activation and gradient), as reported by the peer:
    the queueing there is invisible to the sender. 0 while the uplink does not limit sending."""
    link_seconds: float = 0.0
    """Time of the microbatch on the link between the two, there and back."""
    in_flight: int = 1
    """Microbatches sent to the peer and not answered, this one included."""


@dataclass(slots=True)
class _PeerEstimate:
    """What is known of one peer."""

    turn: int
    """Increases with every choice: the peer chosen, or added, longest ago has the smallest."""
    seconds: float | None = None
    link_seconds: float | None = None
    seen_at: float = 0.0
    failures: int = 0
    banned_until: float = 0.0


class ShortestExpectedDelay:
    """The routing table of one sender for one stage."""

    def __init__(self, default_seconds: float = 1.0) -> None:
        self._candidates: dict[PeerId, _PeerEstimate] = {}
        self._default_seconds = default_seconds
        self._turns = 0

    @property
    def peers(self) -> Collection[PeerId]:
        return self._candidates.keys()

    def update(self, peers: Iterable[PeerId]) -> None:
        """Set the table's peers; those that stay keep their estimates."""
        wanted = list(peers)
        for gone in self._candidates.keys() - set(wanted):
            del self._candidates[gone]
        for peer in wanted:
            if peer not in self._candidates:
                self._turns += 1
                self._candidates[peer] = _PeerEstimate(self._turns)

    def choose(self, now: float, in_flight: Mapping[PeerId, int]) -> PeerId | None:
        """Return the next peer out of those of `in_flight`, which counts this sender's microbatches
        at each; None when none of them is in the table.

        Banned peers are skipped unless every peer of the table is banned; then the one whose ban
        ends first serves, so that the stage never becomes empty.
        """
        present = [(p, c) for p, c in self._candidates.items() if p in in_flight]
        if not present:
            return None
        allowed = [(p, c) for p, c in present if c.banned_until <= now]
        if not allowed:
            if any(c.banned_until <= now for c in self._candidates.values()):
                return None  # another peer will have room soon: wait for it
            allowed = [min(present, key=lambda entry: entry[1].banned_until)]
        unmeasured = self._unmeasured_seconds()
        peer, candidate = min(
            allowed, key=lambda e: (self._delay(e[1], in_flight[e[0]], unmeasured, now), e[1].turn)
        )
        self._turns += 1
        candidate.turn = self._turns
        return peer

    def _delay(
        self, candidate: _PeerEstimate, in_flight: int, unmeasured: float, now: float
    ) -> float:
        """Return the expected seconds from now until the peer has done one more."""
        seconds = unmeasured if candidate.seconds is None else candidate.seconds
        if in_flight:
            return (in_flight + 1) * seconds
        idle_seconds = max(0.0, now - candidate.seen_at)
        return seconds * math.exp2(-min(64.0, idle_seconds / IDLE_HALF_LIFE_SECONDS))

    def next_ban_end(self, now: float) -> float | None:
        """Return when the earliest current ban ends."""
        ends = [c.banned_until for c in self._candidates.values() if c.banned_until > now]
        return min(ends, default=None)

    def seconds_of(self, peer: PeerId) -> float:
        """Return the expected seconds per microbatch: measured, or the mean of the measured
        peers."""
        own = self._candidates[peer].seconds
        return self._unmeasured_seconds() if own is None else own

    def _unmeasured_seconds(self) -> float:
        known = [c.seconds for c in self._candidates.values() if c.seconds is not None]
        return sum(known) / len(known) if known else self._default_seconds

    def observe(self, peer: PeerId, seen: Observation, now: float) -> None:
        """Record that a microbatch came back from `peer`, whose rate is that of the slowest of
        device, uplink and link.

        What all links have in common is the sender's own uplink, which does not distinguish the
        peers; the rest of a link's time is shared by the microbatches in flight on it.
        """
        candidate = self._candidates.get(peer)
        if candidate is None:
            return
        candidate.link_seconds = _average(candidate.link_seconds, seen.link_seconds)
        links = [c.link_seconds for c in self._candidates.values() if c.link_seconds is not None]
        link_seconds = (seen.link_seconds - min(links)) / max(1, seen.in_flight)
        seconds = max(seen.service_seconds, seen.uplink_seconds, link_seconds, MIN_SERVICE_SECONDS)
        candidate.seconds = _average(candidate.seconds, seconds)
        candidate.seen_at = now
        candidate.failures = 0
        candidate.banned_until = 0.0

    def refused(self, peer: PeerId, now: float) -> None:
        """Record that `peer` is full, or at another step: other peers come first until it may have
        room."""
        candidate = self._candidates.get(peer)
        if candidate is not None:
            rest_seconds = min(FIRST_BAN_SECONDS, max(REFUSAL_PAUSE_SECONDS, self.seconds_of(peer)))
            candidate.banned_until = max(candidate.banned_until, now + rest_seconds)

    def failed(self, peer: PeerId, now: float) -> None:
        """Record that `peer` failed: ban it, for longer each time in a row."""
        candidate = self._candidates.get(peer)
        if candidate is None:
            return
        ban_seconds = backoff_seconds(candidate.failures, FIRST_BAN_SECONDS, MAX_BAN_SECONDS)
        candidate.failures += 1
        candidate.banned_until = now + ban_seconds


def _average(known: float | None, newest: float) -> float:
    return newest if known is None else known + EMA_WEIGHT * (newest - known)
