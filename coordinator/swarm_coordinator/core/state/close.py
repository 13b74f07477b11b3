"""The rounds of a step's close: which stages average together, who takes part, who has answered.

Values only, kept so that it takes no time to find the round of one of ten thousand peers; the rules
are in `rounds` and `closing`. Why stages close apart: docs/decisions, number 0025.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm_shared.base.types import PeerId, StageIndex


@dataclass(slots=True, eq=False)
class Round:
    """Stages that average together: one alone, or all between which something is shared."""

    attempt: int
    """Never used for another round that any of its members could take for this one."""
    stages: frozenset[StageIndex]
    members: dict[PeerId, StageIndex]
    began_at: float
    switching: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Members that hold another stage after this step: they average it too, adding nothing."""
    reports: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """Squared norms (own part, tied part) of those that have averaged."""
    awaited: set[PeerId] = field(default_factory=set)
    """Members that have not reported yet."""
    kept: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Who is no member any more and whose part is in the sum: its cells count."""
    squares: dict[StageIndex, tuple[float, float]] = field(default_factory=dict)
    """Of each stage, when all members have averaged and agree."""

    def __post_init__(self) -> None:
        self.awaited.update(self.members)

    @property
    def averaged(self) -> bool:
        return bool(self.squares)

    def completes_without(self, gone: Collection[PeerId]) -> bool:
        """Whether the sums are complete if these are not waited for, and each stage has somebody
        who can apply its own: now, and after those that switch have done so."""
        if not self.awaited.issubset(gone):
            return False
        staying = [(peer, stage) for peer, stage in self.members.items() if peer not in gone]
        held = {stage for _, stage in staying}
        goes_to = {self.switching.get(peer, stage) for peer, stage in staying}
        return held >= self.stages and goes_to >= self.stages


@dataclass(slots=True)
class CloseState:
    """What of a step is being closed. Only its methods change who is in it."""

    rounds: dict[StageIndex, Round] = field(default_factory=dict)
    """By each stage that has one. Without one it waits for the table to be complete again."""
    members: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Of all rounds."""
    applied: dict[PeerId, tuple[str, float]] = field(default_factory=dict)
    """Fingerprints of those that have applied."""
    decided_at: float = 0.0

    def each_round(self) -> list[Round]:
        return list(dict.fromkeys(self.rounds.values()))

    def round_of(self, peer: PeerId) -> Round | None:
        stage = self.members.get(peer)
        return None if stage is None else self.rounds.get(stage)

    def open(self, opened: Round) -> None:
        self.rounds.update(dict.fromkeys(opened.stages, opened))
        self.members.update(opened.members)

    def discard_round(self, ended: Round) -> None:
        for stage in ended.stages:
            del self.rounds[stage]
        for peer in ended.members:
            del self.members[peer]

    def remove_member(self, peer: PeerId) -> None:
        """It is no member any more; what it has reported stays."""
        found = self.round_of(peer)
        del self.members[peer]
        if found is not None:
            found.members.pop(peer, None)
            found.switching.pop(peer, None)
            found.awaited.discard(peer)

    def restore_member(self, peer: PeerId, stage: StageIndex) -> None:
        """One whose part was kept has come back with the same average."""
        found = self.rounds[stage]
        del found.kept[peer]
        self.members[peer] = found.members[peer] = stage

    def switch_stage(self, peer: PeerId, stage: StageIndex) -> None:
        """It holds another stage of its round from now on."""
        found = self.round_of(peer)
        assert found is not None
        self.members[peer] = found.members[peer] = stage

    def kept_stages(self, peer: PeerId) -> frozenset[StageIndex]:
        """Where its cells count although it is no member, or one at another stage now."""
        return frozenset(
            stage for stage, found in self.rounds.items() if found.kept.get(peer) == stage
        )
