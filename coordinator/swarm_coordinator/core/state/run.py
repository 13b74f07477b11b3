"""The coordinator's state of a run, as data.

Owned and changed by `swarm_coordinator.core.transition` alone; the shell only reads it. Durable
facts are in the store; the rest is rebuilt from the clients when they re-attach (design:
durability).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from swarm_coordinator.core.events import Broadcast, Command, Note, Persist, Send, StandingsRecord
from swarm_coordinator.core.state.checkpoints import CheckpointState
from swarm_coordinator.core.state.held_time import HeldTime
from swarm_coordinator.core.state.history import RunHistory
from swarm_coordinator.core.state.moves import RebalancingState
from swarm_coordinator.core.state.peer_table import PeerTable
from swarm_coordinator.core.state.peers import PeerState, display
from swarm_coordinator.core.state.phases import ALLOWED, RunPhase
from swarm_coordinator.core.state.roster import RosterState
from swarm_coordinator.core.state.statistics import RunStatistics
from swarm_coordinator.core.state.steps import StepsInProgress
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust.audits import AuditBook
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.protocol import CoordinatorMessage, PeerRecord
from swarm_shared.run.manifest import Manifest


@dataclass(slots=True)
class CoordinatorStart:
    """One start of the coordinator."""

    generation: int
    at: float
    record: PeerRecord
    """How clients reach the coordinator as a source of checkpoints; the record's stage is
    unused."""
    manifest_envelope: str


@dataclass(slots=True)
class RunState:
    """All state of a run; see the module docstring for its owner."""

    manifest: Manifest
    start: CoordinatorStart
    history: RunHistory
    peers: PeerTable
    roster: RosterState
    steps: StepsInProgress
    checkpoints: CheckpointState
    rebalancing: RebalancingState
    statistics: RunStatistics
    audits: AuditBook
    held_time: HeldTime
    phase: RunPhase = RunPhase.WAITING
    """FINISHED at the start of a coordinator whose run has finished; afterwards assigned by
    `enter_phase` alone."""
    waiting_reason: str = ""
    """What the run waits for in WAITING, for people."""
    stop_requested_at: float | None = None
    commands: list[Command] = field(default_factory=list)
    """Output of the event that is being handled."""

    def send(self, peer: PeerId, message: CoordinatorMessage) -> None:
        """Queue a message to one peer."""
        self.commands.append(Send(peer, message))

    def broadcast(self, peers: Collection[PeerId], message: CoordinatorMessage) -> None:
        """Queue one message to several peers; none is queued without peers."""
        if peers:
            self.commands.append(Broadcast(tuple(peers), message))

    def note(self, text: str, peer: PeerId | None = None) -> None:
        """Queue a line for the run's event log."""
        self.commands.append(Note(text, peer))

    def flag(self, peer: PeerState, kind: Rejection, reason: str) -> None:
        """Count a rejection against a peer, and note it."""
        self.statistics.flag(peer.peer, kind, reason)
        self.note(f"{display(peer)} is flagged: {reason}", peer.peer)

    def persist_standings(self) -> None:
        """Store the standings of owners that have changed."""
        if standings := self.audits.standings.take_changed():
            self.commands.append(Persist(StandingsRecord(standings)))

    def hold(self, peer: PeerState, stage: StageIndex, version: Version) -> None:
        """Let a peer hold a stage. Until the peer has measured its rate at that stage, the rate
        follows from measurements at other stages."""
        expected = peer.rates.expected_at(self.rebalancing.stages[stage])
        if expected > 0:
            peer.rates.microbatches_per_second = expected
        if peer.stage != stage:
            peer.rates.reported_microbatches_per_second = 0.0
        self.peers.hold(peer, stage, version)

    @property
    def last_stage(self) -> StageIndex:
        return StageIndex(self.manifest.stage_count - 1)

    @property
    def stage_indices(self) -> tuple[StageIndex, ...]:
        return self.peers.stages

    @property
    def checks_sums(self) -> bool:
        """Whether the sums of a close are checked: only the exact codec has exact sums."""
        return self.audits.settings.check_sums and self.manifest.codecs.average == "exact"

    def tied_stages(self) -> frozenset[StageIndex]:
        """The first and the last stage of a model with tied embeddings, which average them
        together; empty for any other model."""
        ends = frozenset((StageIndex(0), self.last_stage))
        tied = self.manifest.model.trains_tied_table and len(ends) > 1
        return ends if tied else frozenset()

    def averaged_parts(self, stage: StageIndex) -> int:
        """In how many parts a stage's gradient is averaged: its own and, at the ends of a tied
        model, the tied one."""
        return 1 + (stage in self.tied_stages())


def enter_phase(run: RunState, phase: RunPhase) -> None:
    """Enter a phase, as `ALLOWED` permits. With WAITING the current step ends."""
    if phase not in ALLOWED[run.phase]:
        raise ValueError(f"a run does not go from {run.phase.name} to {phase.name}")
    run.phase, run.waiting_reason = phase, ""
    if phase is RunPhase.WAITING:
        run.steps.current = None
        run.peers.readmit_all()
