"""The coordinator's state of a run, as data.

Owned and changed by `swarm_coordinator.core.transition` alone; the shell only reads it, through
`swarm_coordinator.core.rules.status_view`. Durable facts are in the store; the rest is rebuilt from
the clients when they re-attach (design: durability).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from swarm_coordinator.core.events import (
    AppliedStep,
    Broadcast,
    CheckpointRecord,
    Command,
    Note,
    Send,
    SessionNumber,
)
from swarm_coordinator.core.state.close import CloseState, Round
from swarm_coordinator.core.state.leases import LeaseBook, LeaseState
from swarm_coordinator.core.state.moves import RebalancingState, StageMove
from swarm_coordinator.core.state.peers import (
    PeerPhase,
    PeerState,
    PeerTable,
    StageCapacity,
    rates_alike,
)
from swarm_coordinator.core.state.step_table import Cell, CellKey, StepTable
from swarm_coordinator.core.state.utilisation import Rejection, UtilisationStats
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.protocol import CoordinatorMessage, PeerRecord, Roster, StageRow
from swarm_shared.run.manifest import Manifest

INITIAL = Version(0)


MAX_FLAGGED_PEERS = 10_000
"""Number of peers whose suspicion flags are kept; the oldest are dropped first."""


class RunPhase(StrEnum):
    """The phase of the current step (design: the life of a step)."""

    WAITING = "waiting for peers"
    COLLECT = "collecting"
    CLOSING = "closing"
    APPLYING = "applying"
    EVALUATING = "evaluating"
    STOPPING = "stopping"
    FINISHED = "finished"


@dataclass(slots=True)
class StepState:
    """One step in progress: its table, leases and close."""

    step: Step
    began_at: float
    previous_applied_at: float
    """When the previous step was applied. Work done ahead of that does not count in the step's
    duration."""
    attempt: int = 0
    """Number of the latest attempt to close; never reused by another step or generation."""
    attempts: dict[StageIndex, int] = field(default_factory=dict)
    """Number of the latest attempt of each stage."""
    closes: int = 0
    timeouts: int = 0
    failure_counts: dict[PeerId, int] = field(default_factory=dict)
    """Failed attempts of this step attributed to each peer."""
    carrier_failures: int = 0
    """Attempts of this step that failed through a carrier and were attributed to no peer."""
    excluded: set[PeerId] = field(default_factory=set)
    """Peers that kept the step from closing: they take no further part in it and are synced after
    it."""
    table: StepTable = field(default_factory=StepTable)
    leases: LeaseBook = field(default_factory=LeaseBook)
    speculative_leases: dict[MicrobatchIndex, LeaseState] = field(default_factory=dict)
    """Second leases of microbatches that lag at the end of the step (`core.rules.speculation`)."""
    duplicates: set[tuple[CellKey, PeerId]] = field(default_factory=set)
    """Cells counted by a second peer besides the one that the table names."""
    mostly_done_at: float | None = None
    """When most of the table was first filled."""
    speculation_not_before: float = 0.0
    unsettled: set[MicrobatchIndex] = field(default_factory=set)
    """Microbatches that may have to be leased; all others are done or being driven."""
    lease_alarms: list[tuple[float, MicrobatchIndex]] = field(default_factory=list)
    """A heap of the times at which a lease may expire or a failed one may be granted again."""
    not_finite: dict[tuple[MicrobatchIndex, StageIndex], PeerId] = field(default_factory=dict)
    """The first peer at which a microbatch was not finite, by cell."""
    closing: CloseState | None = None
    """The close, from its first round until the step ends or no stage has a round."""
    close_not_before: float = 0.0
    complete_at: float | None = None
    """When the table was first complete. Joining peers may delay the close for a bounded time from
    then on, because in a large run some peer is always downloading."""
    evaluations: dict[MicrobatchIndex, tuple[float, int]] = field(default_factory=dict)


@dataclass(slots=True)
class PendingMask:
    """A mask request that awaits its answer."""

    due_at: float
    peer: PeerId
    request: int
    step: Step
    microbatch: MicrobatchIndex


@dataclass(slots=True)
class StageSnapshots:
    """Holders that were requested to save one stage's snapshot for joining peers."""

    version: Version
    asked_at: float
    asked: set[PeerId] = field(default_factory=set)
    ready: dict[PeerId, tuple[str, int, str]] = field(default_factory=dict)
    """peer → (item, bytes, sha256)"""
    first_at: float = math.inf
    """When the first snapshot was ready."""


@dataclass(slots=True)
class PendingCheckpoint:
    """A checkpoint in progress."""

    version: Version
    asked_at: float
    holders: dict[StageIndex, PeerId] = field(default_factory=dict)
    sessions: dict[StageIndex, SessionNumber] = field(default_factory=dict)
    """The session in which each holder was requested; the request is lost with the session."""
    fetched: dict[StageIndex, str] = field(default_factory=dict)
    """stage → sha256 of the snapshot that the shell fetches."""


@dataclass(slots=True)
class SuspicionFlags:
    """How often a peer has produced something wrong, whatever the cause; shown by `status`."""

    times: int
    reason: str
    """The reason of the latest flag."""


@dataclass(slots=True)
class WorkCounters:
    """Counts of cells since this start of the coordinator: the cost of faults."""

    counted: int = 0
    """Cells entered in a table, including those that were cleared again."""
    duplicated: int = 0
    """Cells counted by a second peer too, which removed its copy at the close."""
    cleared: int = 0
    """Cells lost with the peer that had counted them, and so computed once more."""


@dataclass(slots=True)
class RunState:
    """All state of a run; see the module docstring for its owner."""

    manifest: Manifest
    manifest_envelope: str
    coordinator: PeerRecord
    """How clients reach the coordinator as a source of checkpoints; the record's stage is
    unused."""
    generation: int
    version: Version
    started_at: float
    last_applied: AppliedStep | None
    checkpoint: CheckpointRecord | None
    heldout_loss: float | None
    rebalancing: RebalancingState
    phase: RunPhase = RunPhase.WAITING
    peers: PeerTable = field(init=False)
    utilisation: UtilisationStats = field(init=False)
    step: StepState | None = None
    ahead: StepState | None = None
    """The following step, if the manifest's staleness lets it start before this one is applied."""
    snapshots: dict[StageIndex, StageSnapshots] = field(default_factory=dict)
    pending_checkpoint: PendingCheckpoint | None = None
    checkpoint_failed: tuple[Version, int, float] = (INITIAL, 0, 0.0)
    """The version whose checkpoint failed last, the number of failures, and the time of the next
    try."""
    pending_masks: list[PendingMask] = field(default_factory=list)
    stop_requested_at: float | None = None
    training_began: bool = False
    lost_since: dict[StageIndex, float] = field(default_factory=dict)
    checkpoint_overdue: bool = False
    """Whether the store had no checkpoint at the start, or one older than the manifest allows."""
    rolled_back: bool = False
    on_current_history: set[PeerId] = field(default_factory=set)
    """Peers whose state is known to belong to the history since a roll-back."""
    lease_counter: int = 0
    attempt_counter: int = 0
    roster_serial: int = 0
    roster_dirty: bool = False
    roster_due_at: float | None = None
    """When changes that can wait are published at the latest."""
    published: Roster | None = None
    """The roster that was sent last."""
    published_stages: tuple[tuple[PeerRecord, ...], ...] = ()
    """Its records by stage, for removals during an apply and for the next change."""
    published_at: float = -math.inf
    revoked: dict[PeerId, float] = field(default_factory=dict)
    """Peers that must not be served, and until when each could present a valid certificate."""
    revoked_dirty: bool = False
    """Whether a peer was revoked or reinstated since the last roster."""
    waiting_reason: str = ""
    work: WorkCounters = field(default_factory=WorkCounters)
    flags: dict[PeerId, SuspicionFlags] = field(default_factory=dict)
    """Suspicion flags; kept when a peer leaves, for when it returns."""
    fingerprints: dict[StageIndex, frozenset[str]] = field(default_factory=dict)
    """Digests of the run's version that holders of each stage have reported."""
    commands: list[Command] = field(default_factory=list)
    _rows: dict[StageIndex, StageRow] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.peers = PeerTable(self.manifest.stage_count)
        self.utilisation = UtilisationStats(self.manifest.stage_count)

    # ---- output: commands, notes and counters

    def send(self, peer: PeerId, message: CoordinatorMessage) -> None:
        self.commands.append(Send(peer, message))

    def broadcast(self, peers: Collection[PeerId], message: CoordinatorMessage) -> None:
        if peers:
            self.commands.append(Broadcast(tuple(peers), message))

    def note(self, text: str, peer: PeerId | None = None) -> None:
        self.commands.append(Note(text, peer))

    def reject(self, kind: Rejection) -> None:
        """Count a rejection."""
        self.utilisation.rejected[kind] += 1

    def flag(self, peer: PeerState, kind: Rejection, reason: str) -> None:
        """Count a rejection against a peer, and note it."""
        self.reject(kind)
        mark = self.flags.pop(peer.peer, None) or SuspicionFlags(0, reason)
        mark.times, mark.reason = mark.times + 1, reason
        self.flags[peer.peer] = mark
        if len(self.flags) > MAX_FLAGGED_PEERS:
            del self.flags[next(iter(self.flags))]
        self.note(f"{display(peer)} is flagged: {reason}", peer.peer)

    # ---- derived facts

    @property
    def last_stage(self) -> StageIndex:
        return StageIndex(self.manifest.stage_count - 1)

    @property
    def stage_indices(self) -> range:
        return range(self.manifest.stage_count)

    def tied_stages(self) -> frozenset[StageIndex]:
        """Both ends of a model with tied embeddings, which average these together."""
        ends = frozenset((StageIndex(0), self.last_stage))
        tied = self.manifest.model.tie_embeddings and len(ends) > 1
        return ends if tied else frozenset()

    def holds_current(self, peer: PeerState) -> bool:
        """Whether the peer can take part in this step: it holds a stage at the run's version."""
        return (
            peer.phase is PeerPhase.READY
            and peer.version == self.version
            and not (self.step is not None and peer.peer in self.step.excluded)
        )

    def step_numbered(self, number: int) -> StepState | None:
        """The step in progress with this number."""
        for step in (self.step, self.ahead):
            if step is not None and step.step == number:
                return step
        return None

    def round_of(self, stage: StageIndex | None) -> Round | None:
        """The stage's round in this step; until it ends, its cells stay and no peer joins it."""
        if self.step is None or self.step.closing is None or stage is None:
            return None
        return self.step.closing.rounds.get(stage)

    def computes_ahead(self, peer: PeerState) -> bool:
        """Whether the peer can have worked on the following step. It may still have to apply this
        one, because work ahead is one version behind by design."""
        behind = (
            self.phase is RunPhase.APPLYING
            and peer.phase is PeerPhase.READY
            and peer.version == self.version - 1
            and not (self.step is not None and peer.peer in self.step.excluded)
        )
        return behind or self.holds_current(peer)

    def ready_peers(self, stage: int) -> Sequence[PeerState]:
        """Peers that hold the stage at the run's version, leaving ones included."""
        ready = self.peers.view(StageIndex(stage), self.version).ready
        if self.step is not None and self.step.excluded:
            return [peer for peer in ready if peer.peer not in self.step.excluded]
        return ready

    def has_complete_pipeline(self) -> bool:
        """Whether microbatches can pass: every stage has a working peer, and there is a trainer."""
        return not self.idle() and any(
            peer.trainer and not peer.leaving and not peer.paused
            for stage in self.stage_indices
            for peer in self.ready_peers(stage)
        )

    def unheld(self) -> Collection[StageIndex]:
        """Stages without a holder that takes part in this step."""
        if self.step is not None and self.step.excluded:
            return [StageIndex(s) for s in self.stage_indices if not self.ready_peers(s)]
        return self.peers.unheld(self.version)

    def idle(self) -> Collection[StageIndex]:
        """Stages without a peer that takes new work in this step."""
        if self.step is not None and self.step.excluded:
            return [StageIndex(s) for s in self.stage_indices if not self.working_peers(s)]
        return self.peers.idle(self.version)

    def paused_stages(self) -> list[StageIndex]:
        """Stages that the run waits for although they are held."""
        return sorted(set(self.idle()) - set(self.unheld()))

    def working_peers(self, stage: int) -> Sequence[PeerState]:
        """Ready peers that may get new microbatches.

        A leaving peer only if all of them leave, a paused one never.
        """
        if self.step is not None and self.step.excluded:
            active = [peer for peer in self.ready_peers(stage) if not peer.paused]
            return [peer for peer in active if not peer.leaving] or active
        return self.peers.view(StageIndex(stage), self.version).working

    def trainers(self) -> list[PeerState]:
        return [
            peer
            for stage in self.stage_indices
            for peer in self.peers.view(StageIndex(stage), self.version).trainers
            if self.step is None or peer.peer not in self.step.excluded
        ]

    def stage_rows(self) -> tuple[StageRow, ...]:
        """The capacity of each stage; a peer without a reported rate counts with the mean."""
        capacities = [self.peers.capacity(StageIndex(stage)) for stage in self.stage_indices]
        measured = sum(capacity.measured for capacity in capacities)
        mean = sum(t.flops_per_second for t in capacities) / measured if measured else 0.0
        return tuple(
            self._row(StageIndex(index), capacity, mean)
            for index, capacity in enumerate(capacities)
        )

    def _row(self, index: StageIndex, capacity: StageCapacity, mean: float) -> StageRow:
        stage = self.manifest.stages[index]
        flops = capacity.flops_per_second + mean * (capacity.peers - capacity.measured)
        rate = flops / (stage.work_flops or 1.0)
        known = self._rows.get(index)
        if known is None or (known.peers, known.microbatches_per_second) != (capacity.peers, rate):
            known = self._rows[index] = StageRow(
                stage=index,
                peers=capacity.peers,
                microbatches_per_second=rate,
                work_flops=stage.work_flops,
                memory_bytes=stage.memory_bytes,
            )
        return known

    def roster(self) -> tuple[tuple[PeerRecord, ...], ...]:
        """Records of all peers that take part in this step, by stage.

        The tuple of an unchanged stage is the same object as before.
        """
        return tuple(self._stage_records(StageIndex(stage)) for stage in self.stage_indices)

    def _stage_records(self, stage: StageIndex) -> tuple[PeerRecord, ...]:
        ready = self.ready_peers(stage)
        known = self.peers.records.get(stage)
        if known is None or (self.step is not None and self.step.excluded):
            alone = all(peer.leaving or peer.paused for peer in ready)
            known = tuple(
                self._record(peer, not peer.paused and (alone or not peer.leaving))
                for peer in ready
            )
            if not (self.step is not None and self.step.excluded):
                self.peers.records[stage] = known
        return known

    def record_of(self, peer: PeerState) -> PeerRecord:
        """A peer's roster record."""
        return self._record(peer, not peer.leaving and not peer.paused)

    def _record(self, peer: PeerState, accepts_work: bool) -> PeerRecord:
        assert peer.stage is not None
        known = peer.record
        if (
            known is not None
            and known.accepts_work == accepts_work
            and rates_alike(known.microbatches_per_second, peer.microbatches_per_second)
        ):
            return known
        peer.record = PeerRecord(
            peer=peer.peer,
            stage=peer.stage,
            addresses=peer.addresses,
            certificate=peer.certificate,
            microbatches_per_second=peer.microbatches_per_second,
            carrier=peer.carrier,
            accepts_work=accepts_work,
            reachability=peer.reachability,
            offers_relay=peer.offers_relay,
        )
        return peer.record


def short(peer: PeerId) -> str:
    """The last eight characters of a peer ID, enough to distinguish the peers of a run."""
    return f"…{peer[-8:]}"


def display(peer: PeerState) -> str:
    """A peer's name and short ID, for texts."""
    return f"{peer.name} ({short(peer.peer)})" if peer.name else short(peer.peer)


__all__ = [
    "Cell",
    "CloseState",
    "LeaseState",
    "PeerPhase",
    "PeerState",
    "PendingCheckpoint",
    "PendingMask",
    "Round",
    "RunPhase",
    "RunState",
    "StageMove",
    "StageSnapshots",
    "StepState",
    "SuspicionFlags",
    "WorkCounters",
    "display",
    "short",
]
