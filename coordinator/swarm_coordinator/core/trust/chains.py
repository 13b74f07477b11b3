"""Chains: the transcripts of one microbatch must fit each other from stage to stage.

Pure functions. Both ends of a boundary sign digests of the same bytes: what one stage returned is
what the next one received, and the gradient that came back to one is what the other returned. So a
lie in a receipt is local to one peer's way from its input to its output, which an audit checks.
"""

from __future__ import annotations

from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import StageIndex

Boundary = tuple[StageIndex, StageIndex]
"""Two neighbouring stages."""


def fits(earlier: Transcript, later: Transcript) -> bool:
    """Whether the transcripts of two neighbouring stages agree on their boundary."""
    return earlier.output == later.input and earlier.output_gradient == later.input_gradient


def complete(transcript: Transcript, *, first: bool, last: bool) -> bool:
    """Whether a transcript has the digests of a first, middle or last stage, and no others."""
    return (transcript.input_gradient == "") == first and (transcript.output_gradient == "") == last


def breaks_at(
    stage: StageIndex, own: Transcript, before: Transcript | None, behind: Transcript | None
) -> tuple[Boundary, ...]:
    """The boundaries at which a stage's transcript does not fit a neighbour's, `before` or `behind`
    it. A neighbour that is not known fits."""
    broken: list[Boundary] = []
    if before is not None and not fits(before, own):
        broken.append((StageIndex(stage - 1), stage))
    if behind is not None and not fits(own, behind):
        broken.append((stage, StageIndex(stage + 1)))
    return tuple(broken)
