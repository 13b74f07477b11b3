"""A process that computes slower than its machine could, for measurements on one machine.

Off unless the environment sets a speed. A computation that ends sooner waits for the rest of its
time, so that machines of different speeds can be compared on shared cores. Results are unchanged.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable

from swarm_shared.base.errors import ConfigurationError

PACE_VARIABLE = "SWARM_PACE_FLOPS"
"""Environment variable: most floating-point operations per second."""


class Pace:
    def __init__(
        self,
        flops_per_second: float,
        work_flops: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._seconds = work_flops / flops_per_second
        """Seconds of a microbatch in this stage, forward and backward."""
        self._clock = clock
        self._sleep = sleep

    def keep(self, started: float, share: float) -> None:
        """Wait until this share of a microbatch's work, begun at `started`, may be done."""
        left = started + share * self._seconds - self._clock()
        if left > 0:
            self._sleep(left)


def pace_from_environment(work_flops: float, clock: Callable[[], float]) -> Pace:
    """The pace that the environment sets. ConfigurationError if the variable is not a speed."""
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
