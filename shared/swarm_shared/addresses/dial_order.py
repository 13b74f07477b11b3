"""Which addresses are worth dialling from this machine: pure functions over text.

A volunteer announces all of its addresses: public ones, those on its own network, relays. A dialler
tries only what can lead there: a private address means another machine in every other household.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import psutil

from swarm_shared.base.endpoint import IpAddress
from swarm_shared.base.errors import SignatureError
from swarm_shared.base.types import PeerId
from swarm_shared.identity.keys import public_key_of

IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network

CIRCUIT = "/p2p-circuit"

MAX_RELAY_ADDRESS_CHARACTERS = 170
"""Longest address of a relay: with two peer IDs behind it, it must still fit into messages, which
carry addresses of 300 characters."""

_PRIVATE = tuple(
    ipaddress.ip_network(text)
    for text in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")
)
"""RFC 1918, carrier-grade NAT (RFC 6598) and unique local (RFC 4193). Not `is_private`, which also
counts ranges that are merely reserved."""


@dataclass(frozen=True, slots=True)
class Interfaces:
    """This machine's addresses, each with its network."""

    networks: tuple[IpNetwork, ...] = ()
    hosts: frozenset[IpAddress] = frozenset()

    @classmethod
    def of_this_machine(cls) -> Interfaces:
        networks: list[IpNetwork] = []
        hosts: list[IpAddress] = []
        for entries in psutil.net_if_addrs().values():
            for entry in entries:
                try:
                    host = ipaddress.ip_address(entry.address)
                    mask = entry.netmask or ("32" if host.version == 4 else "128")
                    bits = _prefix_bits(mask)
                    network = ipaddress.ip_network(f"{host}/{bits}", strict=False)
                except ValueError:
                    # A hardware address, or a link-local one with its zone.
                    continue
                if not host.is_link_local:
                    hosts.append(host)
                    networks.append(network)
        return cls(tuple(networks), frozenset(hosts))


@dataclass(frozen=True, slots=True)
class Circuit:
    """A path through a relay: `relay_addresses` lead to `relay`, which leads to the peer."""

    relay: PeerId
    relay_addresses: tuple[str, ...]


def ip_of(address: str) -> IpAddress | None:
    """Return the IP address in `/ip4/…/tcp/…`; None for names and for anything else."""
    parts = address.split("/")
    if len(parts) < 3 or parts[0] or parts[1] not in ("ip4", "ip6"):
        return None
    try:
        ip = ipaddress.ip_address(parts[2])
    except ValueError:
        return None
    if ip.version != int(parts[1][2]):
        return None
    # `::ffff:127.0.0.1` is another spelling of an IPv4 address, and must not pass for a global one.
    return ip.ipv4_mapped or ip if isinstance(ip, ipaddress.IPv6Address) else ip


def is_private(ip: IpAddress) -> bool:
    return any(ip in network for network in _PRIVATE)


def is_global(address: str) -> bool:
    """Whether the address means the same machine everywhere."""
    ip = ip_of(address)
    return address.startswith("/dns") if ip is None else is_global_ip(ip)


def is_global_ip(ip: IpAddress) -> bool:
    return not (
        is_private(ip) or ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast
    )


def direct_addresses(addresses: Iterable[str], interfaces: Interfaces) -> list[str]:
    """Return the addresses that may lead straight to the peer, the nearest first."""
    direct = [address for address in addresses if CIRCUIT not in address]
    elsewhere = [ip for ip in map(ip_of, direct) if ip is not None and ip not in interfaces.hosts]
    near: list[str] = []
    far: list[str] = []
    here: list[str] = []
    for address in direct:
        ip = ip_of(address)
        if ip is None or is_global(address):
            far.append(address)
        elif ip.is_loopback:
            # Another machine's loopback, unless every announced address is on this machine.
            if not elsewhere or all(other.is_loopback for other in elsewhere):
                here.append(address)
        elif any(ip in network for network in interfaces.networks):
            near.append(address)
    return near + far + here


def circuits(addresses: Iterable[str]) -> list[Circuit]:
    """Return the relays through which the peer announces to be reachable, in its order."""
    found: dict[PeerId, list[str]] = {}
    for address in addresses:
        way, separator, _ = address.partition(CIRCUIT)
        head, named, relay = way.rpartition("/p2p/")
        if separator and named and _is_peer_id(relay):
            found.setdefault(PeerId(relay), []).append(head)
    return [Circuit(relay, tuple(heads)) for relay, heads in found.items()]


def circuit_addresses(relay: PeerId, relay_addresses: Sequence[str], most: int) -> tuple[str, ...]:
    """Return the addresses through `relay`; only public ones if there are any."""
    plain = [address.split("/p2p/")[0] for address in relay_addresses if CIRCUIT not in address]
    plain = [address for address in plain if len(address) <= MAX_RELAY_ADDRESS_CHARACTERS]
    public = [address for address in plain if is_global(address)]
    return tuple(f"{address}/p2p/{relay}{CIRCUIT}" for address in (public or plain)[:most])


def _is_peer_id(text: str) -> bool:
    try:
        public_key_of(PeerId(text))
    except SignatureError:
        return False
    return True


def _prefix_bits(mask: str) -> int:
    if mask.isdigit():
        return int(mask)
    return int(ipaddress.ip_address(mask)).bit_count()
