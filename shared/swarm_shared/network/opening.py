"""Opening a node for the length of a block: it runs beside the block and closes at its end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import trio

from swarm_shared.base.error_groups import single_error_unwrapped
from swarm_shared.identity.keys import Identity
from swarm_shared.network.libp2p.bandwidth import Bandwidth
from swarm_shared.network.libp2p.host import MAX_CONNECTIONS_PER_ADDRESS
from swarm_shared.network.node import Node

CLOSE_SECONDS = 2.0
"""Longest time to close all connections in an orderly way."""


@asynccontextmanager
async def open_node(
    identity: Identity,
    listen_addresses: Sequence[str] = (),
    *,
    max_connections: int = 10_000,
    max_inbound_streams_per_peer: int = 256,
    max_connections_per_address: int = MAX_CONNECTIONS_PER_ADDRESS,
    bandwidth: Bandwidth | None = None,
) -> AsyncIterator[Node]:
    """Run a node until the block ends; closing takes CLOSE_SECONDS at most.

    Without `listen_addresses` it can connect but not be connected to. Port 0 takes any free port.
    NetworkError when a port is not available. Several nodes may share one `bandwidth`.
    """
    node = Node(
        identity, max_connections, max_inbound_streams_per_peer, max_connections_per_address,
        bandwidth,
    )  # fmt: skip
    with single_error_unwrapped():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.run)
            try:
                await node.listen(listen_addresses)
                yield node
            finally:
                with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_SECONDS):
                    await node.close()
                nursery.cancel_scope.cancel()
