"""TRANSFER_PROTOCOL: a requester and a holder; chunks of files, and leaves of the training data."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MAX_SHARDS, Count, Envelope, ItemName, RunId, Sha256, Text

TRANSFER_PROTOCOL = "/swarmtrain/transfer/1"

MAX_LEAVES_ASKED = 32
"""Most leaves of one request; with their proofs at most 540 KiB, so that one answer is little
memory at either end."""


MAX_CHUNK_BYTES = 2**20
"""Most bytes of a file in one answer."""


class TransferHello(FrozenModel):
    kind: Literal["transfer_hello"] = "transfer_hello"
    run: RunId
    certificate: Envelope


class ChunkRequest(FrozenModel):
    kind: Literal["chunk_request"] = "chunk_request"
    item: ItemName
    offset: Count
    bytes: int = Field(ge=1, le=MAX_CHUNK_BYTES)


class ChunkAnswer(FrozenModel):
    """The payload is the chunk; `sha256` is its hash, `item_bytes` the size of the whole item."""

    kind: Literal["chunk_answer"] = "chunk_answer"
    item: ItemName
    offset: Count
    item_bytes: Count
    sha256: Sha256


class WantedLeaf(FrozenModel):
    """A leaf of the training data (`swarm_shared.data.merkle`)."""

    shard: int = Field(ge=0, lt=MAX_SHARDS)
    """The shard's place in the manifest."""
    leaf: int = Field(ge=0, lt=2**28)
    """The leaf's place in the shard."""


class LeafRequest(FrozenModel):
    kind: Literal["leaf_request"] = "leaf_request"
    leaves: tuple[WantedLeaf, ...] = Field(min_length=1, max_length=MAX_LEAVES_ASKED)
    content: bool
    """Whether the leaves are wanted, or only their proofs, because a mirror has the leaves."""


class LeafAnswer(FrozenModel):
    """The payload has for each leaf its proof, and then its bytes if they were asked for. Lengths
    follow from the manifest."""

    kind: Literal["leaf_answer"] = "leaf_answer"


class TransferRefused(FrozenModel):
    kind: Literal["transfer_refused"] = "transfer_refused"
    reason: Text


TransferMessage = Annotated[
    TransferHello | ChunkRequest | ChunkAnswer | LeafRequest | LeafAnswer | TransferRefused,
    Field(discriminator="kind"),
]


transfer_messages: TypeAdapter[TransferMessage] = TypeAdapter(TransferMessage)
