"""Shortest expected delay: which peer of the next stage gets the next microbatch.

The one that would be done first: of each peer it is known how long it takes for a microbatch, and
how many this sender has given it that it has not answered. (The rule is that of the Linux Virtual
Server's scheduler of this name, with measured rates for weights.) SWARM's own wiring is interleaved
weighted round-robin (Ryabinin et al. 2023, arXiv 2301.11913, section 3.2 and algorithm 1), which
counts what it has given and not what came back; decision 0029 says why this is another one. As
there, a failing peer is banned with decaying back-off, never so far that the stage becomes empty.

Pure: time is passed in, equal delays take turns.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from swarm_shared.base.types import PeerId

EMA_WEIGHT = 0.3
"""Weight of the newest observation: about the last five microbatches count."""

IDLE_HALF_LIFE_SECONDS = 5.0
"""In so long an estimate of somebody who has nothing in hand comes down by half. One bad moment
would otherwise keep a peer without work, and so without a chance to show that it is over."""

MIN_SERVICE_SECONDS = 1e-6
"""Nobody takes no time."""

REFUSAL_PAUSE_SECONDS = 0.2
"""Longer than senders wait before they choose again, or they would choose the same one."""

FIRST_BAN_SECONDS = 1.0
MAX_BAN_SECONDS = 60.0
MAX_BAN_DOUBLINGS = 10
"""2**10 is past the maximum; an unbounded exponent would overflow a peer that fails for days."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one microbatch tells of the peer that did it."""

    service_seconds: float
    """Of its device, without waiting for it."""
    uplink_seconds: float = 0.0
    """What its line takes to send what a microbatch sends, on and back, as it says: the one on
    waits where its sender does not see it. 0 while its line holds nothing up."""
    link_seconds: float = 0.0
    """How long the microbatch was between the two, there and back."""
    in_flight: int = 1
    """Microbatches that were sent to it and not answered, this one included."""


@dataclass(slots=True)
class _PeerEstimate:
    turn: int
    """Counts up: who was chosen, or entered, longest ago has the smallest."""
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
        """Make the table hold exactly these peers; those that stay keep what is known of them."""
        wanted = list(peers)
        for gone in self._candidates.keys() - set(wanted):
            del self._candidates[gone]
        for peer in wanted:
            if peer not in self._candidates:
                self._turns += 1
                self._candidates[peer] = _PeerEstimate(self._turns)

    def choose(self, now: float, in_flight: Mapping[PeerId, int]) -> PeerId | None:
        """The next peer out of those of `in_flight`, which says how many microbatches of this
        sender
        each of them has; None when none of them is in the table.

        Banned peers are passed over unless every peer of the table is banned; then the one whose
        ban ends first serves, so that the stage never becomes empty.
        """
        present = [(p, c) for p, c in self._candidates.items() if p in in_flight]
        if not present:
            return None
        allowed = [(p, c) for p, c in present if c.banned_until <= now]
        if not allowed:
            if any(c.banned_until <= now for c in self._candidates.values()):
                return None  # somebody else can serve soon: wait for that one
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
        """When it would be done, from now, with one more."""
        seconds = unmeasured if candidate.seconds is None else candidate.seconds
        if in_flight:
            return (in_flight + 1) * seconds
        idle_seconds = max(0.0, now - candidate.seen_at)
        return seconds * math.exp2(-min(64.0, idle_seconds / IDLE_HALF_LIFE_SECONDS))

    def next_ban_end(self, now: float) -> float | None:
        """When the earliest running ban ends."""
        ends = [c.banned_until for c in self._candidates.values() if c.banned_until > now]
        return min(ends, default=None)

    def seconds_of(self, peer: PeerId) -> float:
        """Expected seconds per microbatch: measured, or the mean of those that are."""
        own = self._candidates[peer].seconds
        return self._unmeasured_seconds() if own is None else own

    def _unmeasured_seconds(self) -> float:
        known = [c.seconds for c in self._candidates.values() if c.seconds is not None]
        return sum(known) / len(known) if known else self._default_seconds

    def observe(self, peer: PeerId, seen: Observation, now: float) -> None:
        """A microbatch came back from `peer`, which is as fast as the slowest of its device, its
        line and the link.

        What all links have in common is the sender's own line, and tells no peer from another;
        what one takes beyond that passes for each microbatch while several share the link.
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
        """`peer` is full, or at another step: others come first until it may have room again."""
        candidate = self._candidates.get(peer)
        if candidate is not None:
            rest_seconds = min(FIRST_BAN_SECONDS, max(REFUSAL_PAUSE_SECONDS, self.seconds_of(peer)))
            candidate.banned_until = max(candidate.banned_until, now + rest_seconds)

    def failed(self, peer: PeerId, now: float) -> None:
        """`peer` failed: ban it, for longer each time in a row."""
        candidate = self._candidates.get(peer)
        if candidate is None:
            return
        ban_seconds = min(
            MAX_BAN_SECONDS, FIRST_BAN_SECONDS * 2 ** min(candidate.failures, MAX_BAN_DOUBLINGS)
        )
        candidate.failures += 1
        candidate.banned_until = now + ban_seconds


def _average(known: float | None, newest: float) -> float:
    return newest if known is None else known + EMA_WEIGHT * (newest - known)
