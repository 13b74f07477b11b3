"""The cores that this process may use."""

from __future__ import annotations

import os
from pathlib import Path

from swarm_shared.host.control_groups import OF_THIS_PROCESS, core_limits


def usable_cores(process: Path = OF_THIS_PROCESS) -> int:
    """Return how many cores this process may be busy on at once; at least 1.

    More threads than a control group's quota allows stop together, for the rest of each period,
    once it is used up.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, int(min([float(allowed or 1), *core_limits(process)])))
