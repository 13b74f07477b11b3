"""This machine's default gateway, and which external addresses are plausible for a home router.

Only the default gateway is ever asked for a mapping: in a shared network any other host may answer,
and would learn, or decide, where this machine's traffic goes.
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swarm_shared.addresses.dial_order import is_global_ip, is_private

_ROUTES = Path("/proc/net/route")
_UP_AND_GATEWAY = 0x1 | 0x2  # include/uapi/linux/route.h
_ROUTE_TOOL_SECONDS = 1.0
_MAX_ROUTE_TABLE_CHARACTERS = 1 << 20

_NOT_AN_OUTER_ADDRESS = tuple(
    ipaddress.ip_network(text)
    for text in (
        "0.0.0.0/8",
        "192.0.0.0/24",  # between a router and its provider's translator (RFC 6333)
        "198.18.0.0/15",  # benchmarks of devices (RFC 2544)
        "240.0.0.0/4",
    )
)
"""Networks that are not external addresses, besides the private ones. Documentation blocks count as
public, for laboratory tests: no home has one."""


@dataclass(frozen=True, slots=True)
class Gateway:
    """The router, and this machine's own address towards it."""

    address: ipaddress.IPv4Address
    own_address: ipaddress.IPv4Address


FindGateway = Callable[[], Gateway | None]


def default_gateway() -> Gateway | None:
    """The IPv4 default gateway if it is in a private network, as a home router is.

    Any other one is a provider's: it maps no ports and must not be asked. May take a second where a
    program has to be run; call it in a thread.
    """
    address = _linux_gateway() if sys.platform == "linux" else _route_tool_gateway()
    if address is None or not is_private(address):
        return None
    own = own_address_towards(address)
    return None if own is None else Gateway(address, own)


def own_address_towards(address: ipaddress.IPv4Address) -> ipaddress.IPv4Address | None:
    """Source address of packets to `address`; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((str(address), 9))
        except OSError:
            return None
        return ipaddress.IPv4Address(probe.getsockname()[0])


def is_outer_address(address: ipaddress.IPv4Address) -> bool:
    """Whether a router with this address can be reached from the internet."""
    return is_global_ip(address) and not any(
        address in network for network in _NOT_AN_OUTER_ADDRESS
    )


def parse_linux_routes(table: str) -> ipaddress.IPv4Address | None:
    """The gateway of the default route with the lowest metric in /proc/net/route."""
    best: tuple[int, ipaddress.IPv4Address] | None = None
    for line in table[:_MAX_ROUTE_TABLE_CHARACTERS].splitlines()[1:]:
        fields = line.split()
        if len(fields) < 8:
            continue
        try:
            destination, gateway, flags, mask = (int(fields[i], 16) for i in (1, 2, 3, 7))
            metric = int(fields[6])
            # The kernel prints the address in this machine's byte order.
            address = ipaddress.IPv4Address(struct.pack("=I", gateway))
        except (ValueError, struct.error):
            continue
        if destination or mask or flags & _UP_AND_GATEWAY != _UP_AND_GATEWAY:
            continue
        if best is None or metric < best[0]:
            best = (metric, address)
    return None if best is None else best[1]


def parse_route_tool(text: str) -> ipaddress.IPv4Address | None:
    """The gateway in the output of `route -n get default` on macOS and the BSDs."""
    found = re.search(r"^\s*gateway:\s*([0-9.]{7,15})\s*$", text, re.MULTILINE)
    try:
        return None if found is None else ipaddress.IPv4Address(found[1])
    except ValueError:
        return None


def _linux_gateway() -> ipaddress.IPv4Address | None:
    try:
        return parse_linux_routes(_ROUTES.read_text())
    except OSError:
        return None


def _route_tool_gateway() -> ipaddress.IPv4Address | None:
    try:
        done = subprocess.run(
            ["/sbin/route", "-n", "get", "default"],
            capture_output=True, text=True, timeout=_ROUTE_TOOL_SECONDS, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_route_tool(done.stdout)
