"""Records that several protocols share."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.memory import StageMemory
from swarm_shared.base.types import (
    MAX_REDUCTION_MEMBERS,
    Addresses,
    CarrierPeerId,
    Count,
    Envelope,
    Flops,
    Magnitude,
    PeerId,
    ProtocolName,
    Rate,
    Seconds,
    Site,
    StageIndex,
)


class Reachability(StrEnum):
    """Whether other peers can open a connection to this peer, as a probe from outside has found."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    MAPPED = "mapped"
    """Behind a router that forwards a port to the peer, requested by UPnP or NAT-PMP."""
    BEHIND_NAT = "behind_nat"


class PathKind(StrEnum):
    """How a connection reaches its peer, in order of preference."""

    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


class LinkPath(FrozenModel):
    """The best connection of the reporting peer to a remote at present."""

    remote: PeerId
    kind: PathKind
    relay: PeerId | None = None
    rtt_seconds: Seconds
    bytes_per_second: Rate = 0.0
    """Highest recent rate, both directions together; 0 when nothing was sent."""


class CarrierAddress(FrozenModel):
    """Where a peer's p2pd can be reached; `binding` is signed by the peer's main key."""

    peer: CarrierPeerId
    addresses: Addresses
    binding: Envelope
    local: Addresses = ()
    """As in `PeerRecord`; set by the coordinator."""


class PeerRecord(FrozenModel):
    """One member of the roster, as every member may see it."""

    peer: PeerId
    stage: StageIndex
    addresses: Addresses
    certificate: Envelope
    microbatches_per_second: Magnitude
    carrier: CarrierAddress | None = None
    accepts_work: bool = True
    """False while the peer is leaving: it still averages, but receives no new microbatch."""
    reachability: Reachability = Reachability.UNKNOWN
    offers_relay: bool = False
    """Whether members may reserve slots at this peer and be dialled through it."""
    local: Addresses = ()
    """Addresses in private networks, for members of the same site only."""
    site: Site = ""


class StageRow(FrozenModel):
    """How well one stage is served; input of `most_underserved_stage`."""

    stage: StageIndex
    peers: Count
    microbatches_per_second: Magnitude
    """The sum over the stage's peers, each of which reports a `Rate`."""
    work_flops: Flops
    memory: StageMemory
    sent_bytes: Count
    """Bytes that a peer of the stage sends for a microbatch: activation and gradient."""


class LinkBytes(FrozenModel):
    """Bytes over one link of the reporting peer since it started."""

    remote: PeerId
    protocol: ProtocolName
    sent: Count
    received: Count


class Reduction(FrozenModel):
    """One all-reduce of a step close: of the stage's own gradient, or of a tied embedding's."""

    part: Literal["own", "tied"]
    members: tuple[PeerId, ...] = Field(min_length=1, max_length=MAX_REDUCTION_MEMBERS)
    weights: tuple[Annotated[int, Field(ge=0, le=2**20)], ...] = Field(
        default=(), max_length=MAX_REDUCTION_MEMBERS
    )
    """How much of the vector each member reduces, in proportion and in the members' order; empty
    for equal shares."""

    @model_validator(mode="after")
    def _every_member_has_one(self) -> Self:
        if self.weights and (len(self.weights) != len(self.members) or not any(self.weights)):
            raise ValueError("weights are for as many members, and not all of them 0")
        return self
