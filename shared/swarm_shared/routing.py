"""Interleaved weighted round-robin: which peer of the next stage gets the next microbatch.

SWARM's stochastic wiring (Ryabinin et al. 2023, arXiv 2301.11913, section 3.2 and algorithm 1):
every peer has a virtual finish time; the smallest is chosen and moves on by the time that peer
takes for one microbatch, so that in the long run each gets work in proportion to its rate. A new
peer enters at the current minimum. A failing peer is banned with decaying back-off, never so far
that the stage becomes empty.

Pure: time is passed in, ties are broken by a number fixed when a peer enters.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from swarm_shared.types import PeerId

EMA_WEIGHT = 0.3
"""Weight of the newest observation: about the last five microbatches count."""

BAN_SECONDS = 1.0
BAN_MAXIMUM_SECONDS = 60.0
MAXIMUM_DOUBLINGS = 10
"""2**10 is past the maximum; an unbounded exponent would overflow a peer that fails for days."""


@dataclass(slots=True)
class _Candidate:
    virtual_finish: float
    tie_break: int
    seconds: float | None = None
    failures: int = 0
    banned_until: float = 0.0


class InterleavedWeightedRoundRobin:
    """The routing table of one sender for one stage."""

    def __init__(self, default_seconds: float = 1.0) -> None:
        self._candidates: dict[PeerId, _Candidate] = {}
        self._default_seconds = default_seconds
        self._entered = 0

    @property
    def peers(self) -> Collection[PeerId]:
        return self._candidates.keys()

    def update(self, peers: Iterable[PeerId]) -> None:
        """Make the table hold exactly these peers; those that stay keep what is known of them."""
        wanted = list(peers)
        for gone in self._candidates.keys() - set(wanted):
            del self._candidates[gone]
        floor = min((c.virtual_finish for c in self._candidates.values()), default=0.0)
        for peer in wanted:
            if peer not in self._candidates:
                self._entered += 1
                self._candidates[peer] = _Candidate(floor, self._entered)

    def choose(self, now: float, among: Collection[PeerId]) -> PeerId | None:
        """The next peer out of `among`, or None when none of them is in the table.

        Banned peers are passed over unless every peer of the table is banned; then the one whose
        ban ends first serves, so that the stage never becomes empty.
        """
        present = [(p, c) for p, c in self._candidates.items() if p in among]
        if not present:
            return None
        allowed = [(p, c) for p, c in present if c.banned_until <= now]
        if not allowed:
            if any(c.banned_until <= now for c in self._candidates.values()):
                return None  # somebody outside `among` can serve soon: wait for that one
            allowed = [min(present, key=lambda entry: entry[1].banned_until)]
        peer, candidate = min(allowed, key=lambda e: (e[1].virtual_finish, e[1].tie_break))
        candidate.virtual_finish += self.seconds_of(peer)
        return peer

    def next_ban_end(self, now: float) -> float | None:
        """When the earliest running ban ends."""
        ends = [c.banned_until for c in self._candidates.values() if c.banned_until > now]
        return min(ends, default=None)

    def seconds_of(self, peer: PeerId) -> float:
        """Expected seconds per microbatch: measured, or the mean of those that are."""
        own = self._candidates[peer].seconds
        if own is not None:
            return own
        known = [c.seconds for c in self._candidates.values() if c.seconds is not None]
        return sum(known) / len(known) if known else self._default_seconds

    def observe(self, peer: PeerId, seconds: float) -> None:
        """A microbatch came back from `peer` after `seconds` of its own service."""
        candidate = self._candidates.get(peer)
        if candidate is None:
            return
        seconds = max(seconds, 1e-6)
        if candidate.seconds is None:
            candidate.seconds = seconds
        else:
            candidate.seconds += EMA_WEIGHT * (seconds - candidate.seconds)
        candidate.failures = 0
        candidate.banned_until = 0.0

    def failed(self, peer: PeerId, now: float) -> None:
        """`peer` failed: ban it, for longer each time in a row."""
        candidate = self._candidates.get(peer)
        if candidate is None:
            return
        ban_seconds = min(
            BAN_MAXIMUM_SECONDS, BAN_SECONDS * 2 ** min(candidate.failures, MAXIMUM_DOUBLINGS)
        )
        candidate.failures += 1
        candidate.banned_until = now + ban_seconds


class EqualShares(InterleavedWeightedRoundRobin):
    """Each peer in its turn, however long it takes, and nobody before it while it has no room.

    Not for training: what routing by rates is worth is measured against it.
    """

    def choose(self, now: float, among: Collection[PeerId]) -> PeerId | None:
        peer = super().choose(now, self.peers)
        if peer is not None and peer not in among:
            self._candidates[peer].virtual_finish -= self.seconds_of(peer)
            return None
        return peer

    def seconds_of(self, peer: PeerId) -> float:
        return 1.0
