"""The addresses of a node: listening addresses, observed ones, and those through relays."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from multiaddr import Multiaddr

from swarm_shared.addresses.dial_order import Interfaces, is_global
from swarm_shared.base.types import PeerId
from swarm_shared.network.links import Links
from swarm_shared.network.nat.relay_client import RelayClient


class OwnAddresses:
    """A node's addresses, without its peer ID at their end."""

    def __init__(self, links: Links, relays: RelayClient) -> None:
        self.observed: dict[PeerId, str] = {}
        """This node's address and port as seen by the peers that were asked."""
        self._links = links
        self._relays = relays
        self._announced: tuple[str, ...] = ()

    def announce(self, addresses: Sequence[str]) -> bool:
        """Set addresses that only others can determine. Returns whether they have changed."""
        announced = tuple(address.split("/p2p/")[0] for address in addresses)
        changed = announced != self._announced
        self._announced = announced
        return changed

    def all(self) -> list[str]:
        """Return all addresses, circuits through relays included; loopback last."""
        own = dict.fromkeys((*self.dialable(), *self._relays.addresses))
        return sorted(own, key=lambda text: "/127." in text or "/::1/" in text)

    def dialable(self) -> tuple[str, ...]:
        """Return the addresses at which this node can be dialled without a relay."""
        return tuple(dict.fromkeys((*self._announced, *self.listening())))

    def punchable(self) -> list[str]:
        """Return the addresses that a hole punch may reach, the public ones first."""
        own = [*self._announced, *self.observed.values(), *self.listening()]
        return sorted(dict.fromkeys(own), key=lambda address: not is_global(address))

    def listening(self) -> list[str]:
        """Return the addresses at which this node listens, one for each of the machine's
        addresses."""
        return [
            dialable
            for listener in self._links.swarm.listeners.values()
            for address in listener.get_addrs()
            for dialable in _dialable(address, self._links.interfaces())
        ]

    @property
    def listening_port(self) -> int | None:
        for address in self.listening():
            return _port(address)
        return None

    def source(self, version: int) -> tuple[str, int] | None:
        """Return the local end of a dial from the listening port; None when there is none."""
        for address in self.listening():
            if address.startswith(f"/ip{version}/"):
                return ("0.0.0.0" if version == 4 else "::", _port(address))
        return None


def _port(address: str) -> int:
    return int(address.split("/tcp/")[1])


def _dialable(address: Multiaddr, interfaces: Interfaces) -> list[str]:
    """Return the address itself, or for a wildcard one for each of this machine's addresses."""
    protocols = {protocol.name for protocol in address.protocols()}
    version = "ip6" if "ip6" in protocols else "ip4"
    host, port = str(address.value_for_protocol(version)), address.value_for_protocol("tcp")
    if not ipaddress.ip_address(host).is_unspecified:
        return [f"/{version}/{host}/tcp/{port}"]
    own = sorted(interfaces.hosts, key=str)
    return [f"/{version}/{ip}/tcp/{port}" for ip in own if f"ip{ip.version}" == version]
