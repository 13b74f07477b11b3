"""What goes into the coordinator's pure core and what comes out of it.

The shell (`server`) turns network messages into events after it has checked signatures, and
carries out commands in their order. A `Persist` is durable before the next command is carried
out: that order is what makes a decision survive a crash before anybody has heard of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import (
    ClientMessage,
    CoordinatorMessage,
    Heartbeat,
    Hello,
    PeerRecord,
    SnapshotReady,
)

SessionNumber = NewType("SessionNumber", int)
"""One attachment of one client; grows, so that words of an older attachment are known as stale."""


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class PeerAttached:
    """A client said Hello and was admitted: certificate and receipts are already verified."""

    session: SessionNumber
    peer: PeerId
    hello: Hello
    certificate: str
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The control stream of a session ended without a Goodbye."""

    session: SessionNumber
    peer: PeerId


@dataclass(frozen=True, slots=True)
class ReceiptsVerified:
    """Receipts whose signatures hold, from a Receipts message; reporter is the session's peer."""

    session: SessionNumber
    peer: PeerId
    receipts: tuple[Receipt, ...]


@dataclass(frozen=True, slots=True)
class LeaseResolved:
    """A trainer's LeaseResult with its receipts verified."""

    session: SessionNumber
    peer: PeerId
    step: Step
    microbatch: MicrobatchIndex
    lease: int
    ok: bool
    reason: str
    receipts: tuple[Receipt, ...]
    evaluation_loss_sum: float | None
    evaluation_tokens: int


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """Any other message of an attached client; a heartbeat comes in `HeartbeatsReceived`."""

    session: SessionNumber
    peer: PeerId
    message: ClientMessage


class PeerHeartbeat(NamedTuple):
    """What one of them said. Thousands are made every second."""

    session: SessionNumber
    peer: PeerId
    message: Heartbeat


@dataclass(frozen=True, slots=True)
class HeartbeatsReceived:
    """All that were heard since the last event of this kind.

    Thousands beat every second, and no rule depends on one of them alone.
    """

    heartbeats: Sequence[PeerHeartbeat]


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """Every stage of `version` lies in the run folder, complete, hashed and durable."""

    version: Version
    stages: tuple[StoredStage, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be stored (disk full, holder gone); training goes on without it."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class PeersRevoked:
    """These may not take part any more: the organiser has banned them, or revoked what let them in.

    The shell lets no PeerAttached of theirs through after this, until they are let in again.
    """

    peers: tuple[PeerId, ...]
    reason: str
    """A sentence, for the peers themselves as well."""
    until: float
    """When the last certificate that one can have has expired: then nobody need be told."""


@dataclass(frozen=True, slots=True)
class PeersReinstated:
    """These may take part again, and others may serve them."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class CertificateIssued:
    """A newer certificate for a member, or for the coordinator itself."""

    peer: PeerId
    certificate: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The organiser pressed Ctrl-C: finish the step, write a checkpoint, say goodbye."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent a few times a second."""


Event = (
    PeerAttached | SessionLost | ReceiptsVerified | LeaseResolved | MessageReceived
    | HeartbeatsReceived | CheckpointStored | CheckpointFailed | PeersRevoked | PeersReinstated
    | CertificateIssued | StopRequested | Tick
)  # fmt: skip


# ---------------------------------------------------------------- commands


@dataclass(frozen=True, slots=True)
class StoredStage:
    """One stage's file of a checkpoint in the run folder."""

    stage: StageIndex
    item: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Send:
    """Put a message into a peer's outbox; never blocks; dropped when the session is gone."""

    peer: PeerId
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send one message to many peers. It may reach them one after the other, over a second or so;
    what a peer is sent after it comes after it."""

    peers: tuple[PeerId, ...]
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class StageShare:
    """How many microbatches a peer counted in one stage of one applied step."""

    peer: PeerId
    stage: StageIndex
    microbatches: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """The durable record of one optimizer step, written before anybody is told to apply it."""

    step: Step
    attempt: int
    """The latest one."""
    loss: float
    """Mean cross entropy per token over the step, in nats."""
    tokens: int
    seconds: float
    global_norm: float
    learning_rate: float
    shares: tuple[StageShare, ...]
    attempts: tuple[int, ...] = ()
    """Of each stage, where not all have averaged in the same one; empty: all in `attempt`."""

    def attempt_of(self, stage: StageIndex) -> int:
        """In which attempt a stage has averaged what was applied."""
        return self.attempts[stage] if self.attempts else self.attempt


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The run goes on from `version`; later steps no longer belong to its history."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    version: Version
    stages: tuple[StoredStage, ...]


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    version: Version
    heldout_loss: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Note:
    """Something a person should be able to read later: joins, deaths, decisions, errors."""

    text: str
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True)
class RunFinished:
    version: Version


@dataclass(frozen=True, slots=True)
class Persist:
    """Durable before the next command is carried out."""

    record: AppliedStep | RolledBack | CheckpointRecord | EvaluationRecord | RunFinished


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch one stage's snapshot for a checkpoint from its holder.

    When all stages of the version are in the folder the shell answers CheckpointStored; when one
    cannot be had, CheckpointFailed.
    """

    holder: PeerRecord
    snapshot: SnapshotReady


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a peer's session after what is in its outbox has been sent."""

    peer: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Everything is durable and everybody has been told; the shell may exit."""


Command = Send | Broadcast | Persist | Note | FetchSnapshot | CloseSession | ShutDown


@dataclass(frozen=True, slots=True)
class Restored:
    """What the store knows at start; the pure core begins from it."""

    generation: int
    version: Version
    last_applied: AppliedStep | None
    checkpoint: CheckpointRecord | None
    finished: bool
    heldout_loss: float | None
    rolled_back: bool = False
    """Whether a version's number may also mean a state of a history that was given up."""
    on_current_history: frozenset[PeerId] = frozenset()
    """After a roll-back: who has counted in a step since, and so holds no state of before."""
