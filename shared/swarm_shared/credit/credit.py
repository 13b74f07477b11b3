"""Credit: the value of a contribution, as pure functions that everyone can recompute.

One credit is one token through the whole model: a peer that computed one stage gets the stage's
share of the model's arithmetic for each token, so the credits of a run add up to the tokens it was
trained on. The recent average is BOINC's: credit per day with a half-life of 7 days; old work
decays, and a steady r per day tends to r.

Sums are exact (`math.fsum`) wherever the order could show: adding the same contributions in another
order gives the same number.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from swarm_shared.base.text import printable

HALF_LIFE_SECONDS = 7 * 86_400.0
MAX_TEAM_CHARACTERS = 40
_PER_DAY = 86_400.0 * math.log(2) / HALF_LIFE_SECONDS
"""Decay rate per day; a stream of one credit a day has decayed to a sum of 1 / _PER_DAY credits at
any moment."""


def work_shares(work_flops: Sequence[float]) -> tuple[float, ...]:
    """Return each stage's share of the model's arithmetic; equal shares where it was never
    measured."""
    total = math.fsum(work_flops)
    if total <= 0:
        return tuple(1.0 / len(work_flops) for _ in work_flops)
    return tuple(flops / total for flops in work_flops)


def credit_of(tokens_by_stage: Iterable[tuple[int, int]], shares: Sequence[float]) -> float:
    """Return the credit of (stage, tokens) pairs, in any order."""
    return math.fsum(tokens * shares[stage] for stage, tokens in tokens_by_stage)


@dataclass(frozen=True, slots=True)
class RecentCredit:
    """Decaying credit: a sum as of a moment, in which every part has decayed since it was earned.

    Moments are Unix seconds. A part from before `at` is added at what is left of it, and one from
    after it moves `at` on, so the order of entries does not matter but for rounding.
    """

    decayed: float = 0.0
    at: float = 0.0

    def with_credit(self, credit: float, at: float) -> RecentCredit:
        if at >= self.at:
            return RecentCredit(self.decayed * decay_factor(at - self.at) + credit, at)
        return RecentCredit(self.decayed + credit * decay_factor(self.at - at), self.at)

    def per_day(self, now: float) -> float:
        """Return the credit per day as of `now`, which is not before the last part."""
        return self.decayed * decay_factor(max(0.0, now - self.at)) * _PER_DAY


def normalised_team(text: str | None) -> str:
    """Return a team's name in the one form its members are grouped by; empty for none.

    People type the same name with different spaces, and systems compose its letters differently.
    Characters that cannot be printed are left out, as they would make teams that look alike.
    """
    composed = unicodedata.normalize("NFKC", text or "")
    kept = printable(composed, " ")
    return " ".join(kept.split())[:MAX_TEAM_CHARACTERS].rstrip()


def decay_factor(seconds: float) -> float:
    """Return the share of a credit that is left after `seconds`."""
    return math.exp2(-seconds / HALF_LIFE_SECONDS)
