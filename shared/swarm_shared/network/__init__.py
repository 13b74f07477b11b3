"""The only importer of py-libp2p: authenticated peers, framed streams.

    async with open_node(identity, ["/ip4/0.0.0.0/tcp/4001"]) as node:
        node.serve("/swarmtrain/echo/1", handler, FrameLimits(max_payload_bytes=2**20))
        stream = await node.open_stream(peer, "/swarmtrain/echo/1", limits, addresses=[...])
        await stream.send(header, payload)
        frame = await stream.receive(timeout_seconds=10)

Nothing outside this package imports libp2p, and none of libp2p's types leave it.
"""

from swarm_shared.network.framed_stream import AssemblyBudget, FramedStream
from swarm_shared.network.inbound import Handler
from swarm_shared.network.libp2p.bandwidth import Bandwidth
from swarm_shared.network.nat.relay_server import RelayLimits
from swarm_shared.network.node import Node, open_node
from swarm_shared.protocol.framing import Frame, FrameLimits

__all__ = [
    "AssemblyBudget",
    "Bandwidth",
    "Frame",
    "FrameLimits",
    "FramedStream",
    "Handler",
    "Node",
    "RelayLimits",
    "open_node",
]
