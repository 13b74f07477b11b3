"""The state of moves between stages: settings, and past decisions.

Values only; the rules are in `swarm_coordinator.core.rules.rebalancing`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.scheduling.placement import (
    MoveDecision,
    MovePolicy,
    PeerLoad,
    StageLoad,
    choose_moves,
)

KEPT_DECISIONS = 8
"""Number of decisions that `status` shows; all of them are in the run's event log."""


class RebalancingRule(StrEnum):
    """The rule by which peers are moved between stages."""

    NONE = "none"
    THROUGHPUT = "throughput"
    """Peers move where the pipeline's gain is worth the download."""


ChooseMoves = Callable[
    [Sequence[StageLoad], Sequence[PeerLoad], MovePolicy, Collection[StageIndex]], MoveDecision
]
"""A function that decides which peers move: `choose_moves`, or another one to measure."""


@dataclass(frozen=True, slots=True)
class RebalancingSettings:
    """Configuration of rebalancing."""

    rule: RebalancingRule = RebalancingRule.NONE
    policy: MovePolicy = field(default_factory=MovePolicy)
    loss_reaction_seconds: float = 2.0
    """Seconds from a loss to the decision. Peers lost together are noticed within a second or
    two."""
    choose: ChooseMoves = choose_moves


@dataclass(frozen=True, slots=True)
class DecisionNote:
    """One decision to move a peer, for `status`."""

    at: float
    peer: PeerId
    text: str


@dataclass(slots=True)
class RebalancingState:
    """Rebalancing of one run: its settings, the cost of each stage, and its history."""

    settings: RebalancingSettings
    stages: tuple[StageLoad, ...]
    due_at: float | None = None
    """When the next decision is due; None until training has begun."""
    losses_seen: int = 0
    """Number of lost stage holders at the last decision."""
    last_involved: dict[StageIndex, float] = field(default_factory=dict)
    """When each stage was last source or destination of a decided move."""
    decisions: deque[DecisionNote] = field(default_factory=lambda: deque(maxlen=KEPT_DECISIONS))
    reason: str = ""
    """Why no further peer moves, as of the last decision."""
    decided: int = 0
    made: int = 0
    dropped: int = 0
    bytes_moved: int = 0
    """Bytes of state that moving peers were instructed to download."""
