"""Transcripts of microbatches that are simulated: those of honest peers fit each other."""

from __future__ import annotations

from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step


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
