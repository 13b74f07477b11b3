"""What the daemon and its averaging worker say to each other. Values only.

Frames are those of `swarm_shared.base.json_messages`. The
first message
is ConfigureAveraging; the answer is Started or Unavailable. A round ends with RoundDone or
RoundFailureReport
under its id; Publish, Lookup and Bootstrap are answered under their request number.
SetAdmittedPeers,
SetMembership and RoundInDaemon have no answer; AddressesChanged comes whenever it is true.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Base64Bytes, Field, TypeAdapter

from swarm_client.averaging.all_reduce import errors
from swarm_client.averaging.all_reduce.plan import (
    MAX_MEMBERS,
    MAX_ROUND_ID_CHARACTERS,
    PIECE_ELEMENTS,
)
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.run.codec_sizes import AverageCodec

RoundId = Annotated[str, Field(min_length=1, max_length=MAX_ROUND_ID_CHARACTERS)]
Request = Annotated[int, Field(ge=0, lt=2**53)]
Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Address = Annotated[str, Field(max_length=300)]
Addresses = Annotated[tuple[Address, ...], Field(max_length=64)]
P2pdPeerId = Annotated[str, Field(max_length=128)]
Reason = Annotated[str, Field(max_length=500)]
Key = Annotated[str, Field(min_length=1, max_length=300)]
Base64 = Annotated[str, Field(max_length=64 * 1024)]
"""A signed directory record; it is what its signature says, wherever it was found."""


# --------------------------------------------------------------------------- daemon to worker


class ConfigureAveraging(FrozenModel):
    kind: Literal["configure"] = "configure"
    identity_path: str
    """p2pd's own key; made when it is missing."""
    socket_folder: str
    """Absolute, short, private to this worker: p2pd's control sockets live in it."""
    host_addresses: Addresses = ("/ip4/0.0.0.0/tcp/0",)
    announce_addresses: Addresses = ()
    map_port_on_router: bool = False
    trusted_relays: Addresses = ()


class Member(FrozenModel):
    """`p2pd_peer_id` is empty when the member has none, or has not vouched for it."""

    peer_id: PeerId
    p2pd_peer_id: P2pdPeerId = ""
    p2pd_addresses: Addresses = ()
    routes: Annotated[tuple[Route, ...], Field(max_length=len(Route))] = ()
    """By which its streams are to be opened, best first."""


class StartRound(FrozenModel):
    """Vectors of `elements` at the same element offset of two shared segments; of what type, the
    codec says."""

    kind: Literal["start_round"] = "start_round"
    round_id: RoundId
    members: Annotated[tuple[Member, ...], Field(min_length=1, max_length=MAX_MEMBERS)]
    me: PeerId
    elements: Annotated[int, Field(ge=1, lt=2**48)]
    shares: tuple[float, ...] | None = None
    codec: AverageCodec = "none"
    piece_elements: Annotated[int, Field(ge=1, le=2**26)] = PIECE_ELEMENTS
    source_shm_name: str
    result_shm_name: str
    offset_elements: Annotated[int, Field(ge=0, lt=2**48)] = 0
    stall_seconds: Seconds
    join_seconds: Seconds


class CancelRound(FrozenModel):
    """The coordinator's word cuts a round short. No answer of its own."""

    kind: Literal["cancel_round"] = "cancel_round"
    round_id: RoundId
    reason: Reason = "the round was called off"


class RoundInDaemon(FrozenModel):
    """This round runs in the daemon: streams for it that come to the worker are turned away."""

    kind: Literal["round_in_daemon"] = "round_in_daemon"
    round_id: RoundId
    p2pd_peer_ids: Annotated[tuple[P2pdPeerId, ...], Field(max_length=MAX_MEMBERS)]


class SetAdmittedPeers(FrozenModel):
    """Whose p2pd may open streams to this one and wait for a round; nobody else's."""

    kind: Literal["admit"] = "admit"
    p2pd_peer_ids: Annotated[tuple[P2pdPeerId, ...], Field(max_length=65_536)]


class SetMembership(FrozenModel):
    """What proves in the directory that this peer belongs to the run, and who does not."""

    kind: Literal["set_membership"] = "set_membership"
    run: RunId
    organiser: PeerId
    certificate: Base64Bytes
    binding: Base64Bytes
    revoked: Annotated[tuple[PeerId, ...], Field(max_length=65_536)] = ()


class Publish(FrozenModel):
    kind: Literal["publish"] = "publish"
    request: Request
    key: Key
    subkey: Key
    value_base64: Base64
    expires_unix_seconds: float


class Lookup(FrozenModel):
    kind: Literal["lookup"] = "lookup"
    request: Request
    key: Key


class Bootstrap(FrozenModel):
    """Other workers have become known: enter the directory through them too."""

    kind: Literal["bootstrap"] = "bootstrap"
    request: Request
    initial_peers: Addresses


class Ping(FrozenModel):
    """Answered at once, whatever else goes on: who does not is frozen or stuck."""

    kind: Literal["ping"] = "ping"


class Shutdown(FrozenModel):
    kind: Literal["shutdown"] = "shutdown"


# --------------------------------------------------------------------------- worker to daemon


class Started(FrozenModel):
    kind: Literal["started"] = "started"
    p2pd_peer_id: P2pdPeerId
    addresses: tuple[str, ...]
    """Where p2pd listens, without the peer ID."""
    hivemind_version: str


class Pong(FrozenModel):
    kind: Literal["pong"] = "pong"


class AddressesChanged(FrozenModel):
    """p2pd is found at other addresses now: a relay was reached or lost, an interface came."""

    kind: Literal["moved"] = "moved"
    addresses: tuple[str, ...]


class Unavailable(FrozenModel):
    """The worker cannot serve and ends. `permanent`: a restart would not help."""

    kind: Literal["unavailable"] = "unavailable"
    reason: str
    permanent: bool


class Carried(FrozenModel):
    """What went over one stream of a round."""

    peer: PeerId
    route: Route
    bytes_sent: int
    bytes_received: int


class Fault(FrozenModel):
    """A route that was tried in vain, or broke in the round."""

    peer: PeerId
    route: Route
    reason: Reason


class RoundDone(FrozenModel):
    kind: Literal["round_done"] = "round_done"
    round_id: RoundId
    seconds: float
    carried: tuple[Carried, ...] = ()
    faults: tuple[Fault, ...] = ()


class RoundFailureReport(FrozenModel):
    kind: Literal["round_failed"] = "round_failed"
    round_id: RoundId
    reason: str
    failure: errors.RoundFailure
    culprit: PeerId | None = None
    route: Route | None = None
    carried: tuple[Carried, ...] = ()
    faults: tuple[Fault, ...] = ()


class Record(FrozenModel):
    subkey: str
    value_base64: str
    expires_unix_seconds: float


class Published(FrozenModel):
    kind: Literal["published"] = "published"
    request: Request
    stored: bool


class Found(FrozenModel):
    kind: Literal["found"] = "found"
    request: Request
    records: tuple[Record, ...]


class Bootstrapped(FrozenModel):
    kind: Literal["bootstrapped"] = "bootstrapped"
    request: Request
    reached: int


class DirectoryRequestFailed(FrozenModel):
    kind: Literal["request_failed"] = "request_failed"
    request: Request
    reason: str


DaemonMessage = Annotated[
    ConfigureAveraging
    | StartRound
    | CancelRound
    | RoundInDaemon
    | SetAdmittedPeers
    | SetMembership
    | Publish
    | Lookup
    | Bootstrap
    | Ping
    | Shutdown,
    Field(discriminator="kind"),
]
WorkerMessage = Annotated[
    Started
    | Unavailable
    | AddressesChanged
    | Pong
    | RoundDone
    | RoundFailureReport
    | Published
    | Found
    | Bootstrapped
    | DirectoryRequestFailed,
    Field(discriminator="kind"),
]
daemon_messages: TypeAdapter[DaemonMessage] = TypeAdapter(DaemonMessage)
worker_messages: TypeAdapter[WorkerMessage] = TypeAdapter(WorkerMessage)
