"""The stage that a joining peer takes: one pure function, used by coordinator and client.

The pipeline runs at its slowest stage (design: placement), so a joining peer takes the slowest
stage among those that fit its memory. Until rates are known, peers are counted per unit of work.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swarm_shared.base.errors import CapacityError
from swarm_shared.base.text import memory_text
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import StageRow


def most_underserved_stage(rows: Sequence[StageRow], memory_bytes: int) -> StageIndex:
    """Return the stage with the least service relative to its work, among those that fit.

    Stages without any peer come first, then the smallest rate if every stage with peers has one,
    and fewer peers per unit of work otherwise; ties go to the earlier stage. Raises CapacityError
    when no stage fits `memory_bytes`.
    """
    if not rows:
        raise CapacityError("the run names no stage to take; ask the organiser to look at it")
    fitting = [row for row in rows if row.memory_bytes <= memory_bytes]
    if not fitting:
        needed = min(row.memory_bytes for row in rows)
        raise CapacityError(
            f"this machine offers {memory_text(memory_bytes)} of memory and the smallest stage "
            f"that it may take needs {memory_text(needed)}; free memory, choose another device, "
            "or ask the organiser for more and smaller stages"
        )
    # Divided before the sum: the rows may come from the network, and must not overflow.
    mean_work = math.fsum(row.work_flops / len(rows) for row in rows) or 1.0

    measured = all(row.microbatches_per_second > 0 for row in rows if row.peers > 0)

    def service(row: StageRow) -> tuple[float, float, StageIndex]:
        rate = row.microbatches_per_second if measured and row.peers > 0 else 0.0
        return rate, row.peers / (row.work_flops or mean_work), row.stage

    return min(fitting, key=service).stage
