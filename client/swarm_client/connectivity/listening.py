"""Listening on one port that a home keeps: routers remember mappings of a port, and hole punching
targets it."""

from __future__ import annotations

import contextlib
import logging

from swarm_shared.base.errors import NetworkError
from swarm_shared.host.ports import lasting_port
from swarm_shared.network import Node

log = logging.getLogger(__name__)


async def listen(node: Node, address: str, remembered_port: int | None) -> None:
    """Listen at `address`, whose port 0 stands for the remembered port, or for another lasting one
    if that is taken. With all IPv4 addresses, listen on the same port of all IPv6 addresses.

    NetworkError when it is not possible to listen there.
    """
    if address.endswith("/tcp/0"):
        any_port = address.removesuffix("0")
        if remembered_port is not None:
            with contextlib.suppress(NetworkError):
                await node.listen([f"{any_port}{remembered_port}"])
        if node.listening_port is None:
            address = f"{any_port}{lasting_port(address.split('/')[2])}"
    if node.listening_port is None:
        await node.listen([address])
    if address.startswith("/ip4/0.0.0.0/"):
        try:
            await node.listen([f"/ip6/::/tcp/{node.listening_port}"])
        except NetworkError as error:
            log.info("no IPv6 on this machine: %s", error)
