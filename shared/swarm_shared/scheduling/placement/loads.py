"""Stages and peers as the numbers that placement uses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swarm_shared.base.memory import MemoryOffer, StageMemory
from swarm_shared.base.types import PeerId, StageIndex


@dataclass(frozen=True, slots=True)
class StageLoad:
    """The cost of holding one stage."""

    stage: StageIndex
    work_flops: float
    """FLOPs of one microbatch, forward and backward; more than 0."""
    memory: StageMemory
    state_bytes: int
    """Bytes a peer downloads to take the stage."""
    sent_bytes: int = 0
    """Bytes a peer of the stage sends for one microbatch: activation and gradient."""
    frozen_bytes: int = 0
    """The part of `state_bytes` that frozen parameters take, which are in no snapshot."""


@dataclass(frozen=True, slots=True)
class PeerLoad:
    """One peer, counted at the stage that it holds or is about to hold."""

    peer: PeerId
    stage: StageIndex
    flops_per_second: float
    """Measured rate of computing microbatches times the work of its stage."""
    memory: MemoryOffer
    download_bytes_per_second: float
    """Expected rate of a download; more than 0."""
    may_move: bool = True
    queued: int = 0
    """Microbatches at the peer now; only SWARM's rule uses it."""
    up_bytes_per_second: float = math.inf
    """Estimated rate of its uplink; infinite while the uplink has not limited sending."""

    def rate_at(self, stage: StageLoad) -> float:
        """Return the microbatches per second that it adds to a stage: computing and sending
        overlap."""
        return min(
            self.flops_per_second / stage.work_flops,
            self.up_bytes_per_second / stage.sent_bytes if stage.sent_bytes else math.inf,
        )

    def speed_at(self, stage: StageLoad) -> float:
        """Return the operations per second that it adds to a stage, comparable between stages."""
        return self.rate_at(stage) * stage.work_flops

    def download_seconds(self, stage: StageLoad) -> float:
        """Return the expected seconds in which the peer downloads a stage's state."""
        return stage.state_bytes / self.download_bytes_per_second


def stage_rates(stages: Sequence[StageLoad], peers: Sequence[PeerLoad]) -> list[float]:
    """Return the microbatches per second of each stage: the sum of its peers' rates.

    The pipeline runs at the smallest of them. `stages` are in order, one for each index.
    """
    speeds = [0.0] * len(stages)
    for peer in peers:
        speeds[peer.stage] += peer.speed_at(stages[peer.stage])
    return [total / stage.work_flops for total, stage in zip(speeds, stages, strict=True)]
