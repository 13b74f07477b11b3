"""Which announced addresses count: pure functions over text.

A peer announces addresses, and other peers dial them, so an announcement is an order to connect to
somewhere. The coordinator passes on only addresses at an IP that is proved to be the peer's: the
one that its session comes from, or one at which it was dialled back. Private addresses prove
nothing to other households, so they are passed on apart, for the members of the same site. Names
and transports other than TCP are passed on by none (docs/decisions, number 0033).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from swarm_shared.addresses.dial_order import CIRCUIT, Interfaces, is_global, is_global_ip
from swarm_shared.base.endpoint import Endpoint, IpAddress, address_group
from swarm_shared.base.types import PeerId

INSIDE = "inside"
"""What counts as one place for all peers that the coordinator sees at private addresses: they are
in a network of its own, or on its machine."""

SITE_BYTES = 8

_PEER_BEHIND_CIRCUIT = re.compile(r"(?:/p2p/[0-9A-Za-z]{1,60})?")

RelayAddresses = Callable[[PeerId], Sequence[str]]
"""The addresses, private ones included, at which a relay is known to be; none for other peers."""


@dataclass(frozen=True, slots=True)
class Announced:
    """The addresses that count."""

    addresses: tuple[str, ...] = ()
    """For everyone."""
    local: tuple[str, ...] = ()
    """For members of the same site."""
    unproved: tuple[Endpoint, ...] = ()
    """Global addresses at which nothing proves the peer to be."""


@dataclass(frozen=True, slots=True)
class PeerPlace:
    """Where one session of a peer comes from."""

    observed: IpAddress | None
    """Source of its connection; None over a relay."""
    coordinator: Interfaces
    """Of the coordinator's machine."""
    dialled_back: frozenset[IpAddress] = frozenset()

    @property
    def is_inside(self) -> bool:
        ip = self.observed
        return ip is not None and (not is_global_ip(ip) or ip in self.coordinator.hosts)

    def site(self, key: bytes) -> str:
        """Return an opaque name of the place, equal for peers behind one address; empty over a
        relay."""
        if self.observed is None:
            return ""
        place = INSIDE if self.is_inside else address_group(str(self.observed))
        return hashlib.blake2b(place.encode(), key=key, digest_size=SITE_BYTES).hexdigest()

    def proves(self, ip: IpAddress) -> bool:
        observed = self.observed
        if observed is not None and (observed.is_loopback or observed in self.coordinator.hosts):
            # On the coordinator's machine: all of the machine's addresses are the peer's.
            return ip == observed or ip in self.coordinator.hosts
        return ip == observed or ip in self.dialled_back

    def _accepts_local(self, ip: IpAddress) -> bool:
        # Inside, the coordinator sees private addresses themselves. Outside, a router hides them.
        return self.proves(ip) if self.is_inside else not ip.is_loopback

    def sort(self, addresses: Iterable[str], relays: RelayAddresses) -> Announced:
        """Return the announced addresses that count."""
        everyone: list[str] = []
        local: list[str] = []
        unproved: list[Endpoint] = []
        for address in dict.fromkeys(addresses):
            if CIRCUIT in address:
                if (head := _relay_address(address, relays)) is not None:
                    (everyone if is_global(head) else local).append(address)
                continue
            endpoint = Endpoint.parse(address)
            if endpoint is None:
                continue
            if not is_global_ip(endpoint.ip):
                if self._accepts_local(endpoint.ip):
                    local.append(address)
            elif self.proves(endpoint.ip):
                everyone.append(address)
            else:
                unproved.append(endpoint)
        return Announced(tuple(everyone), tuple(local), tuple(unproved))


NOWHERE = PeerPlace(None, Interfaces())
"""The place of a session whose address is not known: it proves nothing."""


def is_tcp(address: str) -> bool:
    """Whether this is an IP address with a TCP port, or a relay's with a circuit behind it."""
    head, circuit, _ = address.partition(CIRCUIT)
    return Endpoint.parse(head) is not None and (not circuit or "/p2p/" in head)


def _relay_address(address: str, relays: RelayAddresses) -> str | None:
    """Return the address of the circuit's relay, if the relay is known to be there."""
    way, _, rest = address.partition(CIRCUIT)
    head, named, relay = way.rpartition("/p2p/")
    # A peer may name itself behind the circuit; nothing else may follow there.
    ends = _PEER_BEHIND_CIRCUIT.fullmatch(rest)
    known = {address.partition("/p2p/")[0] for address in relays(PeerId(relay))}
    return head if named and ends and head in known else None
