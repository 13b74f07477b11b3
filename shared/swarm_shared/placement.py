"""Which stage a newcomer should take: one pure function, used by both sides.

A stage's rate is the sum of its peers' measured rates; the pipeline runs at the slowest stage
(design: placement). A newcomer therefore takes the stage with the lowest rate among those that
fit its memory. A peer that has no measurement yet counts with the mean rate of those that have.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from swarm_shared.errors import CapacityError
from swarm_shared.messages import StageRow
from swarm_shared.types import StageIndex


def most_underserved_stage(rows: Sequence[StageRow], memory_bytes: int) -> StageIndex:
    """The stage whose service is thinnest relative to its work, among those that fit.

    Stages without any peer come first, then fewer peers per unit of work; ties go to the
    earlier stage. Raises CapacityError when no stage fits `memory_bytes`.
    """
    fitting = [row for row in rows if row.memory_bytes <= memory_bytes]
    if not fitting:
        needed = min(row.memory_bytes for row in rows)
        raise CapacityError(
            f"this machine offers {_gib(memory_bytes)} of memory and the smallest stage of the run "
            f"needs {_gib(needed)}; free memory, choose another device, or ask the organiser for "
            "more and smaller stages"
        )
    mean_work = sum(row.work_flops for row in rows) / len(rows) or 1.0

    def service(row: StageRow) -> tuple[float, StageIndex]:
        relative_work = row.work_flops / mean_work if row.work_flops else 1.0
        return row.peers / relative_work, row.stage

    return min(fitting, key=service).stage


def covered(rows: Iterable[StageRow]) -> bool:
    """Whether every stage has at least one peer."""
    return all(row.peers > 0 for row in rows)


def _gib(count_bytes: int) -> str:
    return f"{count_bytes / 2**30:.2f} GiB"
