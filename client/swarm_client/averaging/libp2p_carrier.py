"""The second carrier: rounds over the daemon's own py-libp2p host.

Serves where p2pd is missing or cannot connect; no other process is needed. Streams are
authenticated by the connection's Noise handshake. One `Libp2pAveraging` per node; a carrier per
round, which knows the members' addresses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from swarm_client.averaging.carrier import Arrivals, IncomingHub
from swarm_client.averaging.plan import RoundSpec
from swarm_shared.errors import LinkClosed
from swarm_shared.network.node import Node
from swarm_shared.network.stream import FramedStream
from swarm_shared.types import PeerId
from swarm_shared.wire import FrameLimits

PROTOCOL = "/swarmtrain/all-reduce/1"
CHUNK_BYTES = 256 * 1024
_LIMITS = FrameLimits(max_header_bytes=0, max_payload_bytes=CHUNK_BYTES)


class FramedChannel:
    """A byte stream in the payloads of a framed stream."""

    def __init__(self, stream: FramedStream) -> None:
        self._stream = stream
        self._rest = memoryview(b"")

    async def send(self, data: bytes | memoryview) -> None:
        for offset in range(0, len(data), CHUNK_BYTES):
            await self._stream.send(b"", data[offset : offset + CHUNK_BYTES])

    async def receive(self, max_bytes: int) -> memoryview:
        while not self._rest:
            try:
                frame = await self._stream.receive()
            except LinkClosed:
                # Ended and lost are the same to a round: it says goodbye in its own frames.
                return memoryview(b"")
            self._rest = memoryview(frame.payload)
        chunk, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return chunk

    async def aclose(self) -> None:
        await self._stream.close()

    async def abort(self) -> None:
        await self._stream.reset()


class Libp2pAveraging:
    """Answers members' streams on `node` and makes the carriers of rounds."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.hub = IncomingHub()
        node.serve(PROTOCOL, self._serve, _LIMITS)

    async def _serve(self, stream: FramedStream) -> None:
        await self.hub.accept(stream.remote, FramedChannel(stream))

    def carrier(self, addresses: Mapping[PeerId, Sequence[str]]) -> Libp2pCarrier:
        """For one round; members without addresses must be connected already."""
        return Libp2pCarrier(self._node, self.hub, addresses)


class Libp2pCarrier:
    """The network of one round."""

    def __init__(
        self, node: Node, hub: IncomingHub, addresses: Mapping[PeerId, Sequence[str]]
    ) -> None:
        self._node = node
        self._hub = hub
        self._addresses = addresses

    async def open(self, peer: PeerId) -> FramedChannel:
        addresses = self._addresses.get(peer, ())
        return FramedChannel(await self._node.open_stream(peer, PROTOCOL, _LIMITS, addresses))

    def incoming(self, spec: RoundSpec, tag: bytes) -> AbstractContextManager[Arrivals]:
        return self._hub.round(tag, {peer: peer for peer in spec.members})
