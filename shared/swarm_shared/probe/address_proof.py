"""The coordinator's check of announced addresses, before any member receives them.

What counts is decided by `swarm_shared.addresses.announced`. An address that the peer's
session does not prove is dialled back, once, by a key made for that dial, and counts when the very
peer answers. These dials are bounded for each household and for all, since a peer chooses where
they go.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence

import trio

from swarm_shared.addresses.announced import PeerPlace, RelayAddresses
from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.base.clock import Clock, monotonic
from swarm_shared.base.endpoint import Endpoint, IpAddress
from swarm_shared.base.errors import NetworkError
from swarm_shared.base.rate_limit import RateLimit
from swarm_shared.base.types import PeerId
from swarm_shared.network.nat.dial_back import dial_back
from swarm_shared.probe.server import address_key
from swarm_shared.protocol import AddressUpdate

log = logging.getLogger(__name__)

DIAL_SECONDS = 3.0
MAX_DIALS = 16
"""Dials at once, for all peers together."""
DIALS_PER_ANNOUNCEMENT = 2
"""An address of the other IP version, and one more."""
DIAL_BURST = 4.0
DIALS_PER_SECOND = 1 / 60
"""Dials of one household: a burst, and over the long run as many as its network changes."""
KEY_BYTES = 16

DialBackTo = Callable[[str, PeerId, float], Awaitable[None]]


class AddressProof:
    """Checks the announcements of all sessions."""

    def __init__(
        self,
        relays: RelayAddresses,
        interfaces: Callable[[], Interfaces],
        dial: DialBackTo = dial_back,
        clock: Clock = monotonic,
    ) -> None:
        """`relays`: where the coordinator and each attached peer are known to be; `interfaces`: of
        the coordinator's machine."""
        self._relays = relays
        self._interfaces = interfaces
        self._dial = dial
        self._key = os.urandom(KEY_BYTES)
        self._rate = RateLimit(DIAL_BURST, DIALS_PER_SECOND, clock=clock)
        self._dials = trio.Semaphore(MAX_DIALS)

    def place(self, remote_address: str | None) -> PeerPlace:
        """Where a session with this remote address comes from; None when it comes over a relay."""
        endpoint = None if remote_address is None else Endpoint.parse(remote_address)
        return PeerPlace(None if endpoint is None else endpoint.ip, self._interfaces())

    def checked(self, announced: AddressUpdate, place: PeerPlace) -> AddressUpdate:
        """Return the announcement as other members may see it."""
        own = place.sort(announced.addresses, self._relays)
        carrier = announced.carrier
        if carrier is not None:
            found = place.sort(carrier.addresses, self._relays)
            carrier = carrier.model_copy(
                update={"addresses": found.addresses, "local": found.local}
            )
        return announced.model_copy(
            update={
                "addresses": own.addresses, "local": own.local, "carrier": carrier,
                "site": place.site(self._key),
            }
        )  # fmt: skip

    async def dialled_back(
        self, peer: PeerId, announced: AddressUpdate, place: PeerPlace
    ) -> frozenset[IpAddress]:
        """Dial what is announced and not proved; return the IPs at which the peer answers."""
        found: set[IpAddress] = set()
        for endpoint in self._candidates(announced, place):
            key = address_key(place.observed)
            if self._rate.take(key):
                log.info("%s announces more addresses than are dialled back", peer)
                break
            async with self._dials:
                try:
                    await self._dial(endpoint.multiaddr, peer, DIAL_SECONDS)
                except NetworkError as error:
                    log.info("%s is not at %s: %s", peer, endpoint.multiaddr, error)
                else:
                    found.add(endpoint.ip)
        return frozenset(found)

    def _candidates(self, announced: AddressUpdate, place: PeerPlace) -> Sequence[Endpoint]:
        unproved = place.sort(announced.addresses, self._relays).unproved
        by_ip = {endpoint.ip: endpoint for endpoint in reversed(unproved)}
        return list(by_ip.values())[:DIALS_PER_ANNOUNCEMENT]
