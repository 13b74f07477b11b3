"""IP addresses: with a TCP port, as multiaddrs, and what counts as one address."""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

_MULTIADDR = re.compile(
    r"/ip([46])/([0-9a-fA-F.:]{2,45})/tcp/([0-9]{1,5})(?:/p2p/[0-9A-Za-z]{1,60})?"
)
"""With a bound for each part: others put a peer ID behind an address that counts."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    ip: IpAddress
    port: int

    @classmethod
    def parse(cls, multiaddr: str) -> Endpoint | None:
        """Parse a multiaddr such as `/ip4/192.0.2.1/tcp/4001`, with or without a peer ID at its
        end.

        None for everything else: names, relays, other transports, port 0. An IPv4 address mapped
        into IPv6 (::ffff:192.0.2.1) becomes the IPv4 address, so that equal endpoints compare
        equal.
        """
        match = _MULTIADDR.fullmatch(multiaddr)
        if match is None:
            return None
        try:
            ip = ipaddress.ip_address(match[2])
        except ValueError:
            return None
        port = int(match[3])
        if str(ip.version) != match[1] or not 0 < port < 65_536:
            return None
        mapped = ip.ipv4_mapped if isinstance(ip, ipaddress.IPv6Address) else None
        return cls(mapped or ip, port)

    @property
    def multiaddr(self) -> str:
        return f"/ip{self.ip.version}/{self.ip}/tcp/{self.port}"


def address_group(host: str) -> str:
    """Return what counts as one address: an IPv4 address, or the /64 that a household receives."""
    try:
        ip = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return str(ip.ipv4_mapped)
        return str(ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)
