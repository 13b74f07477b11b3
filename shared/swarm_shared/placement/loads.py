"""Stages and peers as the numbers that placement looks at."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm_shared.types import PeerId, StageIndex


@dataclass(frozen=True, slots=True)
class StageLoad:
    """What it takes to hold one stage."""

    stage: StageIndex
    work_flops: float
    """Of one microbatch, forward and backward; more than 0."""
    memory_bytes: int
    state_bytes: int
    """What somebody who takes the stage has to download."""


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One peer, counted at the stage that it holds or is on its way to."""

    peer: PeerId
    stage: StageIndex
    flops_per_second: float
    """Its measured rate times the work of its stage; at another one it has this over that work."""
    memory_bytes: int
    download_bytes_per_second: float
    """More than 0."""
    may_move: bool = True
    queued: int = 0
    """Microbatches that it holds now; only SWARM's rule looks at it."""

    def rate_at(self, stage: StageLoad) -> float:
        """Microbatches per second that it adds to a stage."""
        return self.flops_per_second / stage.work_flops

    def download_seconds(self, stage: StageLoad) -> float:
        return stage.state_bytes / self.download_bytes_per_second


def stage_rates(stages: Sequence[StageLoad], peers: Sequence[PeerLoad]) -> list[float]:
    """Microbatches per second of each stage: the sum of its peers' rates.

    The pipeline runs at the smallest of them. `stages` are in order, one for each index.
    """
    flops = [0.0] * len(stages)
    for peer in peers:
        flops[peer.stage] += peer.flops_per_second
    return [total / stage.work_flops for total, stage in zip(flops, stages, strict=True)]
