"""What the coordinator knows of moves: who is on the way to another stage, and what was decided.

Values only; the rules are `rebalancing`'s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum

from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.scheduling.placement import MovePolicy, StageLoad

KEPT_DECISIONS = 8
"""Shown by `status`; all of them are in the run's notes."""

NO_VERSION = Version(0)


class RebalancingRule(StrEnum):
    """By what peers are moved between stages."""

    NONE = "none"
    THROUGHPUT = "throughput"
    """Ours: what the pipeline gains must be worth the download."""
    SWARM = "swarm"
    """SWARM's rule of queue lengths, to compare with."""


@dataclass(frozen=True, slots=True)
class RebalancingSettings:
    rule: RebalancingRule = RebalancingRule.NONE
    policy: MovePolicy = field(default_factory=MovePolicy)
    assumed_download_bytes_per_second: float = 6.25e6
    """Of a peer that has not downloaded anything yet: 50 Mbit/s."""


@dataclass(slots=True)
class StageMove:
    """A peer's way to another stage; several fields are those of a newcomer's way to its own."""

    stage: StageIndex
    """Where it goes."""
    release_first: bool
    """It cannot hold both, so that it gives the old one up between two steps and then downloads."""
    begun_at: float
    partner: PeerId | None = None
    """Who goes the other way, in the same close."""
    version: Version = NO_VERSION
    """Of the state that it was told to get."""
    source_assigned: bool = False
    ask_not_before: float = 0.0
    close_delayed_until: float = 0.0
    close_delays: int = 0
    asked_at: float = 0.0
    ready: bool = False
    """It holds the new stage at `version`, beside the old one that it serves."""


@dataclass(frozen=True, slots=True)
class DecisionNote:
    at: float
    peer: PeerId
    text: str


@dataclass(slots=True)
class RebalancingState:
    settings: RebalancingSettings
    stages: tuple[StageLoad, ...]
    due_at: float | None = None
    """None until training has begun."""
    losses_seen: int = 0
    """How many peers had been lost when that was last thought about."""
    last_involved: dict[StageIndex, float] = field(default_factory=dict)
    """When each stage was last part of a decision to move somebody."""
    decisions: deque[DecisionNote] = field(default_factory=lambda: deque(maxlen=KEPT_DECISIONS))
    reason: str = ""
    """Why nobody (else) moves, as of the last decision."""
    decided: int = 0
    made: int = 0
    dropped: int = 0
    bytes_moved: int = 0
    """State that movers were told to download."""
