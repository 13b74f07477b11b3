"""The token ids of each microbatch, as the sampler draws them: a pure function of the manifest."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarm_shared.base.types import MicrobatchIndex, Step


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Digests of a microbatch's token ids and targets, as they cross the wire."""

    tokens: str
    targets: str


TrainingTokens = Callable[[Step, MicrobatchIndex], SampledTokens]
