"""Identify: this node's key and protocols, and the remote's address as seen from here.

Libp2p's protocol (github.com/libp2p/specs/blob/master/identify), for two readers: go's p2pd asks a
relay for it before it reserves a slot, and a volunteer learns from a relay's answer under which
public address and port its own connection arrives. A remote's claims about itself are not stored.
"""

from __future__ import annotations

from typing import Final

from libp2p.identity.identify.pb.identify_pb2 import Identify
from multiaddr import Multiaddr

from swarm_shared.addresses.binary import unpack_ip_address
from swarm_shared.network.libp2p.yamux import YamuxStream
from swarm_shared.network.nat.circuit import read_message, write_message

IDENTIFY_PROTOCOL: Final = "/ipfs/id/1.0.0"
AGENT: Final = "swarmtrain/1"
_PROTOCOL_VERSION: Final = "ipfs/0.1.0"
_MAX_BYTES: Final = 64 * 1024


async def answer(
    stream: YamuxStream,
    public_key: bytes,
    addresses: tuple[str, ...],
    protocols: tuple[str, ...],
) -> None:
    """Describe this node to the remote."""
    message = Identify(
        protocol_version=_PROTOCOL_VERSION,
        agent_version=AGENT,
        public_key=public_key,
        listen_addrs=[Multiaddr(address).to_bytes() for address in addresses],
        protocols=protocols,
    )
    observed = remote_multiaddr(stream.get_remote_address())
    if observed is not None:
        message.observed_addr = Multiaddr(observed).to_bytes()
    await write_message(stream, message)
    await stream.close()


async def read_observed(stream: YamuxStream) -> str | None:
    """Return this end's address as the remote sees it: `/ip4/203.0.113.7/tcp/4001`."""
    message = await read_message(stream, Identify, _MAX_BYTES)
    return unpack_ip_address(message.observed_addr)


def remote_multiaddr(address: tuple[str, int] | None) -> str | None:
    """Format a socket's remote address as a multiaddr."""
    if address is None:
        return None
    host, port = address[0], address[1]
    host = host.removeprefix("::ffff:") if "." in host else host.partition("%")[0]
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"
