"""The heads of bridged streams between the daemon and its averaging worker. Values only.

Each stream of the daemon's libp2p host that the worker uses is a unix connection of its own. The
worker connects to the daemon to have a stream opened; the daemon connects to the worker to hand
over a stream that has arrived. After the head both carry the stream's bytes, and nothing else.

    worker → daemon   OpenStream
    daemon → worker   StreamOpened, then the stream, or StreamNotOpened

    daemon → worker   StreamArrived, then the stream, which begins with its HELLO

A head is a little-endian u32 length followed by that many bytes of JSON.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, TypeAdapter

from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import encode_prefixed
from swarm_shared.base.types import PeerId

DAEMON_SOCKET = "daemon.sock"
WORKER_SOCKET = "worker.sock"
MAX_HEAD_BYTES = 4096


class OpenStream(FrozenModel):
    """Request of the worker: open a stream of the daemon's host to a peer."""

    kind: Literal["open_stream"] = "open_stream"
    peer: PeerId
    relayed: bool
    """Whether a relayed connection is permitted for the stream."""


class StreamOpened(FrozenModel):
    """Answer to OpenStream: what follows on the connection is the stream."""

    kind: Literal["opened"] = "opened"
    route: Route


class StreamNotOpened(FrozenModel):
    """Answer to OpenStream: no stream could be opened."""

    kind: Literal["not_opened"] = "not_opened"
    reason: Annotated[str, Field(max_length=1000)]


class StreamArrived(FrozenModel):
    """A stream for the worker. `sender` is authenticated by the host's connection and admitted by
    the daemon."""

    kind: Literal["arrival"] = "arrival"
    sender: PeerId
    route: Route


OpenAnswer = Annotated[StreamOpened | StreamNotOpened, Field(discriminator="kind")]
open_requests: TypeAdapter[OpenStream] = TypeAdapter(OpenStream)
open_answers: TypeAdapter[StreamOpened | StreamNotOpened] = TypeAdapter(OpenAnswer)
arrivals: TypeAdapter[StreamArrived] = TypeAdapter(StreamArrived)


def encode_head(message: FrozenModel) -> bytes:
    """Encode a head behind its length."""
    return encode_prefixed(message, MAX_HEAD_BYTES)
