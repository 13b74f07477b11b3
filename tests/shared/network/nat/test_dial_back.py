"""Dialling back: a fresh connection, from another peer, that proves who answers."""

from __future__ import annotations

import pytest
import trio

from kits.waiting import until
from shared.network.test_dialer import refusing_address, silent_address
from swarm_shared.base.errors import LinkTimeout, NetworkError
from swarm_shared.identity.keys import Identity
from swarm_shared.network import open_node
from swarm_shared.network.nat.dial_back import dial_back

ANY_PORT = "/ip4/127.0.0.1/tcp/0"


async def test_a_peer_that_listens_is_reached_and_left_alone_afterwards() -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        await dial_back(node.addresses[0], node.peer_id, 5)
        await until(lambda: not node.connected_peers, 5)


async def test_a_connection_that_is_there_already_proves_nothing() -> None:
    """What py-libp2p's AutoNAT gets wrong: the node below is connected and cannot be reached."""
    async with (
        open_node(Identity.generate(), [ANY_PORT]) as observer,
        open_node(Identity.generate()) as hidden,
    ):
        await hidden.connect(observer.peer_id, observer.addresses)
        assert observer.is_connected(hidden.peer_id)
        with pytest.raises(NetworkError, match="dialling"):
            await dial_back(refusing_address(), hidden.peer_id, 5)


async def test_somebody_else_at_the_address_is_not_the_peer() -> None:
    async with open_node(Identity.generate(), [ANY_PORT]) as node:
        with pytest.raises(NetworkError):
            await dial_back(node.addresses[0], Identity.generate().peer_id, 5)


async def test_something_that_says_nothing_is_given_up() -> None:
    with silent_address() as silent, pytest.raises(LinkTimeout):
        await dial_back(silent, Identity.generate().peer_id, 0.3)


async def test_something_that_talks_nonsense_is_a_network_error() -> None:
    async def nonsense(stream: trio.SocketStream) -> None:
        await stream.send_all(bytes(range(256)) * 400)

    async with trio.open_nursery() as nursery:
        listeners = await nursery.start(trio.serve_tcp, nonsense, 0)
        port = listeners[0].socket.getsockname()[1]
        with pytest.raises(NetworkError):
            await dial_back(f"/ip4/127.0.0.1/tcp/{port}", Identity.generate().peer_id, 5)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("address", ["", "/dns4/localhost/tcp/1", "/ip4/127.0.0.1/udp/1"])
async def test_only_plain_addresses_are_dialled(address: str) -> None:
    with pytest.raises(NetworkError, match="is not an address"):
        await dial_back(address, Identity.generate().peer_id, 1)
