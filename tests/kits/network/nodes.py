"""Nodes on loopback for the tests of relays, paths and hole punching.

A node that does not listen cannot be dialled and cannot be punched to: what reaches it is relayed.
A node that listens, and of which only circuit addresses are told, ends with a direct connection.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import trio
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb.circuit_pb2 import HopMessage
from libp2p.relay.circuit_v2.pb.circuit_pb2 import PeerId as PeerMessage
from libp2p.stream_muxer.exceptions import MuxedStreamError

from kits.waiting import until
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import Identity
from swarm_shared.network import FramedStream, FrameLimits, Node, RelayLimits, open_node
from swarm_shared.network.libp2p.yamux import YamuxConnection, YamuxStream
from swarm_shared.network.nat.circuit import HOP_PROTOCOL, read_message, write_message

ANY_PORT = "/ip4/127.0.0.1/tcp/0"
LIMITS = FrameLimits(max_header_bytes=1000, max_payload_bytes=2**20)
ECHO = "/test/echo/1"


async def echo(stream: FramedStream) -> None:
    while True:
        frame = await stream.receive()
        await stream.send(frame.header, frame.payload)


@asynccontextmanager
async def a_node(identity: Identity | None = None, *listen: str, **options) -> AsyncIterator[Node]:
    """A node that serves ECHO to everybody."""
    async with open_node(identity or Identity.generate(), listen, **options) as node:
        node.serve(ECHO, echo, LIMITS)
        yield node


@asynccontextmanager
async def a_relay(
    limits: RelayLimits | None = None,
    allow: Callable[[PeerId], bool] = lambda peer: True,
    identity: Identity | None = None,
) -> AsyncIterator[Node]:
    async with a_node(identity, ANY_PORT) as node:
        node.serve_relay(limits or RelayLimits(), allow)
        yield node


async def hold_slot(node: Node, *relays: Node, wanted: int | None = None) -> None:
    """Returns when `node` can be reached through all of `relays`."""
    wanted = len(relays) if wanted is None else wanted
    node.use_relays({relay.peer_id: relay.addresses for relay in relays}, wanted)
    await until(lambda: len(node.relay_slots) >= wanted)


def circuit_addresses_of(node: Node) -> list[str]:
    return [address for address in node.addresses if "/p2p-circuit" in address]


def connections(node: Node, peer: Node | None = None) -> list[YamuxConnection]:
    found = node._swarm.get_connections(None if peer is None else ID.from_base58(peer.peer_id))
    return [connection.muxed_conn for connection in found]


async def says_hello(node: Node, peer: Node, addresses: object = None) -> bool:
    """Whether a frame goes to `peer` and back."""
    known = addresses if addresses is not None else circuit_addresses_of(peer) or peer.addresses
    async with await node.open_stream(peer.peer_id, ECHO, LIMITS, known) as stream:
        await stream.send(b"hello")
        return (await stream.receive(timeout_seconds=10)).header == b"hello"


# ---------------------------------------------------------------- asking a relay by hand


async def hop_stream(node: Node, relay: Node) -> YamuxStream:
    await node.connect(relay.peer_id, relay.addresses)
    return await node._links.open(relay.peer_id, HOP_PROTOCOL)


@dataclass(frozen=True)
class HopAnswer:
    status: int
    stream: YamuxStream
    message: HopMessage


async def ask_hop(node: Node, relay: Node, request: HopMessage) -> HopAnswer:
    stream = await hop_stream(node, relay)
    await write_message(stream, request)
    with trio.fail_after(10):
        answer = await read_message(stream, HopMessage)
    return HopAnswer(answer.status, stream, answer)


async def ask_slot(node: Node, relay: Node) -> HopAnswer:
    return await ask_hop(node, relay, HopMessage(type=HopMessage.RESERVE))


async def ask_circuit(node: Node, relay: Node, target: PeerId) -> HopAnswer:
    peer = PeerMessage(id=ID.from_base58(target).to_bytes())
    return await ask_hop(node, relay, HopMessage(type=HopMessage.CONNECT, peer=peer))


async def read_to_the_end(stream: YamuxStream) -> None:
    """MuxedStreamEOF or MuxedStreamReset, whichever it is."""
    while True:
        await stream.read()


async def ends(stream: YamuxStream, seconds: float = 5.0) -> bool:
    """Whether the remote ends the stream, in order or not, before so long."""
    with trio.move_on_after(seconds):
        try:
            await read_to_the_end(stream)
        except MuxedStreamError:
            return True
    return False


def noise_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)
