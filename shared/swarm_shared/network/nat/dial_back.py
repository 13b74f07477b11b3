"""Dialling a peer back as an unknown peer: the proof that the public can reach it.

py-libp2p's AutoNAT asks its own host to connect, which an existing connection satisfies. This dial
shares nothing with the node: a new key, and so another peer ID, a socket of its own from any free
port, and Noise as the proof that the very peer answers there. Then it hangs up.
"""

from __future__ import annotations

import trio
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_x25519_key_pair
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_PROTOCOL
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.transport.upgrader import TransportUpgrader

from swarm_shared.base.endpoint import Endpoint
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import public_key_of
from swarm_shared.network.libp2p.errors import dial_errors
from swarm_shared.network.libp2p.tcp import BufferedTcpStream

_HANG_UP_SECONDS = 0.5


async def dial_back(address: str, peer: PeerId, timeout_seconds: float) -> None:
    """Return when `peer` answers at `/ip4|ip6/…/tcp/…`.

    NetworkError when nothing answers or another peer does, LinkTimeout after `timeout_seconds`.
    """
    endpoint = Endpoint.parse(address)
    if endpoint is None:
        raise NetworkError(f"{address!r} is not an address such as /ip4/192.0.2.1/tcp/4001")
    public_key_of(peer)
    with dial_errors(f"dialling {endpoint.multiaddr} back"), trio.fail_after(timeout_seconds):
        stream = await trio.open_tcp_stream(str(endpoint.ip), endpoint.port)
        raw = RawConnection(BufferedTcpStream(stream), True)
        try:
            await _upgrader().upgrade_security(raw, True, ID.from_base58(peer))
        finally:
            with trio.CancelScope(shield=True), trio.move_on_after(_HANG_UP_SECONDS):
                await stream.aclose()


def _upgrader() -> TransportUpgrader:
    """Return an upgrader with Noise alone and a key made for this one dial."""
    noise = NoiseTransport(
        create_new_key_pair(), noise_privkey=create_x25519_key_pair().private_key
    )
    return TransportUpgrader({NOISE_PROTOCOL: noise}, {})
