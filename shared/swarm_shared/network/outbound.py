"""Opening streams on the best connection to a peer, with the protocol negotiated in one round
trip."""

from __future__ import annotations

import trio
from libp2p.abc import INetStream
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.network.stream.net_stream import NetStream
from libp2p.protocol_muxer.multiselect_client import MULTISELECT_PROTOCOL_ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.network.libp2p.errors import dial_errors
from swarm_shared.network.libp2p.yamux_stream import YamuxStream
from swarm_shared.network.links import Links


class StreamOpener:
    """Opens streams to connected peers."""

    def __init__(self, links: Links) -> None:
        self._links = links

    async def open(self, peer: PeerId, protocol: str) -> NetStream:
        """Open a stream. NetworkError when the peer is not connected or does not serve the
        protocol."""
        connection = self._links.best(peer)
        if connection is None:
            raise NetworkError(f"{peer} is not connected")
        return await _open(connection, peer, protocol)

    async def open_raw(self, peer: PeerId, protocol: str) -> YamuxStream:
        """Open a stream of bytes instead of frames, for libp2p's own protocols."""
        with dial_errors(f"opening {protocol} to {peer}"):
            stream = await self.open(peer, protocol)
        muxed = stream.muxed_stream
        assert isinstance(muxed, YamuxStream), "the host runs no other muxer"
        return muxed


async def _open(connection: SwarmConn, peer: PeerId, protocol: str) -> NetStream:
    stream = await connection.new_stream()
    assert isinstance(stream, NetStream)
    await _negotiate(stream, peer, protocol)
    return stream


async def _negotiate(stream: INetStream, peer: PeerId, protocol: str) -> None:
    """Negotiate the protocol (multistream-select) in one round trip; py-libp2p takes two."""
    messages = MultiselectCommunicator(stream)
    agreed = False
    try:
        await messages.write(MULTISELECT_PROTOCOL_ID)
        await messages.write(protocol)
        if await messages.read() != MULTISELECT_PROTOCOL_ID:
            raise NetworkError(f"{peer} does not speak multistream-select")
        if await messages.read() != protocol:
            raise NetworkError(f"{peer} does not serve {protocol}")
        agreed = True
    finally:
        if not agreed:
            with trio.CancelScope(shield=True), trio.move_on_after(1):
                await stream.reset()
