"""Messages between the daemon and its averaging worker. Values only.

The first message is ConfigureAveraging; its answer is Started or Unavailable. StartRound,
DigestReceived, Publish, Lookup, Bootstrap and Ping are answered under their request number; the
other requests have no answer. The worker sends AddressesChanged without a request. Frames and
numbers are those of `swarm_client.ipc.numbered`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Base64Encoder, ConfigDict, EncodedBytes, Field, TypeAdapter

from swarm_client.averaging.all_reduce.errors import RoundFailed, RoundFailure
from swarm_client.averaging.all_reduce.plan import (
    MAX_MEMBERS,
    RoundId,
    RoundSpec,
)
from swarm_client.averaging.all_reduce.routes import Reason, Route, RouteFault, StreamTraffic
from swarm_client.ipc.numbered import Failure, Numbered
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import (
    Address,
    CarrierPeerId,
    Count,
    LinearDigests,
    PeerId,
    Peers,
    RunId,
    Seed,
    UnixSeconds,
)
from swarm_shared.identity.signing import MAX_CREDENTIAL_BYTES

MAX_RECORDS = 4096
"""Records of the directory that one look-up returns."""

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Addresses = Annotated[tuple[Address, ...], Field(max_length=64)]
P2pdPeerId = CarrierPeerId | Literal[""]
Path = Annotated[str, Field(max_length=4096)]
SharedMemoryName = Annotated[str, Field(max_length=255)]
Key = Annotated[str, Field(min_length=1, max_length=300)]
SignedRecord = Annotated[bytes, Field(max_length=48 * 1024)]
"""A signed directory record. Its signature proves its content, wherever it was found."""
Credential = Annotated[
    bytes, Field(max_length=2 * MAX_CREDENTIAL_BYTES), EncodedBytes(encoder=Base64Encoder)
]
"""A signed envelope; its bound is that of its base64."""
Links = Annotated[tuple[StreamTraffic, ...], Field(max_length=MAX_MEMBERS * len(Route))]
Faults = Annotated[tuple[RouteFault, ...], Field(max_length=MAX_MEMBERS * len(Route))]
_BYTES_AS_BASE64 = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")


# --------------------------------------------------------------------------- daemon to worker


class ConfigureAveraging(Numbered):
    """Start p2pd and the worker's services."""

    kind: Literal["configure_averaging"] = "configure_averaging"
    identity_path: Path
    """File of p2pd's own key; created when it is missing."""
    socket_folder: Path
    """Absolute, short and private to this worker: the folder of p2pd's control sockets."""
    host_addresses: Addresses = ("/ip4/0.0.0.0/tcp/0",)
    trusted_relays: Addresses = ()


class Member(FrozenModel):
    """A member of a round. `p2pd_peer_id` is empty without a p2pd bound to the member's key."""

    peer_id: PeerId
    p2pd_peer_id: P2pdPeerId = ""
    p2pd_addresses: Addresses = ()
    routes: Annotated[tuple[Route, ...], Field(max_length=len(Route))] = ()
    """Routes to the member, best first."""


class StartRound(Numbered):
    """Run one attempt at a round: RoundDone or RoundFailureReport.

    Source and result are vectors at the same element offset of two shared segments; the codec
    determines the element type. Where that is `exact`, what the other members put into this
    member's slice is kept until ForgetRounds.
    """

    kind: Literal["start_round"] = "start_round"
    spec: RoundSpec
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    source_shm_name: SharedMemoryName
    result_shm_name: SharedMemoryName
    offset_elements: Annotated[int, Field(ge=0, lt=2**48)] = 0
    stall_seconds: Seconds
    join_seconds: Seconds


class CancelRound(Numbered):
    """Cancel the StartRound with this request number. No answer of its own."""

    kind: Literal["cancel_round"] = "cancel_round"


class DigestReceived(Numbered):
    """Compute the linear digests of what the other members put into this member's slice of a round
    that is done: ReceivedDigested, or RoundFailureReport if it is not kept. With `weights` they are
    those of sketches (`swarm_shared.identity.norm_sketch`)."""

    kind: Literal["digest_received"] = "digest_received"
    round_id: RoundId
    seed: Seed
    part: Literal["own", "tied"]
    weights: Seed | None = None


class ForgetRounds(Numbered):
    """Drop what is kept of all rounds that are done."""

    kind: Literal["forget_rounds"] = "forget_rounds"


class RoundInDaemon(Numbered):
    """Refuse streams of a round that runs in the daemon."""

    kind: Literal["round_in_daemon"] = "round_in_daemon"
    round_id: RoundId
    p2pd_peer_ids: Annotated[tuple[P2pdPeerId, ...], Field(max_length=MAX_MEMBERS)]


class SetAdmittedPeers(Numbered):
    """Set the p2pds that may open streams to this one and wait for a round; all others may not."""

    kind: Literal["set_admitted_peers"] = "set_admitted_peers"
    p2pd_peer_ids: Annotated[tuple[P2pdPeerId, ...], Field(max_length=65_536)]


class SetMembership(Numbered):
    """Set this peer's proof of membership for the directory, the revoked peers, and the run's time
    now."""

    kind: Literal["set_membership"] = "set_membership"
    run: RunId
    organiser: PeerId
    certificate: Credential
    binding: Credential
    revoked: Peers = ()
    unix_seconds: UnixSeconds


class Publish(Numbered):
    """Store a record in the directory: Published."""

    model_config = _BYTES_AS_BASE64
    kind: Literal["publish"] = "publish"
    key: Key
    subkey: Key
    value: SignedRecord
    expires_unix_seconds: UnixSeconds


class Lookup(Numbered):
    """Find the records under a key of the directory: Found."""

    kind: Literal["lookup"] = "lookup"
    key: Key


class Bootstrap(Numbered):
    """Enter the directory through these workers too: Bootstrapped."""

    kind: Literal["bootstrap"] = "bootstrap"
    initial_peers: Addresses


class Ping(Numbered):
    """Answered at once with Pong, unless the worker is frozen or stuck."""

    kind: Literal["ping"] = "ping"


class Shutdown(Numbered):
    """End the worker. Rounds under way fail."""

    kind: Literal["shutdown"] = "shutdown"


# --------------------------------------------------------------------------- worker to daemon


class Started(Numbered):
    """Answer to ConfigureAveraging: the worker serves."""

    kind: Literal["started"] = "started"
    p2pd_peer_id: P2pdPeerId
    addresses: Addresses
    """Listen addresses of p2pd, without the peer ID."""


class Unavailable(Numbered):
    """Answer to ConfigureAveraging: the worker cannot serve and ends. If `permanent`, a restart
    would not help."""

    kind: Literal["unavailable"] = "unavailable"
    reason: Reason
    permanent: bool


class AddressesChanged(Numbered):
    """New addresses of p2pd, after a relay was reached or lost or an interface appeared."""

    kind: Literal["addresses_changed"] = "addresses_changed"
    addresses: Addresses


class Pong(Numbered):
    """Answer to Ping."""

    kind: Literal["pong"] = "pong"


class RoundDone(Numbered):
    """Answer to StartRound: the result segment holds the sum."""

    kind: Literal["round_done"] = "round_done"
    links: Links = ()
    faults: Faults = ()


class ReceivedDigested(Numbered):
    """Answer to DigestReceived: one digest per other member, in the group's order."""

    kind: Literal["received_digested"] = "received_digested"
    digests: LinearDigests


class RoundFailureReport(Failure):
    """Answer to StartRound: the round has failed."""

    kind: Literal["round_failed"] = "round_failed"
    reason: Reason
    failure: RoundFailure
    culprit: PeerId | None = None
    route: Route | None = None
    aborted_by: PeerId | None = None
    links: Links = ()
    faults: Faults = ()

    @classmethod
    def from_failure(cls, failure: RoundFailed) -> RoundFailureReport:
        """Return the answer that carries a failure to the daemon."""
        return cls(**vars(failure))

    def error(self) -> RoundFailed:
        """Return the failure that the answer carries."""
        failed = RoundFailed(
            self.reason, self.culprit, failure=self.failure, route=self.route,
            aborted_by=self.aborted_by,
        )  # fmt: skip
        failed.links, failed.faults = self.links, self.faults
        return failed


class Record(FrozenModel):
    """A record of the directory."""

    model_config = _BYTES_AS_BASE64
    subkey: Key
    value: SignedRecord


class Published(Numbered):
    """Answer to Publish."""

    kind: Literal["published"] = "published"
    stored: bool


class Found(Numbered):
    """Answer to Lookup."""

    kind: Literal["found"] = "found"
    records: Annotated[tuple[Record, ...], Field(max_length=MAX_RECORDS)]


class Bootstrapped(Numbered):
    """Answer to Bootstrap: the number of workers that answered."""

    kind: Literal["bootstrapped"] = "bootstrapped"
    reached: Count


class DirectoryRequestFailed(Failure):
    """Answer to a directory request that failed."""

    kind: Literal["directory_request_failed"] = "directory_request_failed"
    reason: Reason

    def error(self) -> NetworkError:
        """Return the failure that the answer carries."""
        return NetworkError(f"the directory did not answer: {self.reason}")


DaemonMessage = Annotated[
    ConfigureAveraging | StartRound | CancelRound | DigestReceived | ForgetRounds | RoundInDaemon
    | SetAdmittedPeers | SetMembership | Publish | Lookup | Bootstrap | Ping | Shutdown,
    Field(discriminator="kind"),
]  # fmt: skip
WorkerMessage = Annotated[
    Started | Unavailable | AddressesChanged | Pong | RoundDone | ReceivedDigested
    | RoundFailureReport | Published | Found | Bootstrapped | DirectoryRequestFailed,
    Field(discriminator="kind"),
]  # fmt: skip
daemon_messages: TypeAdapter[DaemonMessage] = TypeAdapter(DaemonMessage)
worker_messages: TypeAdapter[WorkerMessage] = TypeAdapter(WorkerMessage)
