"""The events that the coordinator's pure core takes and the commands that it returns.

The shell (`swarm_coordinator.server`) checks signatures, turns network messages into events, and
carries out commands in their order. A `Persist` is durable before the next command is carried out:
a decision survives a crash before any peer receives it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, NewType

from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.work_statements import AuditStatement, SumStatement
from swarm_shared.protocol import (
    ClientMessage,
    CoordinatorMessage,
    Heartbeat,
    Hello,
    PeerRecord,
)
from swarm_shared.trust.evidence import Evidence
from swarm_shared.trust.votes import Claim

SessionNumber = NewType("SessionNumber", int)
"""Number of one attachment of one client. It grows, so that messages of an older attachment are
recognised as stale."""

NO_STEP: Final = Step(0)

INITIALISATION: Final = Version(0)


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class PeerAttached:
    """A client sent Hello and was admitted; its certificate and receipts are verified."""

    session: SessionNumber
    peer: PeerId
    hello: Hello
    certificate: str
    receipts: tuple[Receipt, ...]
    owner: PeerId | None
    """The owner that the hello's binding proves."""


@dataclass(frozen=True, slots=True)
class SessionLost:
    """The control stream of a session ended without a Goodbye."""

    session: SessionNumber
    peer: PeerId


@dataclass(frozen=True, slots=True)
class ReceiptsVerified:
    """Receipts with valid signatures, from a Receipts message of the session's peer."""

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
    owing: tuple[PeerId, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditAnswered:
    """An AuditResult. The statement's signature is verified; it is of this run and names the
    session's peer as the auditor."""

    session: SessionNumber
    peer: PeerId
    audit: int
    statement: AuditStatement | None
    envelope: str
    """The signed statement in base64, as evidence; empty without one."""


@dataclass(frozen=True, slots=True)
class SumsStated:
    """A SumsChecked. The statement's signature is verified; it is the session's peer's, of this
    run, and of the step and attempt that the message names."""

    session: SessionNumber
    peer: PeerId
    attempt: int
    details: bool
    statement: SumStatement
    envelope: str
    """The signed statement in base64, as evidence."""


@dataclass(frozen=True, slots=True)
class MessageReceived:
    """Any other message of an attached client; heartbeats arrive in `HeartbeatsReceived`."""

    session: SessionNumber
    peer: PeerId
    message: ClientMessage


class PeerHeartbeat(NamedTuple):
    """One heartbeat of one peer. A named tuple, because thousands are created every second."""

    session: SessionNumber
    peer: PeerId
    message: Heartbeat


@dataclass(frozen=True, slots=True)
class HeartbeatsReceived:
    """All heartbeats since the last event of this kind.

    They are batched because thousands arrive every second and no rule depends on a single one.
    """

    heartbeats: Sequence[PeerHeartbeat]


@dataclass(frozen=True, slots=True)
class CheckpointStored:
    """Every stage of `version` is in the run folder: complete, hashed and durable."""

    version: Version
    stages: tuple[StoredStage, ...]


@dataclass(frozen=True, slots=True)
class CheckpointFailed:
    """A checkpoint could not be stored (disk full, holder lost); training goes on without it."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class PeersRevoked:
    """Peers that may no longer take part: banned, or admitted by something that was revoked.

    The shell passes on no PeerAttached of these peers until they are reinstated.
    """

    peers: tuple[PeerId, ...]
    reason: str
    """A sentence, also sent to the peers themselves."""
    until: float
    """When the last certificate that these peers can hold expires; members need no notice after
    that."""


@dataclass(frozen=True, slots=True)
class PeersReinstated:
    """Peers that may take part and be served again."""

    peers: tuple[PeerId, ...]


@dataclass(frozen=True, slots=True)
class CertificateIssued:
    """A renewed certificate of a member, or of the coordinator itself."""

    peer: PeerId
    certificate: str


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The organiser stops the run: finish the close, store a checkpoint, disconnect the peers."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; sent a few times a second."""


Event = (
    PeerAttached | SessionLost | ReceiptsVerified | LeaseResolved | AuditAnswered | SumsStated
    | MessageReceived | HeartbeatsReceived | CheckpointStored | CheckpointFailed | PeersRevoked
    | PeersReinstated | CertificateIssued | StopRequested | Tick
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
    """Put a message into a peer's outbox. Never blocks; dropped when the session has ended."""

    peer: PeerId
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Send one message to many peers.

    Delivery may be spread over about a second; each peer receives it before any later message.
    """

    peers: tuple[PeerId, ...]
    message: CoordinatorMessage


@dataclass(frozen=True, slots=True)
class StageShare:
    """Number of microbatches that a peer counted in one stage of one applied step."""

    peer: PeerId
    stage: StageIndex
    microbatches: int
    tokens: int


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """The durable record of one optimizer step, written before any Apply is sent."""

    step: Step
    attempt: int
    """Number of the latest attempt."""
    loss: float
    """Mean cross entropy per token over the step, in nats."""
    tokens: int
    seconds: float
    global_norm: float
    learning_rate: float
    shares: tuple[StageShare, ...]
    attempts: tuple[int, ...] = ()
    """Attempt number by stage, if the stages averaged in different attempts; empty: all in
    `attempt`."""

    def attempt_of(self, stage: StageIndex) -> int:
        """The attempt in which a stage averaged the applied gradient."""
        return self.attempts[stage] if self.attempts else self.attempt


@dataclass(frozen=True, slots=True)
class RolledBack:
    """The run continues from `version`; later steps no longer belong to its history."""

    version: Version
    reason: str


@dataclass(frozen=True, slots=True)
class CheckpointRecord:
    """A checkpoint whose files are all in the run folder."""

    version: Version
    stages: tuple[StoredStage, ...]


@dataclass(frozen=True, slots=True)
class EvaluationRecord:
    """An evaluation on held-out data: by the swarm at the end of the run, or of a checkpoint by the
    organiser's machine."""

    version: Version
    heldout_loss: float
    """Nats per token."""
    tokens: int
    sample: str | None = None
    """A text that the model has written; None in the swarm's evaluation."""


@dataclass(frozen=True, slots=True)
class StandingRecord:
    """The standing of one owner (`swarm_coordinator.core.trust.standing`)."""

    owner: PeerId
    passed: int
    lost: int
    vested_step: Step
    audited_work: int
    unvested_since: Step = NO_STEP


@dataclass(frozen=True, slots=True)
class StandingsRecord:
    """Standings that have changed since the last record of this kind."""

    standings: tuple[StandingRecord, ...]


@dataclass(frozen=True, slots=True)
class AgreementRecord:
    """Two machines of a stage that computed the same bits
    (`swarm_coordinator.core.trust.arithmetic_classes`); the lesser one by peer and device comes
    first."""

    stage: StageIndex
    peer: PeerId
    device: str
    other: PeerId
    other_device: str
    cells: int
    """Number of audited cells in which they agreed; 0 if the pair is forgotten."""


@dataclass(frozen=True, slots=True)
class AgreementsRecord:
    """Agreements that have changed since the last record of this kind."""

    agreements: tuple[AgreementRecord, ...]


@dataclass(frozen=True, slots=True)
class HeldAccountRecord:
    """The held seconds of one account (`swarm_coordinator.core.state.held_time`), as times that are
    left: clocks of two starts have nothing in common."""

    account: PeerId
    """A peer, or an owner."""
    leaks_for_seconds: float
    """Seconds until the held seconds have leaked away."""
    refused_for_seconds: float = 0.0
    refused_because: str = ""
    disputes: tuple[tuple[PeerId, float], ...] = ()
    """Peers in a dispute with the account, each with the seconds until the dispute has leaked
    away."""
    ends_with_self_test: bool = False
    """Whether a passed self-test ends the refusal."""


@dataclass(frozen=True, slots=True)
class HeldTimeRecord:
    """Accounts that have changed since the last record of this kind."""

    accounts: tuple[HeldAccountRecord, ...]


class StateDigest(NamedTuple):
    """The digest of a stage's state. Holders on unlike devices may have several."""

    stage: StageIndex
    digest: str


@dataclass(frozen=True, slots=True)
class StateDigestsRecord:
    """The digests of all stages at a version; those of other versions are forgotten."""

    version: Version
    digests: tuple[StateDigest, ...]


PartName = Literal["compute", "close", "failed attempt", "average", "apply"]


class StepPart(NamedTuple):
    """A part of an applied step. Times are seconds from the decision to apply it, whose time the
    step's record has; before it they are negative."""

    name: PartName
    stage: StageIndex | None
    """The stage; None for a part of all stages together."""
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class StepTimesRecord:
    """When the parts of an applied step happened; written once all members have applied it."""

    step: Step
    parts: tuple[StepPart, ...]


@dataclass(frozen=True, slots=True)
class VerdictRecord:
    """A lost audit or check of sums, with its evidence."""

    step: Step
    microbatch: MicrobatchIndex | None
    """The audited microbatch; None if a statement about the stage's average was wrong."""
    stage: StageIndex
    peer: PeerId
    """The peer that lost: the audited one, or one whose statement was wrong."""
    owner: PeerId
    audited: PeerId
    """The peer whose receipt was audited, or whose sums were checked."""
    reason: str
    """A sentence that names the cell and what differed."""
    void_after: Step = NO_STEP
    """The owner's credit of later steps is void, up to and with `step`. Known once the verdict is
    carried out."""
    evidence: Evidence | None = None
    """The evidence of an audit, without its receipt until the shell adds it; None for a check of
    sums."""
    statements: tuple[str, ...] = ()
    """The evidence of a check of sums: the signed statements of the members of the average and of
    auditors, in base64."""
    claim: Claim | None = None
    """The content of the audited receipt, by which the shell finds the receipt; not stored."""


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the run's event log for people: joins, losses, decisions, errors."""

    text: str
    peer: PeerId | None = None


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The run has reached its last step, and its checkpoint is stored."""

    version: Version


@dataclass(frozen=True, slots=True)
class Persist:
    """Make a record durable before the next command is carried out."""

    record: (
        AppliedStep | RolledBack | CheckpointRecord | EvaluationRecord | RunFinished
        | StandingsRecord | VerdictRecord
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Remember:
    """Store a record without waiting for it: if a crash loses it, no decision is lost."""

    record: AgreementsRecord | HeldTimeRecord | StateDigestsRecord | StepTimesRecord


@dataclass(frozen=True, slots=True)
class FetchSnapshot:
    """Fetch one stage's snapshot for a checkpoint from the holders that announced it.

    The shell answers CheckpointStored once all stages of the version are in the folder, and
    CheckpointFailed if one cannot be fetched.
    """

    version: Version
    stage: StageIndex
    holders: tuple[PeerRecord, ...]
    item: str
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class CloseSession:
    """End a peer's session after its outbox has been sent."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Ban:
    """Ban an owner with all its devices for good; the shell answers PeersRevoked."""

    owner: PeerId
    reason: str


@dataclass(frozen=True, slots=True)
class ShutDown:
    """Everything is durable and every peer has its Goodbye in its outbox; the shell may exit."""


Command = (
    Send | Broadcast | Persist | Remember | Note | FetchSnapshot | CloseSession | Ban | ShutDown
)


@dataclass(frozen=True, slots=True)
class Restored:
    """What the store holds of the run when the coordinator starts."""

    generation: int
    version: Version
    last_applied: AppliedStep | None
    checkpoint: CheckpointRecord | None
    finished: bool
    heldout_loss: float | None
    rolled_back: bool = False
    """Whether a version number may also denote a state of an abandoned history."""
    on_current_history: frozenset[PeerId] = frozenset()
    """Peers with counted work in a step since the last roll-back, which hold no state from before
    it."""
    standings: tuple[StandingRecord, ...] = ()
    recomputed: Version = INITIALISATION
    """The last version that a roll-back has left: the steps up to it are computed again already."""
    state_digests: tuple[StateDigest, ...] = ()
    """The digests of the version's state that holders have reported, by stage."""
    held_time: tuple[HeldAccountRecord, ...] = ()
    agreements: tuple[AgreementRecord, ...] = ()
