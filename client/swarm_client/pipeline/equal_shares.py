"""A switch for measurements: what is usually divided by what lines and devices take, equally."""

from __future__ import annotations

import os

EQUAL_SHARES_VARIABLE = "SWARM_EQUAL_SHARES"
"""Set to anything: every peer of a stage gets as many microbatches as the others, and sums as much
of its gradients. All volunteers of a run have to have it, or none."""


def shares_are_equal() -> bool:
    return bool(os.environ.get(EQUAL_SHARES_VARIABLE))
