"""A network inside one process, for simulations and tests: same rules, no sockets."""

from __future__ import annotations

from contextlib import AbstractContextManager

import anyio
import anyio.abc
import anyio.lowlevel
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from swarm_client.averaging.all_reduce.carrier import IncomingStreams
from swarm_client.averaging.all_reduce.incoming import IncomingHub
from swarm_client.averaging.all_reduce.plan import RoundSpec
from swarm_client.averaging.all_reduce.routes import Route
from swarm_shared.base.errors import LinkClosed, NetworkError
from swarm_shared.base.types import PeerId

_CHUNKS_IN_FLIGHT = 4


class MemoryChannel:
    """One end of an in-process stream."""

    route = Route.HOST

    def __init__(
        self,
        outgoing: MemoryObjectSendStream[bytes],
        incoming: MemoryObjectReceiveStream[bytes],
        broken: anyio.Event,
    ) -> None:
        self._outgoing = outgoing
        self._incoming = incoming
        self._broken = broken
        self._rest = memoryview(b"")

    @classmethod
    def pair(cls) -> tuple[MemoryChannel, MemoryChannel]:
        there, from_here = anyio.create_memory_object_stream[bytes](_CHUNKS_IN_FLIGHT)
        back, from_there = anyio.create_memory_object_stream[bytes](_CHUNKS_IN_FLIGHT)
        broken = anyio.Event()
        return cls(there, from_there, broken), cls(back, from_here, broken)

    async def send(self, data: bytes | memoryview) -> None:
        if self._broken.is_set():
            raise LinkClosed("the stream was dropped")
        try:
            await self._outgoing.send(bytes(data))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError) as error:
            raise LinkClosed("the other end of the stream is closed") from error

    async def receive(self, max_bytes: int) -> memoryview:
        if not self._rest:
            if self._broken.is_set():
                raise LinkClosed("the stream was dropped")
            try:
                self._rest = memoryview(await self._incoming.receive())
            except anyio.EndOfStream:
                return memoryview(b"")
            except anyio.ClosedResourceError as error:
                raise LinkClosed("this end of the stream is closed") from error
        chunk, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return chunk

    async def aclose(self) -> None:
        # What was sent stays in the stream until the other end takes it.
        self._outgoing.close()
        self._incoming.close()

    async def abort(self) -> None:
        self._broken.set()
        self._outgoing.close()
        self._incoming.close()


class MemoryNetwork:
    """Peers of one process by name. `tasks` carries the incoming streams."""

    def __init__(self, tasks: anyio.abc.TaskGroup) -> None:
        self._tasks = tasks
        self._hubs: dict[PeerId, IncomingHub] = {}

    def add(self, peer: PeerId, *, park_seconds: float = 30.0) -> MemoryCarrier:
        self._hubs[peer] = IncomingHub(park_seconds=park_seconds)
        return MemoryCarrier(self, peer, self._hubs[peer])

    async def connect(
        self, origin: PeerId, target: PeerId, channel_type: type[MemoryChannel] = MemoryChannel
    ) -> MemoryChannel:
        await anyio.lowlevel.checkpoint()
        hub = self._hubs.get(target)
        if hub is None:
            raise NetworkError(f"there is no peer {target}")
        ours, theirs = channel_type.pair()
        self._tasks.start_soon(hub.accept, origin, theirs)
        return ours


class MemoryCarrier:
    """A member's view of a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, peer: PeerId, hub: IncomingHub) -> None:
        self._network = network
        self._peer = peer
        self.hub = hub
        self.channel_type = MemoryChannel

    async def open(self, peer: PeerId) -> MemoryChannel:
        return await self._network.connect(self._peer, peer, self.channel_type)

    def incoming(self, spec: RoundSpec) -> AbstractContextManager[IncomingStreams]:
        return self.hub.round(spec.tag, {peer: peer for peer in spec.members})
