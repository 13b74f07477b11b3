"""The carrier that is always available: streams over the daemon's own py-libp2p host.

Serves rounds in the daemon where there is no averaging worker, and, through
`swarm_client.averaging.handle.bridge`, rounds in the worker for the pairs that p2pd does not
connect. The Noise handshake of the connection authenticates streams, through a relay too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from swarm_client.averaging.all_reduce.carrier import IncomingStreams
from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.errors import LinkClosed, NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.network.framed_stream import FramedStream
from swarm_shared.network.node import Node
from swarm_shared.protocol import PathKind
from swarm_shared.protocol.framing import FrameLimits

PROTOCOL = "/swarmtrain/all-reduce/1"
CHUNK_BYTES = 256 * 1024
_LIMITS = FrameLimits(max_header_bytes=0, max_payload_bytes=CHUNK_BYTES)


class FramedChannel:
    """A byte stream in the payloads of a framed stream."""

    def __init__(self, stream: FramedStream) -> None:
        self._stream = stream
        self._rest = memoryview(b"")
        self.route = Route.HOST_RELAYED if stream.remote_address is None else Route.HOST

    async def send(self, data: bytes | memoryview) -> None:
        for offset in range(0, len(data), CHUNK_BYTES):
            await self._stream.send(b"", data[offset : offset + CHUNK_BYTES])

    async def receive(self, max_bytes: int) -> memoryview:
        while not self._rest:
            try:
                frame = await self._stream.receive()
            except LinkClosed:
                # A round treats the end and the loss of a stream alike: BYE and ABORT are frames
                # of its own.
                return memoryview(b"")
            self._rest = memoryview(frame.payload)
        chunk, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return chunk

    async def aclose(self) -> None:
        await self._stream.close()

    async def abort(self) -> None:
        await self._stream.reset()


class Libp2pAveraging:
    """Answers members' streams on `node` and opens streams to them. Satisfies
    `swarm_client.averaging.all_reduce.carrier.Carrier`."""

    def __init__(self, node: Node, addresses: Callable[[PeerId], Sequence[str]]) -> None:
        """`addresses`: the addresses of a member's host; empty if it must be connected already."""
        self._node = node
        self._addresses = addresses
        self.hub = IncomingHub()
        # The hub checks admission more strictly than the node would, and allows a stale roster a
        # moment.
        node.serve(PROTOCOL, self._serve, _LIMITS, public=True)

    async def _serve(self, stream: FramedStream) -> None:
        await self.hub.accept(stream.remote, FramedChannel(stream))

    async def open(self, peer: PeerId, *, relayed: bool = True) -> FramedChannel:
        """Open a stream. NetworkError without a connection, or with only a relayed one and
        `relayed` False."""
        addresses = self._addresses(peer)
        if not relayed:
            await self._node.connect(peer, addresses)
            path = self._node.path(peer)
            if path is not None and path.kind is PathKind.RELAYED:
                raise NetworkError("there is no direct connection to it, only a relayed one")
        stream = await self._node.open_stream(peer, PROTOCOL, _LIMITS, addresses)
        return FramedChannel(stream)

    def incoming(self, spec: RoundSpec) -> AbstractContextManager[IncomingStreams]:
        return self.hub.round(spec.tag, {peer: peer for peer in spec.members})
