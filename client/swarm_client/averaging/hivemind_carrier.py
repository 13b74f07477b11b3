"""The first carrier: rounds over p2pd's streams. asyncio, inside the averaging worker.

p2pd authenticates the remote of every stream (Noise or TLS 1.3) and tells its peer ID before the
stream's first byte. That ID is p2pd's own; the daemon has checked the certificate that binds it
to the member's main key before it named it here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import anyio

from swarm_client.averaging.carrier import Arrivals, IncomingHub
from swarm_client.averaging.hivemind_door import Hivemind
from swarm_client.averaging.plan import RoundSpec
from swarm_client.averaging.protocol import Member
from swarm_shared.errors import LinkClosed, LinkTimeout, NetworkError
from swarm_shared.types import PeerId

PROTOCOL = "/swarmtrain/all-reduce/1"
OPEN_SECONDS = 15.0
WRITE_BUFFER_BYTES = 512 * 1024
"""In this process, per stream, before `send` waits: keeps p2pd fed while pieces are encoded."""

logger = logging.getLogger(__name__)


class P2pdChannel:
    """A stream of p2pd, which reaches this process over a unix socket."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        writer.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    async def send(self, data: bytes | memoryview) -> None:
        try:
            self._writer.write(data)
            await self._writer.drain()
        except (OSError, RuntimeError) as error:
            raise LinkClosed(f"p2pd has closed the stream: {error}") from error

    async def receive(self, max_bytes: int) -> bytes:
        try:
            return await self._reader.read(max_bytes)
        except OSError as error:
            raise LinkClosed(f"p2pd has dropped the stream: {error}") from error

    async def aclose(self) -> None:
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError as error:
            raise LinkClosed(f"p2pd dropped the stream at its end: {error}") from error

    async def abort(self) -> None:
        self._writer.transport.abort()
        with contextlib.suppress(OSError):
            await self._writer.wait_closed()


class HivemindAveraging:
    """Answers members' streams on one p2pd and makes the carriers of rounds."""

    def __init__(self, hivemind: Hivemind, p2p: Any) -> None:
        self._hivemind = hivemind
        self._p2p = p2p
        self.hub = IncomingHub()

    async def serve(self) -> None:
        await self._p2p.add_binary_stream_handler(PROTOCOL, self._accept)

    async def _accept(
        self, info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        try:
            await self.hub.accept(info.peer_id.to_base58(), P2pdChannel(reader, writer))
        except Exception:  # a supervisor: asyncio would only print it
            logger.exception("a stream from %s failed", info.peer_id)

    async def connect(self, p2pd_peer_id: str, addresses: Sequence[str]) -> None:
        """Make sure that p2pd is connected to another one. NetworkError if it cannot be."""
        try:
            peer = self._hivemind.PeerID.from_base58(p2pd_peer_id)
            targets = [self._hivemind.Multiaddr(_without_peer(text)) for text in addresses]
        except ValueError as error:
            raise NetworkError(f"{p2pd_peer_id} has an address that is none: {error}") from error
        try:
            with anyio.fail_after(OPEN_SECONDS):
                await self._p2p._client.connect(peer, targets)
        except TimeoutError as error:
            raise LinkTimeout(f"p2pd {p2pd_peer_id} did not answer") from error
        except self._hivemind.daemon_errors as error:
            raise NetworkError(f"p2pd {p2pd_peer_id} cannot be reached: {error}") from error

    async def open(self, p2pd_peer_id: str, addresses: Sequence[str]) -> P2pdChannel:
        await self.connect(p2pd_peer_id, addresses)
        peer = self._hivemind.PeerID.from_base58(p2pd_peer_id)
        try:
            with anyio.fail_after(OPEN_SECONDS):
                _, reader, writer = await self._p2p.call_binary_stream_handler(peer, PROTOCOL)
        except TimeoutError as error:
            raise LinkTimeout(f"p2pd {p2pd_peer_id} opened no stream in time") from error
        except self._hivemind.daemon_errors as error:
            raise NetworkError(f"p2pd {p2pd_peer_id} opened no stream: {error}") from error
        return P2pdChannel(reader, writer)

    def carrier(self, members: Sequence[Member]) -> HivemindCarrier:
        return HivemindCarrier(self, {member.peer_id: member for member in members})


class HivemindCarrier:
    """The network of one round."""

    def __init__(self, averaging: HivemindAveraging, members: Mapping[PeerId, Member]) -> None:
        self._averaging = averaging
        self._members = members

    async def open(self, peer: PeerId) -> P2pdChannel:
        member = self._members[peer]
        return await self._averaging.open(member.p2pd_peer_id, member.p2pd_addresses)

    def incoming(self, spec: RoundSpec, tag: bytes) -> AbstractContextManager[Arrivals]:
        names = {self._members[peer].p2pd_peer_id: peer for peer in spec.members}
        return self._averaging.hub.round(tag, names)


def _without_peer(address: str) -> str:
    return address.split("/p2p/")[0] if "/p2p-circuit" not in address else address
