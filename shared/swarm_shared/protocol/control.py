"""CONTROL_PROTOCOL: a client and the coordinator, one stream per client, both directions."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import (
    MAX_MICROBATCHES,
    MAX_PEERS,
    MAX_STAGES,
    Addresses,
    ArithmeticClass,
    Count,
    Credit,
    Digest,
    DisplayName,
    Envelope,
    Generation,
    Instance,
    ItemName,
    Loss,
    Magnitude,
    ManifestEnvelope,
    Microbatches,
    MicrobatchIndex,
    MicrobatchPeers,
    MicrobatchReceipts,
    Norm,
    OwnerEnvelope,
    PeerId,
    Peers,
    Rate,
    ReceiptEnvelopes,
    RunId,
    Seconds,
    Seed,
    Sha256,
    Site,
    SoftwareVersion,
    StageIndex,
    Stages,
    Step,
    SumEnvelope,
    Text,
    Token,
    Version,
    WireDigest,
)
from swarm_shared.protocol.common import (
    CarrierAddress,
    LinkBytes,
    LinkPath,
    PeerRecord,
    Reachability,
    Reduction,
    StageRow,
)
from swarm_shared.protocol.versions import PROTOCOL_VERSIONS, VersionRange

CONTROL_PROTOCOL = "/swarmtrain/control/1"
"""The same in all versions (`swarm_shared.protocol.versions`): a client of any of them is answered
by a coordinator of any other."""

MAX_LINKS = 4096
"""Most links that one peer reports and that the coordinator stores for it."""
MAX_PATHS = 1024

# ---------------------------------------------------------------- client to coordinator


class Hello(FrozenModel):
    """The first message of a client, sent again at every re-attachment."""

    kind: Literal["hello"] = "hello"
    run: RunId
    software: SoftwareVersion
    protocols: VersionRange = PROTOCOL_VERSIONS
    """Versions that the client understands."""
    token: Token | None = None
    name: DisplayName | None = None
    team: DisplayName | None = None
    """Team that the credit counts for as well; peers that send the same name are in the same
    team."""
    owner: OwnerEnvelope | None = None
    """Binding signed by the key that this device belongs to; without it the device is its own
    owner."""
    addresses: Addresses
    carrier: CarrierAddress | None = None
    device: Text
    memory: MemoryOffer
    reachability: Reachability = Reachability.UNKNOWN
    offers_relay: bool = False
    wanted_stage: StageIndex | None = None
    stage: StageIndex | None = None
    """The stage this client already holds, at `version`; None for a joining peer."""
    version: Version = Version(0)
    digest: Digest = ""
    """The fingerprint's digest of that state, which only a holder of the state can compute."""
    averaged_attempt: Count | None = None
    """Attempt of step version + 1 whose averaged gradient this client still holds."""
    receipts: ReceiptEnvelopes = ()
    """All receipts of steps that are not applied yet."""
    instance: Instance = ""
    """The same in all hellos of a program that was started. Another one has this client's key too,
    as on a machine to which its home folder was copied."""
    self_tested: bool = False
    """This client's machine has passed a self-test since the client was refused."""
    local: Addresses = ()
    """As in `PeerRecord`; this and `site` are set by the coordinator, whatever was sent."""
    site: Site = ""

    @property
    def announced(self) -> AddressUpdate:
        """The addresses, as a later update of them would have them."""
        return AddressUpdate(
            addresses=self.addresses, carrier=self.carrier, reachability=self.reachability,
            offers_relay=self.offers_relay, local=self.local, site=self.site,
        )  # fmt: skip


class StageRequest(FrozenModel):
    """The stage a joining peer chose, with the same function as the coordinator's."""

    kind: Literal["stage_request"] = "stage_request"
    stage: StageIndex
    up_bytes_per_second: Rate = 0.0
    """The uplink with which it chose; 0 while unknown."""


class Heartbeat(FrozenModel):
    """A sign of life with whatever has changed since the previous heartbeat of the same session.

    None, or an empty tuple, means unchanged. A session begins with nothing reported, so that after
    every loss of the link, of the coordinator or of the client everything is reported anew.
    """

    kind: Literal["heartbeat"] = "heartbeat"
    microbatches_per_second: Rate | None = None
    """Rate of computing; sending the results may take longer."""
    queued: Count = 0
    up_bytes_per_second: Rate | None = None
    """Estimated rate of the peer's uplink; 0 while sending has not been limited by it."""
    changed_links: tuple[LinkBytes, ...] = Field(default=(), max_length=MAX_LINKS)
    changed_paths: tuple[LinkPath, ...] = Field(default=(), max_length=MAX_PATHS)
    lost_paths: tuple[PeerId, ...] = Field(default=(), max_length=MAX_PATHS)
    """Remotes to which the peer has no connection any more."""
    paused: bool = False
    """The peer receives no new work. Its accumulated gradient stays, and it still closes steps."""
    computed: Count = 0
    """Microbatches computed since the last heartbeat; `busy_seconds` is their computing time."""
    busy_seconds: Seconds | None = None
    """None when the peer does not report it."""
    arithmetic: ArithmeticClass | None = None
    """By the peer's own self-test; None also before the first stage. Shown to people only."""

    @model_serializer(mode="wrap")
    def _only_what_is_said(self, whole: SerializerFunctionWrapHandler) -> dict[str, object]:
        """Leave out every field at its default: thousands of heartbeats arrive a second, and most
        fields of most of them are unset."""
        fields, values = type(self).model_fields, vars(self)
        return {
            name: value
            for name, value in whole(self).items()
            if name == "kind" or values[name] != fields[name].default
        }


class AddressUpdate(FrozenModel):
    """A peer's current addresses, after an address, a relay or its reachability has changed."""

    kind: Literal["address_update"] = "address_update"
    addresses: Addresses
    carrier: CarrierAddress | None = None
    reachability: Reachability
    offers_relay: bool
    local: Addresses = ()
    """As in `PeerRecord`; this and `site` are set by the coordinator, whatever was sent."""
    site: Site = ""


class Receipts(FrozenModel):
    """Receipts of this peer's own work, in batches, so that they survive the death of an upstream
    peer."""

    kind: Literal["receipts"] = "receipts"
    receipts: ReceiptEnvelopes


class LeaseResult(FrozenModel):
    """A trainer's report on one leased microbatch, with the receipts that came back with it."""

    kind: Literal["lease_result"] = "lease_result"
    step: Step
    microbatch: MicrobatchIndex
    lease: Count
    ok: bool
    reason: Text = ""
    """Why it failed; empty of one that was not started, as the trainer leaves or pauses."""
    receipts: MicrobatchReceipts = ()
    owing: MicrobatchPeers = ()
    """As in the `Backward` of stage 0."""


class NotCounted(FrozenModel):
    """Microbatches that this peer has answered and will not count."""

    kind: Literal["not_counted"] = "not_counted"
    step: Step
    microbatches: Microbatches


class MaskRequest(FrozenModel):
    """A query before a microbatch is sent again: which stages still have to accumulate it?"""

    kind: Literal["mask_request"] = "mask_request"
    request: Count
    step: Step
    microbatch: MicrobatchIndex


class RoundReport(FrozenModel):
    """How a step close ended at this peer.

    When not ok, `missing` are microbatches that the peer should hold and does not, and `reset`
    states that it emptied its accumulator, so that nothing of this step is left in it.
    `carrier_failed` means that the connection between two members broke; the next attempt avoids
    it. `culprit` is the member that the peer has seen to fail, or that another member names:
    `aborted_by`, from which this one has heard of the failure.
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
    aborted_by: PeerId | None = None
    missing: Microbatches = ()
    reset: bool = False
    not_finite: bool = False
    """The peer's input of the average, or the result, holds infinities or NaNs. With `reset` it was
    this peer's own part."""


class NotFinite(FrozenModel):
    """A computation of this peer gave infinities or NaNs from an input that had none."""

    kind: Literal["not_finite"] = "not_finite"
    step: Step
    microbatch: MicrobatchIndex
    sender: PeerId
    """The peer that sent the input; finite numbers can be chosen to overflow."""


class Applied(FrozenModel):
    kind: Literal["applied"] = "applied"
    step: Step
    digest: Digest
    norm: Norm


class Ready(FrozenModel):
    """The peer holds the stage at `version`: initialised, downloaded or kept."""

    kind: Literal["ready"] = "ready"
    stage: StageIndex
    version: Version
    digest: Digest


class SyncFailed(FrozenModel):
    kind: Literal["sync_failed"] = "sync_failed"
    stage: StageIndex
    version: Version
    reason: Text


class SnapshotReady(FrozenModel):
    """A snapshot file is available by TRANSFER_PROTOCOL under `item`."""

    kind: Literal["snapshot_ready"] = "snapshot_ready"
    version: Version
    stage: StageIndex
    item: ItemName
    bytes: Count
    sha256: Sha256


class SnapshotFailed(FrozenModel):
    kind: Literal["snapshot_failed"] = "snapshot_failed"
    version: Version
    stage: StageIndex
    reason: Text


class Dropped(FrozenModel):
    """The answer to a Drop: the microbatches are in this peer's accumulator no more.

    Receipts that the peer signs afterwards are of new computations.
    """

    kind: Literal["dropped"] = "dropped"
    step: Step
    stage: StageIndex
    microbatches: Microbatches


class AuditResult(FrozenModel):
    """The answer to an Audit."""

    kind: Literal["audit_result"] = "audit_result"
    audit: Count
    statement: Envelope | None = None
    """A signed `AuditStatement`; None when this peer could not audit: `reason` says why."""
    reason: Text = ""


class SumsChecked(FrozenModel):
    """The answer to a SumCheck."""

    kind: Literal["sums_checked"] = "sums_checked"
    step: Step
    attempt: Count
    details: bool
    statement: SumEnvelope
    """A signed `SumStatement`."""


class Leaving(FrozenModel):
    """The volunteer wants to stop: it finishes what is in flight and then waits for a Goodbye."""

    kind: Literal["leaving"] = "leaving"


ClientMessage = Annotated[
    Hello | StageRequest | Heartbeat | AddressUpdate | Receipts | LeaseResult | MaskRequest
    | RoundReport | NotFinite | NotCounted | Applied | Ready | SyncFailed | SnapshotReady
    | SnapshotFailed | Dropped | AuditResult | SumsChecked | Leaving,
    Field(discriminator="kind"),
]  # fmt: skip


# ---------------------------------------------------------------- coordinator to client


class Welcome(FrozenModel):
    kind: Literal["welcome"] = "welcome"
    generation: Generation
    certificate: Envelope
    manifest: ManifestEnvelope
    stages: tuple[StageRow, ...] = Field(max_length=MAX_STAGES)
    directory: Addresses = ()
    """p2pd addresses through which hivemind's DHT can be entered."""
    keep: bool = False
    """What the client already holds is current: it needs no new stage."""
    site: Site = ""
    """The client's own, to compare with those of roster records."""
    finished: bool = False
    """The run has finished: a Goodbye follows, and the certificate lets the client fetch the model
    from the coordinator."""
    heartbeat_seconds: Annotated[Seconds, Field(gt=0, le=3600)] | None = None
    """Interval of heartbeats where it is longer than the manifest's."""


class Refused(FrozenModel):
    """The run does not admit this client; `code` names an entry of `swarm_shared.base.errors`."""

    kind: Literal["refused"] = "refused"
    code: Literal["admission", "version", "capacity", "protocol"]
    reason: Text
    retry_seconds: Annotated[Seconds, Field(le=86_400)] | None = None
    """When the client may try again, for a refusal that ends; None: soon, or never by its code."""
    self_test: bool = False
    """It ends before that for a client whose machine has passed a self-test."""


class AssignStage(FrozenModel):
    """An order to hold a stage at a version.

    source "fresh" initialises it from the manifest's seed (version 0); "snapshot" downloads `item`
    from any of `holders` (the coordinator among them when it is a checkpoint, or the manifest's own
    file of version 0).

    With `prepare`, the peer serves its present stage on and holds this one beside it until a Close
    names it in `moving`; the Apply of that attempt makes it the peer's stage. An Apply of any other
    attempt ends the preparation, because its version is outdated then.
    """

    kind: Literal["assign_stage"] = "assign_stage"
    stage: StageIndex
    version: Version
    source: Literal["fresh", "snapshot"]
    item: ItemName = ""
    bytes: Count = 0
    sha256: Sha256 | Literal[""] = ""
    holders: tuple[PeerRecord, ...] = Field(default=(), max_length=64)
    prepare: bool = False


class Roster(FrozenModel):
    """The complete list of admitted peers; a peer that is not in it is not admitted any more."""

    kind: Literal["roster"] = "roster"
    serial: Count
    peers: tuple[PeerRecord, ...] = Field(max_length=MAX_PEERS)
    revoked: Peers = ()
    """Peers that must not be served although their certificates have not expired yet."""


class RosterChange(FrozenModel):
    """The differences from the roster with the number `since`, for members of large runs."""

    kind: Literal["roster_change"] = "roster_change"
    serial: Count
    since: Count
    changed: tuple[PeerRecord, ...] = Field(max_length=MAX_PEERS)
    """New members, and members whose record has changed."""
    removed: Peers
    revoked: Peers | None = None
    """The complete list, as in a roster; None when it is unchanged."""


class CertificateRenewed(FrozenModel):
    """A newer certificate for the client, sent before the present one expires."""

    kind: Literal["certificate_renewed"] = "certificate_renewed"
    certificate: Envelope


class LeasedMicrobatch(FrozenModel):
    microbatch: MicrobatchIndex
    accumulate: Stages
    """Stages whose peers count this microbatch; other stages compute it and pass it on."""
    ticket: Envelope = ""
    """The signed `LeaseTicket` that travels with it; set by the coordinator's shell."""
    is_copy: bool = False
    """Whether it has been leased before in this step."""


class Lease(FrozenModel):
    kind: Literal["lease"] = "lease"
    step: Step
    lease: Count
    window: Count
    """Fewest microbatches the trainer keeps in flight, as far as there are so many."""
    max_window: Count = 0
    """Most microbatches in flight; between the two, the trainer's own measurement decides
    (`swarm_shared.scheduling.inflight_window`)."""
    microbatches: tuple[LeasedMicrobatch, ...] = Field(max_length=MAX_MICROBATCHES)


class Mask(FrozenModel):
    kind: Literal["mask"] = "mask"
    request: Count
    accumulate: Stages


class Close(FrozenModel):
    kind: Literal["close"] = "close"
    step: Step
    attempt: Count
    committed: Microbatches
    """The microbatches this peer holds in the coordinator's table; it must average exactly
    these."""
    reductions: tuple[Reduction, ...] = Field(min_length=1, max_length=2)
    moving: tuple[Reduction, ...] = Field(default=(), max_length=2)
    """Reductions of the stage that this peer has prepared: it adds nothing to them, and holds that
    stage from the Apply of this attempt on. Its report is about both stages; its `Applied` about
    the new one."""


class Drop(FrozenModel):
    """An order to take microbatches out of a step's accumulator, because their cells were cleared
    although the peer lives; the answer is Dropped. They may be leased again."""

    kind: Literal["drop"] = "drop"
    step: Step
    stage: StageIndex
    microbatches: Microbatches


class AuditSources(FrozenModel):
    """Peers that computed the inputs of an audited microbatch, for an audit of which the audited
    peer is not to know. Token ids and targets the auditor draws itself."""

    before: PeerId | None
    """Its output is the input; None at stage 0."""
    behind: PeerId | None
    """The gradient of its input is the output's gradient; None at the last stage."""


class Comparison(FrozenModel):
    """What an audited peer claims, for an auditor that has computed something else."""

    claimed: Transcript
    sample: Seed
    """The blocks of the gradient that are compared follow from it."""
    seconds: Seconds
    """Seconds after which the audited peer has withheld the tensors that it claims."""


class Audit(FrozenModel):
    """An order to compute a microbatch of another peer's again, and to state what came out.

    The auditor fetches the inputs by AUDIT_PROTOCOL, from the audited peer unless there are
    `sources`. They fit if their digests are `input`, `output_gradient` and, at the last stage,
    `targets`. With a `comparison` it also fetches the tensors that the claimed digests are of from
    the audited peer, of a large gradient only a sample, and states the distance to what it
    computed.
    """

    kind: Literal["audit"] = "audit"
    audit: Count
    step: Step
    microbatch: MicrobatchIndex
    stage: StageIndex
    peer: PeerId
    """The peer that is audited."""
    input: WireDigest
    output_gradient: WireDigest | Literal[""]
    targets: WireDigest | Literal[""] = ""
    """Empty but at the last stage."""
    comparison: Comparison | None = None
    sources: AuditSources | None = None
    patience_seconds: Seconds
    """Seconds after which the audited peer is asked instead of `sources`."""
    permit: Envelope = ""
    """The signed `AuditPermit` to show to these peers; set by the coordinator's shell."""
    secret: Seed | None = None
    """Also state the linear digests of the gradient as it is counted, for each check whose seed
    follows from this."""


class SumCheck(FrozenModel):
    """A query for the linear digests of what a member put into an average and took out.

    It follows the reports of all members of an attempt, so that all parts and sums are exchanged
    before the seed is known. With `details` it asks for the digests of every slice, and for those
    of what the member has received as a reducer. With `weights` these are digests of the sketches
    under `seed`, which members have stated and which do not add up.
    """

    kind: Literal["sum_check"] = "sum_check"
    step: Step
    attempt: Count
    seed: Seed
    details: bool = False
    weights: Seed | None = None


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
    global_norm: Norm
    learning_rate: Magnitude


class SaveSnapshot(FrozenModel):
    kind: Literal["save_snapshot"] = "save_snapshot"
    version: Version
    stage: StageIndex


class LeaderboardEntry(FrozenModel):
    """One owner on the leaderboard, with all of its devices."""

    peer: PeerId
    """The key that the devices are bound to; for an owner of one device mostly that device's
    own."""
    devices: tuple[PeerId, ...] = Field(default=(), max_length=16)
    """Further device keys of this owner; truncated to 16."""
    name: DisplayName | None = None
    team: DisplayName | None = None
    tokens: Count
    """Tokens counted in applied steps, over all stages the owner's devices have held."""
    credit: Credit
    audits_passed: Count = 0
    """Since its last lost one."""
    audits_lost: Count = 0


class VerdictNews(FrozenModel):
    """A lost audit."""

    step: Step
    peer: PeerId
    owner: PeerId
    reason: Text


class EvaluationNews(FrozenModel):
    """The evaluation of a checkpoint by the organiser's machine."""

    version: Version
    heldout_loss: Loss | None = None
    """Nats per held-out token; None also when it was not a number."""
    sample: Text = ""
    """The beginning of a text that the model has written."""


class RunNews(FrozenModel):
    """A summary of the whole run for people; no computation depends on it."""

    kind: Literal["run_news"] = "run_news"
    version: Version
    loss: Loss | None = None
    """Nats per token in the last applied step; None also when it was not a number."""
    tokens_per_second: Rate | None = None
    evaluation: EvaluationNews | None = None
    """Of the newest checkpoint that was evaluated."""
    waiting_for: Text = ""
    """Why no step is in progress."""
    rebalancing: tuple[Text, ...] = Field(default=(), max_length=10)
    """The newest decisions, a sentence each, oldest first."""
    leaderboard: tuple[LeaderboardEntry, ...] = Field(default=(), max_length=50)
    """The owners with the most credit, highest first."""
    probation_cells: Count = 0
    """Audits that an owner must pass before it is established."""
    verdicts: tuple[VerdictNews, ...] = Field(default=(), max_length=20)
    """The newest lost audits, oldest first."""


class Goodbye(FrozenModel):
    """The agreed end of the session: the run is finished, or the leaving peer may stop."""

    kind: Literal["goodbye"] = "goodbye"
    finished: bool = False
    reason: Text = ""


CoordinatorMessage = Annotated[
    Welcome | Refused | CertificateRenewed | AssignStage | Roster | RosterChange | Lease | Mask
    | Close | SumCheck | AbortRound | Drop | Audit | Apply | SaveSnapshot | RunNews | Goodbye,
    Field(discriminator="kind"),
]  # fmt: skip


client_messages: TypeAdapter[ClientMessage] = TypeAdapter(ClientMessage)
coordinator_messages: TypeAdapter[CoordinatorMessage] = TypeAdapter(CoordinatorMessage)
