"""The rules that were considered and not chosen (docs/decisions, number 0037)."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping

from swarm_shared.base.types import MicrobatchIndex, PeerId
from swarm_shared.scheduling.routing import Observation, StageRouting

IDLE_HALF_LIFE_SECONDS = 5.0
"""Half-life of an idle peer's estimate in `Turns`."""


class Turns(StageRouting):
    """Decision 0029: shortest expected delay of own measurements. Equal delays take turns in the
    roster's order, an idle peer's estimate decays to zero, and the roster's rates are not used."""

    def __init__(self, rng: random.Random, microbatches: int) -> None:
        super().__init__(rng, microbatches)
        self._chosen_at: dict[PeerId, int] = {}
        self._choices = 0

    def update(self, rates: Mapping[PeerId, float]) -> None:
        super().update(dict.fromkeys(rates, 0.0))
        for peer in rates:
            if peer not in self._chosen_at:
                self._choices += 1
                self._chosen_at[peer] = self._choices

    def choose(
        self, now: float, in_flight: Mapping[PeerId, int], microbatch: MicrobatchIndex | None
    ) -> PeerId | None:
        allowed = _not_banned(self, now, in_flight)
        if not allowed:
            return super().choose(now, in_flight, None)
        unknown = self._mean_seconds()

        def delay(peer: PeerId) -> tuple[float, int]:
            candidate = self._candidates[peer]
            seconds = unknown if candidate.seconds is None else candidate.seconds
            if in_flight[peer]:
                return (in_flight[peer] + 1) * seconds, self._chosen_at[peer]
            idle_seconds = max(0.0, now - candidate.seen_at)
            decayed = math.exp2(-min(64.0, idle_seconds / IDLE_HALF_LIFE_SECONDS))
            return seconds * decayed, self._chosen_at[peer]

        peer = min(allowed, key=delay)
        self._choices += 1
        self._chosen_at[peer] = self._choices
        return peer


class AgedDelay(StageRouting):
    """Shortest expected delay; equal delays are broken by the generator, and estimates age towards
    the roster's rates. What the product does without a plan."""

    def choose(
        self, now: float, in_flight: Mapping[PeerId, int], microbatch: MicrobatchIndex | None
    ) -> PeerId | None:
        return super().choose(now, in_flight, None)


class TwoChoices(StageRouting):
    """Two peers drawn in proportion to their rates, and of these the one that would be done first
    (Mitzenmacher 2001, "The power of two choices in randomized load balancing")."""

    def __init__(self, rng: random.Random, microbatches: int) -> None:
        super().__init__(rng, microbatches)
        self._weighted = rng

    def choose(
        self, now: float, in_flight: Mapping[PeerId, int], microbatch: MicrobatchIndex | None
    ) -> PeerId | None:
        allowed = _not_banned(self, now, in_flight)
        if not allowed:
            return super().choose(now, in_flight, None)
        seconds = {peer: self.seconds_of(peer, now) for peer in allowed}
        drawn = self._weighted.choices(allowed, [1 / seconds[peer] for peer in allowed], k=2)
        return min(drawn, key=lambda peer: (in_flight[peer] + 1) * seconds[peer])


class LeastLoaded(AgedDelay):
    """Shortest expected delay by the roster's rates alone."""

    def observe(self, peer: PeerId, seen: Observation, now: float) -> None:
        super().observe(peer, seen, now)
        if peer in self._prior:
            self._candidates[peer].seconds = None


RULES: dict[str, type[StageRouting]] = {
    "turns": Turns,
    "aged delay": AgedDelay,
    "two choices": TwoChoices,
    "least loaded": LeastLoaded,
    "plan": StageRouting,
}


def _not_banned(routing: StageRouting, now: float, in_flight: Mapping[PeerId, int]) -> list[PeerId]:
    return [p for p, c in routing._candidates.items() if p in in_flight and c.banned_until <= now]
