"""A switch for measurements: equal shares of work, instead of shares by uplink and device speed."""

from __future__ import annotations

import os

EQUAL_SHARES_VARIABLE = "SWARM_EQUAL_SHARES"
"""Environment variable; set to anything, every peer of a stage gets the same number of microbatches
and sums the same share of its gradients. All volunteers of a run must set it, or none."""


def shares_are_equal() -> bool:
    return bool(os.environ.get(EQUAL_SHARES_VARIABLE))
