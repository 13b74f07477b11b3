"""The stage that a joining peer takes: one pure function, used by coordinator and client.

The pipeline runs at its slowest stage (design: placement), so a joining peer takes the slowest
stage among those that fit its memory. Until rates are known, peers are counted per unit of work.
Stages in the middle send twice as much as the ends, so a peer with a slow uplink takes an end where
the stages are about equally slow.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from swarm_shared.base.errors import CapacityError
from swarm_shared.base.memory import MemoryOffer, StreamedWork
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import StageRow

NEARLY_EQUAL = 1.05
"""Largest quotient of two stages' rates that are about equal: one peer among twenty."""


def most_underserved_stage(
    rows: Sequence[StageRow],
    memory: MemoryOffer,
    work: StreamedWork,
    up_bytes_per_second: float = 0.0,
    allowed: Collection[StageIndex] | None = None,
) -> StageIndex:
    """Return the stage with the least service relative to its work, among those that fit and are
    `allowed` (all by default). `rows` are those of all stages, `work` is that of their layers.

    Stages without any peer come first, then the smallest rate if every stage with peers has one,
    and fewer peers per unit of work otherwise; ties go to the earlier stage. Raises CapacityError
    when no stage fits `memory`.

    `up_bytes_per_second` is the peer's uplink, 0 while unknown. Where rates are known, the peer
    takes, among stages about as slow as the slowest, the one of whose work it does most, which its
    uplink or its computing bounds; it computes more slowly where its memory is short.
    """
    possible = [row for row in rows if allowed is None or row.stage in allowed]
    if not possible:
        raise CapacityError("the run names no stage to take; ask the organiser to look at it")
    fitting = [row for row in possible if memory.holds(row.memory)]
    if not fitting:
        smallest = min((row.memory for row in possible), key=lambda need: need.device_bytes)
        raise CapacityError(
            f"this machine offers {memory} and the smallest stage that it may take needs "
            f"{smallest}; free memory, choose another device, or ask the organiser for more and "
            "smaller stages"
        )
    # Divided before the sum: the rows may come from the network, and must not overflow.
    mean_work = math.fsum(row.work_flops / len(rows) for row in rows) or 1.0

    measured = all(row.microbatches_per_second > 0 for row in rows if row.peers > 0)

    def service(row: StageRow) -> tuple[float, float, StageIndex]:
        rate = row.microbatches_per_second if measured and row.peers > 0 else 0.0
        return rate, row.peers / (row.work_flops or mean_work), row.stage

    slowest = min(fitting, key=service)
    peers = sum(row.peers for row in rows)
    if not (measured and peers):
        return slowest.stage
    computed = math.fsum(row.microbatches_per_second * row.work_flops for row in rows) / peers

    def flops_per_second(row: StageRow) -> float:
        up = up_bytes_per_second or math.inf
        sent = up / row.sent_bytes if row.sent_bytes else math.inf
        return min(computed * memory.speed(row.memory, work), sent * (row.work_flops or mean_work))

    threshold = NEARLY_EQUAL * service(slowest)[0]
    near = [row for row in fitting if service(row)[0] <= threshold]
    return min(near, key=lambda row: (-flops_per_second(row), service(row))).stage
