"""Sums of gradients that are simulated: digests of honest members agree.

The gradient of a microbatch is a vector of one whole number, that of the microbatch plus one.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from swarm_shared.identity.linear_digest import DigestKey, to_text
from swarm_shared.identity.work_statements import SumDigests
from swarm_shared.protocol import Close, Reduction, SumCheck


def simulated_sums(
    order: SumCheck, close: Close, microbatches_per_step: int
) -> tuple[SumDigests, ...]:
    """What every honest member states of a close whose rounds hold all microbatches of the step."""
    whole = range(microbatches_per_step)
    own = [_digests(order, one, close.committed, whole) for one in close.reductions]
    return (*own, *(_digests(order, one, (), whole) for one in close.moving))


def _digests(
    order: SumCheck, reduction: Reduction, put_in: Iterable[int], whole: Iterable[int]
) -> SumDigests:
    key = DigestKey(order.seed, reduction.part)
    stages = 2 if reduction.part == "tied" else 1

    def digest(microbatches: Iterable[int], times: int = 1) -> str:
        return to_text(key.digest(np.array([times * sum(m + 1 for m in microbatches)], np.int64)))

    return SumDigests(part=digest(put_in), result=digest(whole, stages))
