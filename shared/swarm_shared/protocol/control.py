"""CONTROL_PROTOCOL: a client and the coordinator, one stream per client, both directions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
    Version,
)
from swarm_shared.protocol.common import (
    Address,
    CarrierAddress,
    Count,
    Envelope,
    LinkBytes,
    LinkPath,
    Loss,
    Microbatches,
    Norm,
    PeerRecord,
    Rate,
    Reachability,
    Reduction,
    Seconds,
    StageRow,
    Stages,
    Text,
)

CONTROL_PROTOCOL = "/swarmtrain/control/1"

MAX_LINKS = 4096
"""Of one peer, that it says and that is remembered of it."""
MAX_PATHS = 1024

# ---------------------------------------------------------------- client to coordinator


OwnerEnvelope = Annotated[str, Field(max_length=2_000)]
"""An `OwnerBinding` in base64; one has about 340 characters."""


class Hello(FrozenModel):
    """The first word of a client, again at every re-attachment."""

    kind: Literal["hello"] = "hello"
    run: RunId
    software: Annotated[str, Field(max_length=50)]
    token: Annotated[str, Field(max_length=200)] | None = None
    name: Annotated[str, Field(max_length=60)] | None = None
    team: Annotated[str, Field(max_length=40)] | None = None
    """For whom it wants its credit counted, too; whoever says the same word is in the same team."""
    owner: OwnerEnvelope | None = None
    """Signed by the key that this device belongs to; without it, it is its own owner."""
    addresses: tuple[Address, ...] = Field(max_length=32)
    carrier: CarrierAddress | None = None
    device: Text
    memory_bytes: Count
    trainer: bool = True
    reachability: Reachability = Reachability.UNKNOWN
    offers_relay: bool = False
    wanted_stage: StageIndex | None = None
    stage: StageIndex | None = None
    """The stage this client already holds, at `version`; None for a newcomer."""
    version: Version = Version(0)
    averaged_attempt: int | None = None
    """Attempt of step version + 1 whose averaged gradient this client still holds."""
    receipts: tuple[Envelope, ...] = Field(default=(), max_length=65_536)
    """All receipts of steps that are not applied yet."""


class StageRequest(FrozenModel):
    """A newcomer's own choice, made with the same function as the coordinator's."""

    kind: Literal["stage_request"] = "stage_request"
    stage: StageIndex


class Heartbeat(FrozenModel):
    """That a peer lives, and what has changed since its last one in the same session.

    None, or nothing, means: as it was said last. A session begins with nothing said, so that
    after every loss of the link, of the coordinator or of the client everything is told anew.
    """

    kind: Literal["heartbeat"] = "heartbeat"
    microbatches_per_second: Rate | None = None
    """What it computes; sending them may take longer."""
    queued: Count = 0
    up_bytes_per_second: Rate | None = None
    """What its line takes; 0 when the line has not held it up lately."""
    changed_links: tuple[LinkBytes, ...] = Field(default=(), max_length=MAX_LINKS)
    changed_paths: tuple[LinkPath, ...] = Field(default=(), max_length=MAX_PATHS)
    lost_paths: tuple[PeerId, ...] = Field(default=(), max_length=MAX_PATHS)
    """Remotes that it has no connection to any more."""
    links: tuple[LinkBytes, ...] | None = Field(default=None, max_length=MAX_LINKS)
    """All of them, from a client that does not know how to say what has changed."""
    paths: tuple[LinkPath, ...] | None = Field(default=None, max_length=MAX_PATHS)
    paused: bool = False
    """It gets no new work. What it has counted stays, and it closes steps with the others."""
    computed: Count = 0
    """Microbatches since the last heartbeat, and how long they took to compute."""
    busy_seconds: Seconds | None = None
    """None: it does not say."""

    @model_serializer(mode="wrap")
    def _only_what_is_said(self, whole: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Thousands beat every second, and most of what they could say is not."""
        fields = type(self).model_fields
        return {
            name: value
            for name, value in whole(self).items()
            if name == "kind" or getattr(self, name) != fields[name].default
        }


class AddressUpdate(FrozenModel):
    """Where this peer is found now: an address, a relay or what a probe says has changed."""

    kind: Literal["address_update"] = "address_update"
    addresses: tuple[Address, ...] = Field(max_length=32)
    carrier: CarrierAddress | None = None
    reachability: Reachability
    offers_relay: bool


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
    evaluation_loss_sum: Loss | None = None
    evaluation_tokens: Count = 0


class MaskRequest(FrozenModel):
    """Asked before a microbatch is sent again: which stages still have to accumulate it?"""

    kind: Literal["mask_request"] = "mask_request"
    request: Count
    step: Step
    microbatch: MicrobatchIndex


class RoundReport(FrozenModel):
    """How a close ended at this peer.

    When not ok, `missing` are microbatches it should hold and does not, and `reset` says that it
    emptied its accumulator, so that nothing of this step is left in it. `carrier_failed`: what
    broke was perhaps nobody's fault, and the next attempt goes around it.
    """

    kind: Literal["round_report"] = "round_report"
    step: Step
    attempt: Count
    ok: bool
    own_squared: Norm = 0.0
    tied_squared: Norm = 0.0
    reason: Text = ""
    culprit: PeerId | None = None
    carrier_failed: bool = False
    missing: Microbatches = ()
    reset: bool = False
    not_finite: bool = False
    """What was to be averaged, or came of it here, holds infinities or NaNs. With `reset` it was
    this peer's own part."""


class NotFinite(FrozenModel):
    """A computation of this peer gave infinities or NaNs, from an input that had none."""

    kind: Literal["not_finite"] = "not_finite"
    step: Step
    microbatch: MicrobatchIndex


class Applied(FrozenModel):
    kind: Literal["applied"] = "applied"
    step: Step
    digest: Annotated[str, Field(max_length=64)]
    norm: Norm


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
    Hello | StageRequest | Heartbeat | AddressUpdate | Receipts | LeaseResult | MaskRequest
    | RoundReport | NotFinite | Applied | Ready | SyncFailed | SnapshotReady | SnapshotFailed
    | Leaving,
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
    heartbeat_seconds: float | None = Field(default=None, gt=0)
    """How often to say that it lives, where that is not as often as the manifest says."""


class Refused(FrozenModel):
    """The run does not take this client; `code` names an entry of swarm_shared.base.errors."""

    kind: Literal["refused"] = "refused"
    code: Literal["admission", "version", "capacity", "protocol"]
    reason: Text


class AssignStage(FrozenModel):
    """Hold this stage at this version.

    source "fresh" initialises from the manifest's seed (version 0); "snapshot" downloads `item`
    from any of `holders` (the coordinator among them when it is a checkpoint).

    With `prepare`, the stage that is held is served on, and this one is held beside it until a
    Close names it in `moving`; the Apply of that attempt makes it the stage that is held. An Apply
    of any other attempt ends the preparation: its version is of no use any more.
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
    prepare: bool = False


class Roster(FrozenModel):
    """Everybody who may be used, whole; a peer that is not in it is not admitted any more."""

    kind: Literal["roster"] = "roster"
    serial: Count
    peers: tuple[PeerRecord, ...] = Field(max_length=65_536)
    revoked: tuple[PeerId, ...] = Field(default=(), max_length=65_536)
    """Not to be served any more although their certificates have not expired yet."""


class RosterChange(FrozenModel):
    """What is different from the roster with the number `since`, for members of large runs."""

    kind: Literal["roster_change"] = "roster_change"
    serial: Count
    since: Count
    changed: tuple[PeerRecord, ...] = Field(max_length=65_536)
    """New members, and members of whom something else is said now."""
    removed: tuple[PeerId, ...] = Field(max_length=65_536)
    revoked: tuple[PeerId, ...] | None = Field(default=None, max_length=65_536)
    """As in a roster, whole; None: as before."""


class CertificateRenewed(FrozenModel):
    """A newer certificate for the client, sent before its present one lapses."""

    kind: Literal["certificate_renewed"] = "certificate_renewed"
    certificate: Envelope


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
    """Microbatches this trainer has in flight at least, as far as there are so many."""
    max_window: Count = 0
    """And at most; between them it goes by what it measures
    (`swarm_shared.scheduling.inflight_window`)."""
    microbatches: tuple[LeasedMicrobatch, ...] = Field(max_length=65_536)


class Mask(FrozenModel):
    kind: Literal["mask"] = "mask"
    request: Count
    step: Step
    microbatch: MicrobatchIndex
    accumulate: Stages


class Close(FrozenModel):
    kind: Literal["close"] = "close"
    step: Step
    attempt: Count
    committed: Microbatches
    """What this peer holds in the coordinator's table; it must average exactly this."""
    reductions: tuple[Reduction, ...] = Field(min_length=1, max_length=2)
    moving: tuple[Reduction, ...] = Field(default=(), max_length=2)
    """Of the stage that this peer has prepared, to which it adds nothing and which it holds from
    the Apply of this attempt on. Its report is of both; its `Applied` is of the new stage."""


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


class LeaderboardEntry(FrozenModel):
    """One person of the leaderboard."""

    peer: PeerId
    """The key that its devices are bound to; of most people, that of the only device."""
    devices: tuple[PeerId, ...] = Field(default=(), max_length=16)
    """What else counts in this row; of more than so many, some."""
    name: Annotated[str, Field(max_length=60)] | None = None
    team: Annotated[str, Field(max_length=60)] | None = None
    tokens: Count
    """Counted in applied steps, in all stages that it has held."""
    credit: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    """Tokens times the share of the model's work that the stage was."""


class RunNews(FrozenModel):
    """How the run as a whole stands, for people who look. Nothing depends on it."""

    kind: Literal["run_news"] = "run_news"
    version: Version
    loss: float | None = Field(default=None, allow_inf_nan=False)
    """Nats per token in the last applied step; None also when it was not a number."""
    tokens_per_second: Rate | None = None
    waiting_for: Text = ""
    """Why no step is under way."""
    rebalancing: tuple[Text, ...] = Field(default=(), max_length=10)
    """The newest decisions, a sentence each, oldest first."""
    leaderboard: tuple[LeaderboardEntry, ...] = Field(default=(), max_length=50)
    """Who has contributed most, the first one first."""


class Goodbye(FrozenModel):
    """The session is over by agreement: the run finished, or the leaver may go."""

    kind: Literal["goodbye"] = "goodbye"
    finished: bool = False
    reason: Text = ""


CoordinatorMessage = Annotated[
    Welcome | Refused | CertificateRenewed | AssignStage | Roster | RosterChange | Lease | Mask
    | Close | AbortRound | Apply | SaveSnapshot | RunNews | Goodbye,
    Field(discriminator="kind"),
]  # fmt: skip


client_messages: TypeAdapter[ClientMessage] = TypeAdapter(ClientMessage)
coordinator_messages: TypeAdapter[CoordinatorMessage] = TypeAdapter(CoordinatorMessage)
