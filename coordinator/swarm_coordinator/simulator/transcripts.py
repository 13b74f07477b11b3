"""What honest peers state of simulated work: transcripts that fit each other, sums that agree.

The gradient of a microbatch is a vector of one whole number. All have about the same size, so that
no part of a member is outsized (docs/decisions, number 0058).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import numpy as np

from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.identity import norm_sketch
from swarm_shared.identity.linear_digest import DigestKey, to_text
from swarm_shared.identity.work_statements import SumDigests
from swarm_shared.protocol import Close, Reduction, SumCheck

_SIZE: Final = 2**20
"""The gradient of microbatch 0; that of each further one is larger by one."""


def simulated_transcript(
    step: Step, microbatch: MicrobatchIndex, stage: StageIndex, last_stage: StageIndex,
    variant: int = 0, drawn: SampledTokens | None = None,
) -> Transcript:  # fmt: skip
    """The transcript that every honest peer gives of a microbatch in a stage.

    `variant` numbers other gradients, as a peer signs that has not computed this one. `drawn`: the
    digests of the token ids at both ends of the pipeline, where a coordinator compares them.
    """
    tokens, targets = ("", "") if drawn is None else (drawn.tokens, drawn.targets)
    return Transcript(
        input=tokens if stage == 0 and tokens else _digest(0, step, microbatch, stage),
        output=targets
        if stage == last_stage and targets
        else _digest(0, step, microbatch, stage + 1),
        output_gradient="" if stage == last_stage else _digest(1, step, microbatch, stage + 1),
        input_gradient="" if stage == 0 else _digest(1, step, microbatch, stage),
        gradient=_digest(2 + variant, step, microbatch, stage),
    )


def _digest(kind: int, step: int, microbatch: int, boundary: int) -> str:
    return f"{kind:04x}{step:012x}{microbatch:08x}{boundary:08x}"


def simulated_sums(
    order: SumCheck, close: Close, microbatches_per_step: int
) -> tuple[SumDigests, ...]:
    """What every honest member states of a close whose rounds hold all microbatches of the step."""
    whole = range(microbatches_per_step)
    own = [_sum_digests(order, one, close.committed, whole) for one in close.reductions]
    return (*own, *(_sum_digests(order, one, (), whole) for one in close.moving))


def _sum_digests(
    order: SumCheck, reduction: Reduction, put_in: Iterable[int], whole: Iterable[int]
) -> SumDigests:
    stages = 2 if reduction.part == "tied" else 1
    vectors = [
        np.array([times * sum(_SIZE + m for m in microbatches)], np.int64)
        for microbatches, times in ((put_in, 1), (whole, stages))
    ]
    part, result = map(to_text, DigestKey(order.seed, reduction.part).digests(vectors))
    part_sketch, result_sketch = map(
        norm_sketch.to_text, norm_sketch.Sketcher(order.seed, reduction.part).sketches(vectors)
    )
    return SumDigests(
        part=part, result=result, part_sketch=part_sketch, result_sketch=result_sketch
    )
