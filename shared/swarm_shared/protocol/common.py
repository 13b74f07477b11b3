"""What several protocols share: bounds, records of peers and of links, parsing."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self, TypeVar

from pydantic import Field, TypeAdapter, ValidationError, model_validator

from swarm_shared.base.errors import FrameError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex

Text = Annotated[str, Field(max_length=500)]
Address = Annotated[str, Field(max_length=300)]
Envelope = Annotated[str, Field(max_length=8_192)]
"""A signed envelope in base64: certificates, receipts, carrier bindings."""
Count = Annotated[int, Field(ge=0, lt=2**53)]
MAX_MAGNITUDE = 1e100
"""Sums and products of what many peers say must stay finite, too."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=0, le=1e15, allow_inf_nan=False)]
"""Per second: of bytes, or of microbatches."""
Loss = Annotated[float, Field(ge=-MAX_MAGNITUDE, le=MAX_MAGNITUDE, allow_inf_nan=False)]
"""In nats, summed over tokens."""
Norm = Annotated[float, Field(ge=0, le=MAX_MAGNITUDE, allow_inf_nan=False)]
"""Of a gradient, or the square of it."""
Microbatches = Annotated[tuple[MicrobatchIndex, ...], Field(max_length=65_536)]
Stages = Annotated[tuple[StageIndex, ...], Field(max_length=512)]


class Reachability(StrEnum):
    """Whether others can open a connection to this peer, as a probe from outside has found."""

    UNKNOWN = "unknown"
    PUBLIC = "public"
    MAPPED = "mapped"
    """Behind a router that forwards a port to it, asked for by UPnP or NAT-PMP."""
    BEHIND_NAT = "behind_nat"


class PathKind(StrEnum):
    """The way of a connection. In order of preference."""

    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


class LinkPath(FrozenModel):
    """The best connection of the reporting peer to another one, as it is now."""

    remote: PeerId
    kind: PathKind
    relay: PeerId | None = None
    rtt_seconds: Seconds
    bytes_per_second: Rate = 0.0
    """The highest rate seen lately, both directions together; 0 when nothing was sent."""


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
    microbatches_per_second: Rate
    carrier: CarrierAddress | None = None
    accepts_work: bool = True
    """False while the peer is leaving: it still averages, but gets no new microbatch."""
    reachability: Reachability = Reachability.UNKNOWN
    offers_relay: bool = False
    """Members may reserve slots at this peer and be dialled through it."""


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


class Reduction(FrozenModel):
    """One all-reduce of a close: the stage's own gradient, or a tied embedding's."""

    part: Literal["own", "tied"]
    members: tuple[PeerId, ...] = Field(min_length=1, max_length=4096)
    weights: tuple[Annotated[int, Field(ge=0, le=2**20)], ...] = Field(default=(), max_length=4096)
    """How much each member sums, in proportion and in their order; without them all the same."""

    @model_validator(mode="after")
    def _every_member_has_one(self) -> Self:
        if self.weights and (len(self.weights) != len(self.members) or not any(self.weights)):
            raise ValueError("weights are for as many members, and not all of them 0")
        return self


MessageT = TypeVar("MessageT")


def parse(adapter: TypeAdapter[MessageT], header: bytes | bytearray | memoryview) -> MessageT:
    """Parse a frame's header; anything that is not exactly one known message is a FrameError."""
    try:
        # What the adapter's own method does, less its options, which are looked at each time.
        parsed: MessageT = adapter.validator.validate_json(bytes(header))
        return parsed
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        raise FrameError(
            f"the remote sent a message that does not parse: {place}: {first['msg']}"
        ) from error


def encode(message: FrozenModel) -> bytes:
    """A message as a frame header."""
    return message.model_dump_json().encode()
