"""TRANSFER_PROTOCOL: a requester and a holder; chunks of stage snapshots and of data shards."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import Count, Envelope, ItemName, RunId, Sha256, Text

TRANSFER_PROTOCOL = "/swarmtrain/transfer/1"


class TransferHello(FrozenModel):
    kind: Literal["transfer_hello"] = "transfer_hello"
    run: RunId
    certificate: Envelope


class ChunkRequest(FrozenModel):
    kind: Literal["chunk_request"] = "chunk_request"
    item: ItemName
    offset: Count
    bytes: int = Field(ge=1, le=4 * 2**20)


class ChunkAnswer(FrozenModel):
    """The payload is the chunk; `sha256` is its hash, `item_bytes` the size of the whole item."""

    kind: Literal["chunk_answer"] = "chunk_answer"
    item: ItemName
    offset: Count
    item_bytes: Count
    sha256: Sha256


class TransferRefused(FrozenModel):
    kind: Literal["transfer_refused"] = "transfer_refused"
    reason: Text


TransferMessage = Annotated[
    TransferHello | ChunkRequest | ChunkAnswer | TransferRefused, Field(discriminator="kind")
]


transfer_messages: TypeAdapter[TransferMessage] = TypeAdapter(TransferMessage)
