"""The port that a home keeps."""

from __future__ import annotations

import socket

import pytest

from swarm_client.connectivity.listening import listen
from swarm_shared.base.errors import NetworkError
from swarm_shared.host.ports import LASTING_PORTS, lasting_port
from swarm_shared.identity.keys import Identity
from swarm_shared.network import open_node

ANY_PORT = "/ip4/127.0.0.1/tcp/0"


async def test_the_first_start_takes_a_port_that_it_will_find_free_again() -> None:
    async with open_node(Identity.generate()) as node:
        await listen(node, ANY_PORT, None)
        assert node.listening_port in LASTING_PORTS


async def test_the_remembered_port_is_taken_again_unless_another_program_has_it() -> None:
    port = lasting_port("127.0.0.1")
    async with open_node(Identity.generate()) as node:
        await listen(node, ANY_PORT, port)
        assert node.listening_port == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        async with open_node(Identity.generate()) as node:
            await listen(node, ANY_PORT, port)
            assert node.listening_port in set(LASTING_PORTS) - {port}


async def test_an_address_of_another_machine_is_refused_as_that() -> None:
    async with open_node(Identity.generate()) as node:
        with pytest.raises(NetworkError, match="choose another address to listen on"):
            await listen(node, "/ip4/192.0.2.77/tcp/0", None)
