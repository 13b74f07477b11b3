"""Which addresses the machines of a lab have.

The public ones must look public to every program: Go's libp2p leaves the blocks set aside for
documentation out of what it announces, and miniupnpd forwards no port of an outer address in any
special block. So they come from blocks that registries keep for experiments of their own; no
packet of a lab leaves its namespaces.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

Network = ipaddress.IPv4Network | ipaddress.IPv6Network

PUBLIC_IPV4 = ipaddress.IPv4Network("1.2.3.0/24")
MOVED_IPV4 = ipaddress.IPv4Network("1.1.1.0/24")
"""Where a router is found after its provider has given it another address."""
PUBLIC_IPV6 = ipaddress.IPv6Network("2620:4f:8000::/64")
_DELEGATED = 0x100
"""LANs with IPv6 get 2620:4f:8000:100::/64 and those after it."""


def lan_ipv4(index: int) -> ipaddress.IPv4Network:
    return ipaddress.IPv4Network(f"192.168.{index}.0/24")


def lan_ipv6(index: int) -> ipaddress.IPv6Network:
    base = int(PUBLIC_IPV6.network_address) + ((_DELEGATED + index) << 64)
    return ipaddress.IPv6Network((base, 64))


class Allocator:
    """Hands out a network's addresses; the first is its gateway's."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self._free: Iterator[ipaddress.IPv4Address | ipaddress.IPv6Address] = iter(network.hosts())
        self.gateway = str(next(self._free))

    def take(self) -> str:
        return str(next(self._free))

    def with_length(self, address: str) -> str:
        return f"{address}/{self.network.prefixlen}"
