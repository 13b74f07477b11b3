"""How far the rates that peers report of themselves are believed.

A rate is a claim, and the plan of a step (`swarm_shared.scheduling.step_plan`) gives a peer work in
proportion to it. A peer is believed to be somewhat faster than most of its stage from the start,
and beyond that somewhat faster than it was in the last step, so that one that is much faster than
the others has its share after a few steps, and one that only claims to be never has. Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

MAX_RATE_OVER_MEDIAN = 4.0
"""Ratio of a claimed rate to the stage's median up to which any peer is believed."""

MAX_RATE_OVER_COUNTED = 2.0
"""Ratio of a claimed rate to the stage's median up to which a peer is believed, per microbatch that
it counted in the last step over the median number of its stage."""


@dataclass(frozen=True, slots=True)
class ClaimedRate:
    """The claim of one peer of a stage."""

    microbatches_per_second: float
    """0: unknown."""
    counted: int
    """Microbatches that it counted for the stage in the last step."""


def believed_rates(claims: Sequence[ClaimedRate]) -> list[float]:
    """Return the rates that are believed of the peers of one stage, in the order of the claims."""
    rates = [claim.microbatches_per_second for claim in claims if claim.microbatches_per_second > 0]
    if not rates:
        return [0.0] * len(claims)
    median = statistics.median(rates)
    usual = statistics.median([claim.counted for claim in claims if claim.counted] or [1])
    return [
        min(
            claim.microbatches_per_second,
            median * max(MAX_RATE_OVER_MEDIAN, MAX_RATE_OVER_COUNTED * claim.counted / usual),
        )
        for claim in claims
    ]
