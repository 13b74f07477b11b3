"""A worker that computes slower than its machine could: for measurements on one machine.

Off unless the environment says how fast. A computation that is done sooner waits for the rest of
its time, so that machines of unlike speeds can be put beside each other on cores that they share.
What is computed is the same.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from swarm_shared.base.errors import ConfigurationError

PACE_VARIABLE = "SWARM_PACE_FLOPS"
"""Floating-point operations a second at most."""

FORWARD_SHARE = 1 / 3
"""Of a microbatch's work; the backward pass computes two gradients per product."""


class Pace:
    def __init__(
        self,
        flops_per_second: float,
        work_flops: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = work_flops / flops_per_second
        """Of a microbatch in this stage, forward and backward."""
        self._clock = clock
        self._sleep = sleep

    def keep(self, started: float, share: float) -> None:
        """Return when this share of a microbatch's work would be done that began at `started`."""
        left = started + share * self._seconds - self._clock()
        if left > 0:
            self._sleep(left)


def pace_from_environment(work_flops: float, clock: Callable[[], float]) -> Pace:
    """ConfigurationError when the variable is set to something else than a speed."""
    text = os.environ.get(PACE_VARIABLE, "")
    try:
        flops_per_second = float(text) if text else math.inf
    except ValueError:
        flops_per_second = math.nan
    if not flops_per_second > 0:
        raise ConfigurationError(
            f"{PACE_VARIABLE} must be a number of operations per second, not {text!r}; unset it "
            "to compute as fast as the machine can"
        )
    return Pace(flops_per_second, work_flops, clock)
