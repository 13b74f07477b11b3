"""The rounds of a step's close: which stages average together, their members, and the answers.

Values only, indexed so that finding the round of one of ten thousand peers takes constant time. The
rules are in `swarm_coordinator.core.rules.step_close` and `round_membership`. Why each stage closes
apart: docs/decisions, number 0025.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from swarm_shared.base.types import PeerId, StageIndex


class SquaredNorms(NamedTuple):
    """The squared norms of a stage's average."""

    own: float
    tied: float


@dataclass(slots=True, eq=False)
class Round:
    """One averaging round: one stage, or all stages with shared parameters or switching members."""

    attempt: int
    """Attempt number; never reused for a round that one of the members could mistake for this
    one."""
    stages: frozenset[StageIndex]
    members: dict[PeerId, StageIndex]
    began_at: float
    switching: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Members that hold another stage after this step; they average that stage too, contributing
    zero."""
    reports: dict[PeerId, SquaredNorms] = field(default_factory=dict)
    """The norms of the members that have averaged."""
    awaited: set[PeerId] = field(default_factory=set)
    """Members that have not reported yet."""
    kept: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Former members whose gradient is in the sum, by stage; their cells still count."""
    most_reported_at: dict[StageIndex, float] = field(default_factory=dict)
    """When more than half of a stage's members had averaged."""
    squares: dict[StageIndex, SquaredNorms] = field(default_factory=dict)
    """The agreed norms by stage, once all members have averaged."""
    _sizes: Counter[StageIndex] = field(default_factory=Counter)
    _reported: Counter[StageIndex] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.awaited.update(self.members)
        self._sizes.update(self.members.values())

    def record(self, peer: PeerId, squares: SquaredNorms, now: float) -> None:
        """Enter a member's report."""
        stage = self.members[peer]
        self._reported[stage] += peer not in self.reports
        self.reports[peer] = squares
        self.awaited.discard(peer)
        if 2 * self._reported[stage] > self._sizes[stage]:
            self.most_reported_at.setdefault(stage, now)

    @property
    def averaged(self) -> bool:
        return bool(self.squares)

    def completes_without(self, gone: Collection[PeerId]) -> bool:
        """Whether the round stands without the peers in `gone`.

        No other member may be outstanding, and each stage needs a remaining member that can apply
        its sum, both before and after the switching members change stage.
        """
        if not self.awaited.issubset(gone):
            return False
        staying = [(peer, stage) for peer, stage in self.members.items() if peer not in gone]
        held = {stage for _, stage in staying}
        goes_to = {self.switching.get(peer, stage) for peer, stage in staying}
        return held >= self.stages and goes_to >= self.stages


@dataclass(slots=True)
class CloseState:
    """The close of a step. Its members change only through its methods."""

    rounds: dict[StageIndex, Round] = field(default_factory=dict)
    """The round of each stage that has one; a stage without one waits for a complete table."""
    members: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Members of all rounds, with the stage that they average."""
    applied: dict[PeerId, tuple[str, float]] = field(default_factory=dict)
    """Fingerprints (digest, norm) of the members that have applied."""
    decided_at: float = 0.0
    most_applied_at: float | None = None
    """When more than half of the members had applied."""
    applied_stages: set[StageIndex] = field(default_factory=set)
    """Stages of which a member has applied."""

    def record_applied(self, peer: PeerId, fingerprint: tuple[str, float], now: float) -> None:
        """Enter a member's confirmation."""
        self.applied[peer] = fingerprint
        self.applied_stages.add(self.members[peer])
        if self.most_applied_at is None and 2 * len(self.applied) > len(self.members):
            self.most_applied_at = now

    def each_round(self) -> list[Round]:
        return list(dict.fromkeys(self.rounds.values()))

    def round_of(self, peer: PeerId) -> Round | None:
        stage = self.members.get(peer)
        return None if stage is None else self.rounds.get(stage)

    def open(self, opened: Round) -> None:
        self.rounds.update(dict.fromkeys(opened.stages, opened))
        self.members.update(opened.members)

    def discard_round(self, ended: Round) -> None:
        """Remove a round and its members."""
        for stage in ended.stages:
            del self.rounds[stage]
        for peer in ended.members:
            del self.members[peer]

    def remove_member(self, peer: PeerId) -> None:
        """Remove a member; what it has reported and its gradient in the sum stay."""
        stage = self.members.pop(peer)
        found = self.rounds[stage]
        found.kept[peer] = stage
        del found.members[peer]
        found.switching.pop(peer, None)
        found.awaited.discard(peer)

    def restore_member(self, peer: PeerId, stage: StageIndex) -> None:
        """Make a kept former member a member again; it has returned with the same average."""
        found = self.rounds[stage]
        del found.kept[peer]
        self.members[peer] = found.members[peer] = stage

    def switch_stage(self, peer: PeerId, stage: StageIndex) -> None:
        """Record that a member holds another stage of its round from now on."""
        self.members[peer] = self.rounds[stage].members[peer] = stage

    def kept_stages(self, peer: PeerId) -> frozenset[StageIndex]:
        """Stages whose round includes the peer's gradient although it is no longer a member
        there."""
        return frozenset(
            stage for stage, found in self.rounds.items() if found.kept.get(peer) == stage
        )
