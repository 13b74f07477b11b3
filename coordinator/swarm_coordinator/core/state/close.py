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

from swarm_coordinator.core.trust.sums import RoundSums
from swarm_shared.base.types import PeerId, StageIndex


class SquaredNorms(NamedTuple):
    """The squared norms of a stage's average."""

    own: float
    tied: float


@dataclass(slots=True)
class Turnout:
    """Counts which of the voting owners have answered, each with more than half of its devices."""

    devices: Counter[PeerId] = field(default_factory=Counter)
    """Number of members by owner."""
    answers: Counter[PeerId] = field(default_factory=Counter)
    """Number of members that have answered, by owner."""
    done: set[PeerId] = field(default_factory=set)
    """Owners of whose members more than half have answered."""

    def note_answer(self, owner: PeerId) -> None:
        """Count the first answer of one of the owner's members."""
        if owner in self.devices:
            self.answers[owner] += 1
            if 2 * self.answers[owner] > self.devices[owner]:
                self.done.add(owner)

    def remove(self, owner: PeerId, *, has_answered: bool) -> None:
        """Remove a member."""
        if owner in self.devices:
            self.devices[owner] -= 1
            self.answers[owner] -= has_answered
            if not self.devices[owner]:
                del self.devices[owner], self.answers[owner]
                self.done.discard(owner)

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the owners have answered."""
        return 2 * len(self.done) > len(self.devices)


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
    sums: RoundSums | None = None
    """The check of the sums before the round stands; None if there is none."""
    owners: dict[PeerId, PeerId] = field(default_factory=dict)
    """The owner of each member, also of those that have left since."""
    voters: dict[StageIndex, frozenset[PeerId]] = field(default_factory=dict)
    """The owners of each stage that decide when most have answered."""
    reports: dict[PeerId, SquaredNorms] = field(default_factory=dict)
    """The norms of the members that have averaged."""
    awaited: set[PeerId] = field(default_factory=set)
    """Members that have not answered the latest request, a close or a check of sums."""
    answered: set[PeerId] = field(default_factory=set)
    """Members that have answered the latest request."""
    asked_at: float = 0.0
    """When the latest request was sent."""
    kept: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Former members whose gradient is in the sum, by stage; their cells still count."""
    most_reported_at: dict[StageIndex, float] = field(default_factory=dict)
    """When most members of more than half of a stage's owners had answered."""
    squares: dict[StageIndex, SquaredNorms] = field(default_factory=dict)
    """The agreed norms by stage, once all members have averaged."""
    averaged_at: float = 0.0
    """When the norms in `squares` were agreed."""
    _turnouts: dict[StageIndex, Turnout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._begin_turnout()
        self.asked_at = self.began_at

    def _begin_turnout(self) -> None:
        """Await an answer of every member."""
        self.awaited.update(self.members)
        devices: dict[StageIndex, list[PeerId]] = {stage: [] for stage in self.stages}
        for peer, stage in self.members.items():
            devices[stage].append(self.owners[peer])
        for stage, owners in devices.items():
            voters = self.voters[stage]
            self._turnouts[stage] = Turnout(Counter([o for o in owners if o in voters]))

    def turnout(self, stage: StageIndex) -> Turnout:
        """The turnout of a stage of the round."""
        return self._turnouts[stage]

    def record(self, peer: PeerId, squares: SquaredNorms, now: float) -> None:
        """Enter a member's report."""
        self.reports[peer] = squares
        self.answer(peer, now)

    def answer(self, peer: PeerId, now: float) -> None:
        """Record that a member has answered."""
        stage = self.members[peer]
        turnout = self._turnouts[stage]
        if peer not in self.answered:
            turnout.note_answer(self.owners[peer])
        self.answered.add(peer)
        self.awaited.discard(peer)
        if turnout.has_majority:
            self.most_reported_at.setdefault(stage, now)

    def ask_again(self, now: float) -> None:
        """Await an answer of every member once more."""
        self.answered.clear()
        self.most_reported_at.clear()
        self._begin_turnout()
        self.asked_at = now

    @property
    def unchecked(self) -> bool:
        """Whether the round needs a check of its sums that has not ended."""
        return self.sums is not None and not self.sums.agreed

    @property
    def averaged(self) -> bool:
        """Whether the norms of all stages of the round are agreed."""
        return bool(self.squares)

    def completes_without(self, gone: Collection[PeerId]) -> bool:
        """Whether the round stands without the peers in `gone`.

        No other member may be outstanding, and each stage needs a remaining member that can apply
        its sum, both before and after the switching members change stage. A check of sums needs a
        statement of every member.
        """
        if self.unchecked:
            return False
        if not self.awaited.issubset(gone):
            return False
        staying = [(peer, stage) for peer, stage in self.members.items() if peer not in gone]
        held = {stage for _, stage in staying}
        goes_to = {self.switching.get(peer, stage) for peer, stage in staying}
        return held >= self.stages and goes_to >= self.stages


@dataclass(slots=True)
class CloseState:
    """The close of a step. The members change only through the methods of this class."""

    rounds: dict[StageIndex, Round] = field(default_factory=dict)
    """The round of each stage that has one."""
    members: dict[PeerId, StageIndex] = field(default_factory=dict)
    """Members of all rounds, with the stage that they average."""
    applied: dict[PeerId, tuple[str, float]] = field(default_factory=dict)
    """Fingerprints (digest, norm) of the members that have applied."""
    decided_at: float = 0.0
    """When the step was decided and the Apply sent."""
    most_applied_at: float | None = None
    """When most members of more than half of the voting owners had applied the step."""
    last_applied_at: dict[StageIndex, float] = field(default_factory=dict)
    """When a member of each stage has last confirmed that it has applied the step."""
    _turnout: Turnout = field(default_factory=Turnout)

    def record_applied(self, peer: PeerId, fingerprint: tuple[str, float], now: float) -> None:
        """Enter a member's confirmation."""
        stage = self.members[peer]
        if peer not in self.applied:
            self._turnout.note_answer(self.rounds[stage].owners[peer])
        self.applied[peer] = fingerprint
        self.last_applied_at[stage] = now
        if self.most_applied_at is None and self._turnout.has_majority:
            self.most_applied_at = now

    def each_round(self) -> list[Round]:
        """The rounds, each one once."""
        return list(dict.fromkeys(self.rounds.values()))

    def round_of(self, peer: PeerId) -> Round | None:
        """The round of which a peer is a member."""
        stage = self.members.get(peer)
        return None if stage is None else self.rounds.get(stage)

    def open(self, round_: Round) -> None:
        """Add an opened round and its members."""
        self.rounds.update(dict.fromkeys(round_.stages, round_))
        self.members.update(round_.members)
        for stage in round_.stages:
            self._turnout.devices.update(round_.turnout(stage).devices)

    def _discount(self, round_: Round, peer: PeerId) -> None:
        self._turnout.remove(round_.owners[peer], has_answered=peer in self.applied)

    def discard_round(self, round_: Round) -> None:
        """Remove a round and its members."""
        for stage in round_.stages:
            del self.rounds[stage]
        for peer in round_.members:
            del self.members[peer]
            self._discount(round_, peer)

    def remove_member(self, peer: PeerId) -> None:
        """Remove a member from its round; its report and its gradient in the sum stay."""
        stage = self.members.pop(peer)
        round_ = self.rounds[stage]
        self._discount(round_, peer)
        round_.kept[peer] = stage
        del round_.members[peer]
        round_.switching.pop(peer, None)
        round_.awaited.discard(peer)

    def restore_member(self, peer: PeerId, stage: StageIndex) -> None:
        """Make a kept former member a member again; it has returned with the same average."""
        round_ = self.rounds[stage]
        del round_.kept[peer]
        if round_.owners[peer] in round_.voters[stage]:
            self._turnout.devices[round_.owners[peer]] += 1
        self.members[peer] = round_.members[peer] = stage

    def switch_stage(self, peer: PeerId, stage: StageIndex) -> None:
        """Record that a member holds another stage of its round from now on."""
        self.members[peer] = self.rounds[stage].members[peer] = stage

    def kept_stages(self, peer: PeerId) -> frozenset[StageIndex]:
        """Stages whose round includes the peer's gradient although it is no longer a member
        there."""
        return frozenset(
            stage for stage, round_ in self.rounds.items() if round_.kept.get(peer) == stage
        )
