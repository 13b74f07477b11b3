"""Everything the coordinator knows about a run, as data.

Owned and changed by `transition` alone; the shell only reads it through `status`. Durable facts
live in the store; what is here beyond them is rebuilt from the clients when they re-attach
(design: durability).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from swarm_coordinator.events import (
    AppliedStep,
    CheckpointRecord,
    Command,
    Note,
    Send,
    Session,
)
from swarm_shared.credentials import Receipt
from swarm_shared.manifest import Manifest
from swarm_shared.messages import (
    Carrier,
    CarrierAddress,
    CoordinatorMessage,
    PeerRecord,
    Reduction,
    StageRow,
)
from swarm_shared.types import MicrobatchIndex, PeerId, StageIndex, Step, Version

INITIAL = Version(0)


class RunPhase(StrEnum):
    """Where the current step stands (design: the life of a step)."""

    WAITING = "waiting for peers"
    COLLECT = "collecting"
    CLOSING = "closing"
    APPLYING = "applying"
    EVALUATING = "evaluating"
    STOPPING = "stopping"
    FINISHED = "finished"


class PeerPhase(StrEnum):
    ADMITTED = "admitted"
    """Has a certificate and no stage yet."""
    SYNCING = "syncing"
    """Has a stage and not yet its state."""
    READY = "ready"
    """Holds its stage at the run's version."""


@dataclass(slots=True)
class PeerState:
    peer: PeerId
    session: Session
    certificate: str
    name: str | None
    addresses: tuple[str, ...]
    carrier: CarrierAddress | None
    device: str
    memory_bytes: int
    trainer: bool
    wanted_stage: StageIndex | None
    last_heard: float
    phase: PeerPhase = PeerPhase.ADMITTED
    stage: StageIndex | None = None
    version: Version = INITIAL
    microbatches_per_second: float = 0.0
    queued: int = 0
    leaving: bool = False
    leaving_since: float = 0.0
    hold_until: float = 0.0
    """While it downloads, the close of the step waits for it until then."""
    holds: int = 0
    source_asked: bool = False
    """Whether the peer has been told where to get its state from."""
    ask_not_before: float = 0.0
    """A source that failed is not named again sooner."""
    catching_up: Step | None = None
    """The step it has averaged and still has to apply, since it missed the word to do so."""
    early_receipts: dict[MicrobatchIndex, Receipt] = field(default_factory=dict)
    """Told after a restart of the coordinator, before the step that they belong to began."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One committed (microbatch, stage): who holds it, and the loss at the last stage."""

    peer: PeerId
    tokens: int
    loss_sum: float | None


@dataclass(slots=True)
class LeaseState:
    lease: int
    trainer: PeerId
    granted_at: float
    resolved_at: float | None = None


@dataclass(slots=True)
class Closing:
    """One attempt to close the step: who takes part and what they have answered."""

    members: dict[PeerId, StageIndex]
    began_at: float
    reports: dict[PeerId, tuple[float, float]] = field(default_factory=dict)
    """Squared norms (own part, tied part) of those that have averaged."""
    applied: dict[PeerId, tuple[str, float]] = field(default_factory=dict)
    """Fingerprints of those that have applied."""
    decided_at: float = 0.0


@dataclass(slots=True)
class StepState:
    step: Step
    began_at: float
    attempt: int = 0
    """Names the latest close: never used for another one, not by another step nor generation."""
    closes: int = 0
    timeouts: int = 0
    blame: dict[PeerId, int] = field(default_factory=dict)
    """How many attempts of this step have failed because of each peer."""
    excluded: set[PeerId] = field(default_factory=set)
    """Sit this step out and are synced anew after it: they kept it from closing."""
    table: dict[tuple[MicrobatchIndex, StageIndex], Cell] = field(default_factory=dict)
    leases: dict[MicrobatchIndex, LeaseState] = field(default_factory=dict)
    closing: Closing | None = None
    close_not_before: float = 0.0
    evaluations: dict[MicrobatchIndex, tuple[float, int]] = field(default_factory=dict)


@dataclass(slots=True)
class PendingMask:
    due_at: float
    peer: PeerId
    request: int
    step: Step
    microbatch: MicrobatchIndex


@dataclass(slots=True)
class Snapshots:
    """Holders that were asked for a snapshot of one stage, for newcomers."""

    version: Version
    asked_at: float
    asked: set[PeerId] = field(default_factory=set)
    ready: dict[PeerId, tuple[str, int, str]] = field(default_factory=dict)
    """peer → (item, bytes, sha256)"""


@dataclass(slots=True)
class PendingCheckpoint:
    version: Version
    asked_at: float
    holders: dict[StageIndex, PeerId] = field(default_factory=dict)
    sessions: dict[StageIndex, Session] = field(default_factory=dict)
    """In which attachment each holder was asked: the word is lost with it."""
    fetched: dict[StageIndex, str] = field(default_factory=dict)
    """stage → sha256 of the snapshot that the shell was told to fetch."""


@dataclass(slots=True)
class RunState:
    manifest: Manifest
    manifest_envelope: str
    coordinator: PeerRecord
    """How clients reach the coordinator as a holder of checkpoints; its stage means nothing."""
    generation: int
    version: Version
    started_at: float
    last_applied: AppliedStep | None
    checkpoint: CheckpointRecord | None
    heldout_loss: float | None
    phase: RunPhase = RunPhase.WAITING
    peers: dict[PeerId, PeerState] = field(default_factory=dict)
    step: StepState | None = None
    snapshots: dict[StageIndex, Snapshots] = field(default_factory=dict)
    pending_checkpoint: PendingCheckpoint | None = None
    checkpoint_failed: tuple[Version, int, float] = (INITIAL, 0, 0.0)
    """The version whose checkpoint failed last, how often, and when it may be tried again."""
    pending_masks: list[PendingMask] = field(default_factory=list)
    carrier_failures: set[StageIndex] = field(default_factory=set)
    """Stages whose peers could not use hivemind's carrier with each other."""
    stop_requested_at: float | None = None
    training_began: bool = False
    lost_since: dict[StageIndex, float] = field(default_factory=dict)
    rolled_back: bool = False
    on_branch: set[PeerId] = field(default_factory=set)
    """Since a roll-back: whose state is known to belong to the history that went on from it."""
    lease_counter: int = 0
    attempt_counter: int = 0
    roster_serial: int = 0
    roster_dirty: bool = False
    waiting_reason: str = ""
    commands: list[Command] = field(default_factory=list)

    # ---- what the other modules of the core say through

    def send(self, peer: PeerId, message: CoordinatorMessage) -> None:
        self.commands.append(Send(peer, message))

    def note(self, text: str, peer: PeerId | None = None) -> None:
        self.commands.append(Note(text, peer))

    # ---- derived facts

    @property
    def last_stage(self) -> StageIndex:
        return StageIndex(self.manifest.stage_count - 1)

    @property
    def stage_indices(self) -> range:
        return range(self.manifest.stage_count)

    def holds_current(self, peer: PeerState) -> bool:
        """Whether it can take part in this step: it holds a stage at the run's version."""
        return (
            peer.phase is PeerPhase.READY
            and peer.version == self.version
            and not (self.step is not None and peer.peer in self.step.excluded)
        )

    def ready_peers(self, stage: int) -> list[PeerState]:
        """Peers that hold the stage at the run's version, leaving ones included."""
        return [p for p in self.peers.values() if p.stage == stage and self.holds_current(p)]

    def staffed(self) -> bool:
        """Whether microbatches can get through: every stage has a peer, and there is a trainer."""
        return bool(self.trainers()) and all(self.ready_peers(s) for s in self.stage_indices)

    def working_peers(self, stage: int) -> list[PeerState]:
        """Ready peers that may get new microbatches: a leaving one only if all of them leave."""
        return [peer for peer, accepts_work in self._offered(stage) if accepts_work]

    def trainers(self) -> list[PeerState]:
        return [
            p for p in self.peers.values() if p.trainer and self.holds_current(p) and not p.leaving
        ]

    def stage_rows(self) -> tuple[StageRow, ...]:
        rows = []
        for index, stage_range in enumerate(self.manifest.stages):
            held = [p for p in self.peers.values() if p.stage == index and not p.leaving]
            rows.append(
                StageRow(
                    stage=StageIndex(index),
                    peers=len(held),
                    microbatches_per_second=sum(p.microbatches_per_second for p in held),
                    work_flops=stage_range.work_flops,
                    memory_bytes=stage_range.memory_bytes,
                )
            )
        return tuple(rows)

    def roster(self) -> tuple[PeerRecord, ...]:
        """Everybody who takes part in this step."""
        return tuple(
            self._record(peer, accepts_work)
            for stage in self.stage_indices
            for peer, accepts_work in self._offered(stage)
        )

    def _offered(self, stage: int) -> list[tuple[PeerState, bool]]:
        """The stage's ready peers; a leaving one is offered only if there is nobody else."""
        ready = self.ready_peers(stage)
        alone = all(p.leaving for p in ready)
        return [(p, alone or not p.leaving) for p in ready]

    def record_of(self, peer: PeerState) -> PeerRecord:
        """One peer as others may know it."""
        return self._record(peer, not peer.leaving)

    def _record(self, peer: PeerState, accepts_work: bool) -> PeerRecord:
        assert peer.stage is not None
        return PeerRecord(
            peer=peer.peer,
            stage=peer.stage,
            addresses=peer.addresses,
            certificate=peer.certificate,
            microbatches_per_second=peer.microbatches_per_second,
            carrier=peer.carrier,
            accepts_work=accepts_work,
        )


def short(peer: PeerId) -> str:
    """The last eight characters: enough to tell the peers of a run apart in a line of text."""
    return f"…{peer[-8:]}"


def display(peer: PeerState) -> str:
    return f"{peer.name} ({short(peer.peer)})" if peer.name else short(peer.peer)


__all__ = [
    "Carrier",
    "Cell",
    "Closing",
    "LeaseState",
    "PeerPhase",
    "PeerState",
    "PendingCheckpoint",
    "PendingMask",
    "Reduction",
    "RunPhase",
    "RunState",
    "Snapshots",
    "StepState",
    "display",
    "short",
]
