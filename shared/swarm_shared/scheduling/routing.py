"""Which peer of the next stage receives the next microbatch.

Each microbatch has a planned peer (`step_plan`), which the roster's rates give and which is the
same at every sender. Senders that chose by themselves, from the same rates and at the same moment,
would choose the same peers (docs/decisions, number 0037). Where the planned peer has no room, is
banned, or is slower for this sender than the roster claims, the choice is by shortest expected
delay: the peer that would be done first, from each peer's time per microbatch and the number of
this sender's microbatches that it has not answered (decision 0029). As in SWARM (Ryabinin et al.
2023, arXiv 2301.11913), a failing peer is banned with decaying back-off, but the stage never
becomes empty.

Pure: time is passed in, and so is the generator that breaks ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.types import MicrobatchIndex, PeerId
from swarm_shared.scheduling.step_plan import plan_step, prior_seconds

EMA_WEIGHT = 0.3
"""Weight of the newest observation: about the last five microbatches count."""

ESTIMATE_HALF_LIFE_SECONDS = 60.0
"""Half-life of a sender's own estimate, which ages towards what the roster gives. One slow moment
would otherwise keep a peer without work, and so without a new measurement."""

SLOWER_THAN_PLANNED = 2.0
"""Ratio of a sender's own estimate to the planned time above which it departs from the plan: the
roster does not know the link between sender and peer."""

PROBE_SHARE = 1 / 8
"""Share of the steps whose first microbatch goes to a peer that the plan leaves out. A rate that
was measured in a slow moment would otherwise keep it without work, and so unmeasured."""

TIE = 1.2
"""Ratio of two expected delays up to which they count as equal; estimates are no more exact."""

MIN_SERVICE_SECONDS = 1e-6
"""Lower bound of a service-time estimate; avoids division by zero."""

DEFAULT_SECONDS = 1.0
"""Seconds per microbatch of a peer while none is known or measured."""
REFUSAL_PAUSE_SECONDS = 0.2
"""Seconds without microbatches for a peer that refused; longer than senders wait before they choose
again, or they would choose the same peer."""

FIRST_BAN_SECONDS = 1.0
"""Ban of a peer after a first failure, in seconds; doubles with each further one."""
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
    """Time of the microbatch on the link between sender and peer, there and back."""
    in_flight: int = 1
    """Microbatches sent to the peer and not answered, this one included."""


@dataclass(slots=True)
class _PeerEstimate:
    """What one sender has measured of one peer."""

    seconds: float | None = None
    link_seconds: float | None = None
    seen_at: float = 0.0
    failures: int = 0
    banned_until: float = 0.0


class Generator(Protocol):
    """What routing needs of `random.Random`."""

    def choice(self, seq: Sequence[PeerId], /) -> PeerId: ...
    def random(self) -> float: ...


class StageRouting:
    """The routing table of one sender for one stage."""

    def __init__(self, rng: Generator, microbatches: int) -> None:
        """`microbatches` is the number of microbatches of a step."""
        self._rng = rng
        self._microbatches = microbatches
        self._candidates: dict[PeerId, _PeerEstimate] = {}
        self._rates: dict[PeerId, float] = {}
        self._prior: dict[PeerId, float] = {}
        """Seconds per microbatch of each peer as the roster gives them; empty if it gives none."""
        self._plan: tuple[PeerId, ...] | None = None
        """The peer of each microbatch; None: the plan is made with the next choice."""
        self._left_out: list[PeerId] = []
        """Peers to which the plan gives nothing."""

    def update(self, rates: Mapping[PeerId, float]) -> None:
        """Set the table's peers and the roster's rates of them, in microbatches per second (0:
        unknown); peers that stay keep their estimates."""
        if rates == self._rates:
            return
        self._rates = dict(rates)
        self._candidates = {p: self._candidates.get(p) or _PeerEstimate() for p in rates}
        self._prior, self._plan, self._left_out = prior_seconds(rates), None, []

    def choose(
        self, now: float, in_flight: Mapping[PeerId, int], microbatch: MicrobatchIndex | None
    ) -> PeerId | None:
        """Return the peer for `microbatch` (None: one that is not planned) among the peers of
        `in_flight`, which counts this sender's microbatches at each; None when none of these peers
        is in the table.

        Banned peers are skipped unless every peer of the table is banned; then the one whose ban
        ends first serves, so that the stage never becomes empty.
        """
        planned = self._planned(microbatch, now)
        if planned is not None and planned in in_flight and self._keeps_to_plan(planned, now):
            return planned
        present = [(p, c) for p, c in self._candidates.items() if p in in_flight]
        if not present:
            return None
        allowed = [p for p, c in present if c.banned_until <= now]
        if not allowed:
            if any(c.banned_until <= now for c in self._candidates.values()):
                return None  # another peer will have room soon: wait for it
            return min(present, key=lambda entry: entry[1].banned_until)[0]
        unknown = self._mean_seconds()
        delays = {p: (in_flight[p] + 1) * self._expected_seconds(p, unknown, now) for p in allowed}
        shortest = TIE * min(delays.values())
        return self._rng.choice([p for p, delay in delays.items() if delay <= shortest])

    def planned(self, microbatch: MicrobatchIndex, now: float) -> PeerId | None:
        """Return the peer that the plan has for `microbatch`, unless this sender departs from the
        plan there, or there is none."""
        peer = self._peer_by_plan(microbatch)
        return peer if peer is not None and self._keeps_to_plan(peer, now) else None

    def _planned(self, microbatch: MicrobatchIndex | None, now: float) -> PeerId | None:
        if microbatch is None:
            return None
        planned = self._peer_by_plan(microbatch)
        # Of the first microbatch, which has the whole step, its only sender decides.
        if microbatch == 0 and self._left_out and self._rng.random() < PROBE_SHARE:
            return self._rng.choice(self._left_out)
        return planned

    def _peer_by_plan(self, microbatch: MicrobatchIndex) -> PeerId | None:
        if not self._prior:
            return None  # no rate is known
        if self._plan is None:
            self._plan = plan_step(tuple(sorted(self._prior.items())), self._microbatches)
            self._left_out = sorted(self._prior.keys() - set(self._plan))
        return self._plan[microbatch % len(self._plan)]

    def _keeps_to_plan(self, peer: PeerId, now: float) -> bool:
        candidate, seconds = self._candidates[peer], self._prior[peer]
        expected = _aged(candidate, seconds, now)
        return candidate.banned_until <= now and expected <= SLOWER_THAN_PLANNED * seconds

    def _expected_seconds(self, peer: PeerId, unknown: float, now: float) -> float:
        return _aged(self._candidates[peer], self._prior.get(peer, unknown), now)

    def next_ban_end(self, now: float) -> float | None:
        """Return when the earliest current ban ends."""
        ends = [c.banned_until for c in self._candidates.values() if c.banned_until > now]
        return min(ends, default=None)

    def seconds_of(self, peer: PeerId, now: float) -> float:
        """Return the expected seconds per microbatch: this sender's estimate, which ages towards
        what the roster gives, or else the mean of the measured peers."""
        return self._expected_seconds(peer, self._mean_seconds(), now)

    def _mean_seconds(self) -> float:
        """Return the mean seconds per microbatch of the measured peers; not needed where the roster
        gives rates."""
        if self._prior:
            return DEFAULT_SECONDS
        measured = [c.seconds for c in self._candidates.values() if c.seconds is not None]
        return sum(measured) / len(measured) if measured else DEFAULT_SECONDS

    def observe(self, peer: PeerId, observation: Observation, now: float) -> None:
        """Record that a microbatch came back from `peer`, whose rate is that of the slowest of
        device, uplink and link.

        What all links have in common is the sender's own uplink, which does not distinguish the
        peers; the rest of a link's time is shared by the microbatches in flight on it.
        """
        candidate = self._candidates.get(peer)
        if candidate is None:
            return
        candidate.link_seconds = _average(candidate.link_seconds, observation.link_seconds)
        links = [c.link_seconds for c in self._candidates.values() if c.link_seconds is not None]
        link_seconds = (observation.link_seconds - min(links)) / max(1, observation.in_flight)
        own_seconds = max(observation.service_seconds, observation.uplink_seconds)
        seconds = max(own_seconds, link_seconds, MIN_SERVICE_SECONDS)
        candidate.seconds = _average(candidate.seconds, seconds)
        candidate.seen_at = now
        candidate.failures = 0
        candidate.banned_until = 0.0

    def refused(self, peer: PeerId, now: float) -> None:
        """Record that `peer` is full, or at another step: other peers come first until it may have
        room."""
        candidate = self._candidates.get(peer)
        if candidate is not None:
            rest_seconds = min(
                FIRST_BAN_SECONDS, max(REFUSAL_PAUSE_SECONDS, self.seconds_of(peer, now))
            )
            candidate.banned_until = max(candidate.banned_until, now + rest_seconds)

    def failed(self, peer: PeerId, now: float) -> None:
        """Record that `peer` failed: ban it, for longer each time in a row."""
        candidate = self._candidates.get(peer)
        if candidate is None:
            return
        ban_seconds = backoff_seconds(candidate.failures, FIRST_BAN_SECONDS, MAX_BAN_SECONDS)
        candidate.failures += 1
        candidate.banned_until = now + ban_seconds


def _average(previous: float | None, newest: float) -> float:
    return newest if previous is None else previous + EMA_WEIGHT * (newest - previous)


def _aged(candidate: _PeerEstimate, prior: float, now: float) -> float:
    """Return the peer's seconds per microbatch: the older an estimate, the nearer to `prior`."""
    if candidate.seconds is None:
        return prior
    age = max(0.0, now - candidate.seen_at)
    weight = math.exp2(-min(64.0, age / ESTIMATE_HALF_LIFE_SECONDS))
    return weight * candidate.seconds + (1 - weight) * prior
