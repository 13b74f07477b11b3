"""What peers and the coordinator say to each other: values only, parsed once at the edge.

Three protocols, each over long-lived framed streams (`swarm_shared.wire`), headers in JSON:

    CONTROL_PROTOCOL   client ↔ coordinator   one stream per client, both directions
    STAGE_PROTOCOL     sender → receiver      one stream per ordered pair; the request is a
                                              microbatch's activation, the answer its gradient
    TRANSFER_PROTOCOL  anyone → holder        chunks of stage snapshots and of data shards

Every bound below is checked before memory is taken. Field names are the wire format: changing
one is a new protocol version.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from swarm_shared.errors import FrameError
from swarm_shared.model_config import FrozenModel
from swarm_shared.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
    Version,
)

CONTROL_PROTOCOL = "/swarmtrain/control/1"
STAGE_PROTOCOL = "/swarmtrain/stage/1"
TRANSFER_PROTOCOL = "/swarmtrain/transfer/1"

SOFTWARE_VERSION = "0.1.0"

Text = Annotated[str, Field(max_length=500)]
Address = Annotated[str, Field(max_length=300)]
Envelope = Annotated[str, Field(max_length=8_192)]
"""A signed envelope in base64: certificates, receipts, carrier bindings."""
Count = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Microbatches = Annotated[tuple[MicrobatchIndex, ...], Field(max_length=65_536)]
Stages = Annotated[tuple[StageIndex, ...], Field(max_length=512)]


class Carrier(StrEnum):
    """What carries an all-reduce round's byte streams."""

    HIVEMIND = "hivemind"
    LIBP2P = "libp2p"


class CarrierAddress(FrozenModel):
    """Where a peer's p2pd can be reached; the binding is its main key's word on it."""

    peer: str = Field(max_length=200)
    addresses: tuple[Address, ...] = Field(max_length=32)
    binding: Envelope


class PeerRecord(FrozenModel):
    """One member of the roster, as everybody may know it."""

    peer: PeerId
    stage: StageIndex
    addresses: tuple[Address, ...] = Field(max_length=32)
    certificate: Envelope
    microbatches_per_second: float = Field(ge=0, allow_inf_nan=False)
    carrier: CarrierAddress | None = None
    accepts_work: bool = True
    """False while the peer is leaving: it still averages, but gets no new microbatch."""


class StageRow(FrozenModel):
    """How well one stage is served; the input of the pure choice a newcomer makes."""

    stage: StageIndex
    peers: Count
    microbatches_per_second: float = Field(ge=0, allow_inf_nan=False)
    work_flops: float = Field(ge=0, allow_inf_nan=False)
    memory_bytes: Count


class LinkBytes(FrozenModel):
    """Bytes over one link of the reporting peer since it started."""

    remote: PeerId
    protocol: Annotated[str, Field(max_length=100)]
    sent: Count
    received: Count


# ---------------------------------------------------------------- client to coordinator


class Hello(FrozenModel):
    """The first word of a client, again at every re-attachment."""

    kind: Literal["hello"] = "hello"
    run: RunId
    software: Annotated[str, Field(max_length=50)]
    token: Annotated[str, Field(max_length=200)] | None = None
    name: Annotated[str, Field(max_length=60)] | None = None
    addresses: tuple[Address, ...] = Field(max_length=32)
    carrier: CarrierAddress | None = None
    device: Text
    memory_bytes: Count
    trainer: bool = True
    wanted_stage: StageIndex | None = None
    stage: StageIndex | None = None
    """The stage this client already holds, at `version`; None for a newcomer."""
    version: Version = Version(0)
    averaged_attempt: int | None = None
    """Attempt of step version + 1 whose averaged gradient this client still holds."""
    receipts: tuple[Envelope, ...] = Field(default=(), max_length=65_536)
    """All receipts of the step that is not applied yet."""


class StageRequest(FrozenModel):
    """A newcomer's own choice, made with the same function as the coordinator's."""

    kind: Literal["stage_request"] = "stage_request"
    stage: StageIndex


class Heartbeat(FrozenModel):
    kind: Literal["heartbeat"] = "heartbeat"
    microbatches_per_second: float = Field(ge=0, allow_inf_nan=False)
    queued: Count
    links: tuple[LinkBytes, ...] = Field(default=(), max_length=4096)


class Receipts(FrozenModel):
    """Receipts of this peer's own work, in batches, so that they survive an upstream death."""

    kind: Literal["receipts"] = "receipts"
    receipts: tuple[Envelope, ...] = Field(max_length=65_536)


class LeaseResult(FrozenModel):
    """A trainer's word on one leased microbatch, with the receipts that came back with it."""

    kind: Literal["lease_result"] = "lease_result"
    step: Step
    microbatch: MicrobatchIndex
    lease: Count
    ok: bool
    reason: Text = ""
    receipts: tuple[Envelope, ...] = Field(default=(), max_length=512)
    evaluation_loss_sum: float | None = Field(default=None, allow_inf_nan=False)
    evaluation_tokens: Count = 0


class MaskRequest(FrozenModel):
    """Asked before a microbatch is sent again: which stages still have to accumulate it?"""

    kind: Literal["mask_request"] = "mask_request"
    request: Count
    step: Step
    microbatch: MicrobatchIndex
    suspect: PeerId | None = None


class RoundReport(FrozenModel):
    """How a close ended at this peer.

    When not ok, `missing` are microbatches it should hold and does not, and `reset` says that it
    emptied its accumulator, so that nothing of this step is left in it.
    """

    kind: Literal["round_report"] = "round_report"
    step: Step
    attempt: Count
    ok: bool
    own_squared: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    tied_squared: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    reason: Text = ""
    culprit: PeerId | None = None
    carrier_failed: bool = False
    missing: Microbatches = ()
    reset: bool = False


class Applied(FrozenModel):
    kind: Literal["applied"] = "applied"
    step: Step
    digest: Annotated[str, Field(max_length=64)]
    norm: float = Field(ge=0, allow_inf_nan=False)


class Ready(FrozenModel):
    """The stage is held at `version`, fresh, downloaded or kept."""

    kind: Literal["ready"] = "ready"
    stage: StageIndex
    version: Version
    digest: Annotated[str, Field(max_length=64)]


class SyncFailed(FrozenModel):
    kind: Literal["sync_failed"] = "sync_failed"
    stage: StageIndex
    version: Version
    reason: Text


class SnapshotReady(FrozenModel):
    """A snapshot file is there to be fetched by TRANSFER_PROTOCOL under `item`."""

    kind: Literal["snapshot_ready"] = "snapshot_ready"
    version: Version
    stage: StageIndex
    item: Annotated[str, Field(max_length=200)]
    bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SnapshotFailed(FrozenModel):
    kind: Literal["snapshot_failed"] = "snapshot_failed"
    version: Version
    stage: StageIndex
    reason: Text


class Leaving(FrozenModel):
    """The volunteer wants to stop: finish what is in flight, then say Goodbye."""

    kind: Literal["leaving"] = "leaving"


ClientMessage = Annotated[
    Hello | StageRequest | Heartbeat | Receipts | LeaseResult | MaskRequest | RoundReport
    | Applied | Ready | SyncFailed | SnapshotReady | SnapshotFailed | Leaving,
    Field(discriminator="kind"),
]  # fmt: skip


# ---------------------------------------------------------------- coordinator to client


class Welcome(FrozenModel):
    kind: Literal["welcome"] = "welcome"
    generation: Generation
    certificate: Envelope
    manifest: Annotated[str, Field(max_length=4 * 2**20)]
    """The signed manifest envelope, base64."""
    stages: tuple[StageRow, ...] = Field(max_length=512)
    directory: tuple[Address, ...] = Field(default=(), max_length=32)
    """p2pd addresses through which hivemind's DHT can be entered."""
    keep: bool = False
    """What the client already holds is current: no new stage is needed."""


class Refused(FrozenModel):
    """The run does not take this client; `code` names an entry of swarm_shared.errors."""

    kind: Literal["refused"] = "refused"
    code: Literal["admission", "version", "capacity", "protocol"]
    reason: Text


class AssignStage(FrozenModel):
    """Hold this stage at this version.

    source "fresh" initialises from the manifest's seed (version 0); "snapshot" downloads `item`
    from any of `holders` (the coordinator among them when it is a checkpoint).
    """

    kind: Literal["assign_stage"] = "assign_stage"
    stage: StageIndex
    version: Version
    source: Literal["fresh", "snapshot"]
    item: Annotated[str, Field(max_length=200)] = ""
    bytes: Count = 0
    sha256: Annotated[str, Field(pattern=r"^([0-9a-f]{64})?$")] = ""
    holders: tuple[PeerRecord, ...] = Field(default=(), max_length=64)
    reason: Text = ""


class Roster(FrozenModel):
    """Everybody who may be used, whole; a peer that is not in it is not admitted any more."""

    kind: Literal["roster"] = "roster"
    serial: Count
    peers: tuple[PeerRecord, ...] = Field(max_length=65_536)


class LeasedMicrobatch(FrozenModel):
    microbatch: MicrobatchIndex
    accumulate: Stages
    """Stages whose peers count this microbatch; the others compute and pass on."""


class Lease(FrozenModel):
    kind: Literal["lease"] = "lease"
    step: Step
    lease: Count
    mode: Literal["train", "evaluate"] = "train"
    window: Count
    """Microbatches this trainer may have in flight at once."""
    microbatches: tuple[LeasedMicrobatch, ...] = Field(max_length=65_536)


class Mask(FrozenModel):
    kind: Literal["mask"] = "mask"
    request: Count
    step: Step
    microbatch: MicrobatchIndex
    accumulate: Stages


class Reduction(FrozenModel):
    """One all-reduce of a close: the stage's own gradient, or a tied embedding's."""

    part: Literal["own", "tied"]
    members: tuple[PeerId, ...] = Field(min_length=1, max_length=4096)
    carrier: Carrier


class Close(FrozenModel):
    kind: Literal["close"] = "close"
    step: Step
    attempt: Count
    committed: Microbatches
    """What this peer holds in the coordinator's table; it must average exactly this."""
    reductions: tuple[Reduction, ...] = Field(min_length=1, max_length=2)


class AbortRound(FrozenModel):
    """This attempt is over; accumulators stay as they are and microbatches count again."""

    kind: Literal["abort_round"] = "abort_round"
    step: Step
    attempt: Count
    reason: Text


class Apply(FrozenModel):
    kind: Literal["apply"] = "apply"
    step: Step
    attempt: Count
    global_norm: float = Field(ge=0, allow_inf_nan=False)
    learning_rate: float = Field(ge=0, allow_inf_nan=False)


class SaveSnapshot(FrozenModel):
    kind: Literal["save_snapshot"] = "save_snapshot"
    version: Version
    stage: StageIndex


class Goodbye(FrozenModel):
    """The session is over by agreement: the run finished, or the leaver may go."""

    kind: Literal["goodbye"] = "goodbye"
    finished: bool = False
    reason: Text = ""


CoordinatorMessage = Annotated[
    Welcome | Refused | AssignStage | Roster | Lease | Mask | Close | AbortRound
    | Apply | SaveSnapshot | Goodbye,
    Field(discriminator="kind"),
]  # fmt: skip


# ---------------------------------------------------------------- stage to stage


class RefusalReason(StrEnum):
    BUSY = "busy"
    """The queue is full: choose another peer."""
    WRONG_STEP = "wrong_step"
    """The receiver is at another parameter version, or holds another stage."""
    NOT_ADMITTED = "not_admitted"
    """The sender may not use this peer."""
    FAILED = "failed"
    """It was tried and did not work; `detail` says why."""


class StageHello(FrozenModel):
    """Opens an edge: who I am in this run."""

    kind: Literal["stage_hello"] = "stage_hello"
    run: RunId
    certificate: Envelope


class StageHelloAnswer(FrozenModel):
    kind: Literal["stage_hello_answer"] = "stage_hello_answer"
    certificate: Envelope
    stage: StageIndex
    credits: int = Field(ge=1, le=1024)


class StageRefused(FrozenModel):
    kind: Literal["stage_refused"] = "stage_refused"
    request: Count | None = None
    reason: RefusalReason
    detail: Text = ""


class Forward(FrozenModel):
    """One microbatch enters a stage. The payload is the input followed by the targets.

    Stage 0's input are token ids (uint32, sequences × length); elsewhere the activation in the
    run's wire dtype. Targets (uint32) travel along to the last stage.
    """

    kind: Literal["forward"] = "forward"
    request: Count
    mode: Literal["train", "evaluate"] = "train"
    step: Step
    microbatch: MicrobatchIndex
    stage: StageIndex
    accumulate: Stages
    input_bytes: Count
    target_bytes: Count


class Backward(FrozenModel):
    """The answer to Forward: the payload is the gradient of its input (empty for a trainer)."""

    kind: Literal["backward"] = "backward"
    request: Count
    receipts: tuple[Envelope, ...] = Field(max_length=512)
    service_seconds: Seconds
    """Queueing and compute at this peer alone, without what is downstream of it."""
    loss_sum: float = Field(allow_inf_nan=False)
    tokens: Count


class StageCancel(FrozenModel):
    """The sender has given this request up: free what is kept for it."""

    kind: Literal["stage_cancel"] = "stage_cancel"
    request: Count


StageRequestMessage = Annotated[StageHello | Forward | StageCancel, Field(discriminator="kind")]
StageAnswerMessage = Annotated[
    StageHelloAnswer | StageRefused | Backward, Field(discriminator="kind")
]


# ---------------------------------------------------------------- transfer of files


class TransferHello(FrozenModel):
    kind: Literal["transfer_hello"] = "transfer_hello"
    run: RunId
    certificate: Envelope


class ChunkRequest(FrozenModel):
    kind: Literal["chunk_request"] = "chunk_request"
    item: Annotated[str, Field(max_length=200)]
    offset: Count
    bytes: int = Field(ge=1, le=4 * 2**20)


class ChunkAnswer(FrozenModel):
    """The payload is the chunk; `sha256` is of the chunk, `item_bytes` the size of the whole."""

    kind: Literal["chunk_answer"] = "chunk_answer"
    item: Annotated[str, Field(max_length=200)]
    offset: Count
    item_bytes: Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class TransferRefused(FrozenModel):
    kind: Literal["transfer_refused"] = "transfer_refused"
    reason: Text


TransferMessage = Annotated[
    TransferHello | ChunkRequest | ChunkAnswer | TransferRefused, Field(discriminator="kind")
]


client_messages: TypeAdapter[ClientMessage] = TypeAdapter(ClientMessage)
coordinator_messages: TypeAdapter[CoordinatorMessage] = TypeAdapter(CoordinatorMessage)
stage_requests: TypeAdapter[StageRequestMessage] = TypeAdapter(StageRequestMessage)
stage_answers: TypeAdapter[StageAnswerMessage] = TypeAdapter(StageAnswerMessage)
transfer_messages: TypeAdapter[TransferMessage] = TypeAdapter(TransferMessage)

MessageT = TypeVar("MessageT")


def parse(adapter: TypeAdapter[MessageT], header: bytes | bytearray | memoryview) -> MessageT:
    """Parse a frame's header; anything that is not exactly one known message is a FrameError."""
    try:
        return adapter.validate_json(bytes(header))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise FrameError(
            f"the remote sent a message that does not parse: {place}: {first['msg']}"
        ) from error


def encode(message: FrozenModel) -> bytes:
    """A message as a frame header."""
    return message.model_dump_json().encode()
