"""The life of a port mapping: discovery, request, renewal before it expires, release at the end.

NAT-PMP is preferred where a router has both: one datagram and no XML. Everything here is the
router's claim, of which only the plausible part is passed on; whether the mapping works is shown by
a probe from outside (`swarm_client.connectivity.reachability`).
"""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import anyio.to_thread
import trio

from swarm_client.connectivity.port_mapping import nat_pmp, upnp
from swarm_client.connectivity.port_mapping.gateway import (
    FindGateway,
    Gateway,
    default_gateway,
    is_outer_address,
)
from swarm_shared.base.errors import NetworkError

logger = logging.getLogger(__name__)

LIFETIME_SECONDS = 7200
"""Lifetime to ask for, as RFC 6886 recommends; a killed client's mapping is gone after it."""
LONGEST_RENEWAL_SECONDS = 900.0
"""Longest interval between renewals; also how soon a new external address is noticed."""
SHORTEST_RENEWAL_SECONDS = 0.5
MAP_SECONDS = 15.0
"""Timeout for a router that answers slowly."""
RELEASE_SECONDS = 1.0

MappingProtocol = Literal["nat-pmp", "upnp"]
Router = nat_pmp.NatPmpRouter | upnp.UpnpRouter
"""A gateway that answers one of the two protocols."""


class DoubleNatError(NetworkError):
    """The router is itself behind another one, so its ports are not reachable."""


@dataclass(frozen=True, slots=True)
class Mapping:
    """The router's claim to forward its external port to this machine."""

    external_address: str
    external_port: int
    internal_port: int
    protocol: MappingProtocol

    @property
    def multiaddr(self) -> str:
        return f"/ip4/{self.external_address}/tcp/{self.external_port}"


class PortMapper:
    """Call `map`, keep `run` running, and the mapping stays until `run` is cancelled."""

    def __init__(
        self,
        on_change: Callable[[Mapping | None], None] = lambda mapping: None,
        find_gateway: FindGateway = default_gateway,
        nat_pmp_port: int = nat_pmp.PORT,
    ) -> None:
        self._on_change = on_change
        self._find_gateway = find_gateway
        self._nat_pmp_port = nat_pmp_port
        self._lock = trio.Lock()
        self._gateway: Gateway | None = None
        self._router: Router | None = None
        self._expires = 0.0
        self._mapped = trio.lowlevel.ParkingLot()
        """`run`, while there is no mapping."""
        self.mapping: Mapping | None = None
        self.problem = ""
        """Why there is no mapping, for people."""
        self.double_nat = False

    async def map(self, port: int) -> Mapping | None:
        """Ask the router to forward a port to `port`; None, and `problem`, when it does not.

        Takes up to three seconds when no router answers. An existing mapping is renewed.
        """
        async with self._lock:
            with trio.move_on_after(MAP_SECONDS) as scope:
                try:
                    await self._map(port)
                except NetworkError as error:
                    self._lost(error)
            if scope.cancelled_caught:
                self._lost(NetworkError("the router did not answer in time"))
            return self.mapping

    async def run(self) -> None:
        """Renew the mapping until cancelled, then release it."""
        try:
            while True:
                if self.mapping is None:
                    await self._mapped.park()
                    continue
                # Half of the remaining lifetime (RFC 6886, 3.3), repeated while renewals fail.
                half = (self._expires - trio.current_time()) / 2
                await trio.sleep(max(SHORTEST_RENEWAL_SECONDS, min(half, LONGEST_RENEWAL_SECONDS)))
                if self.mapping is not None:
                    await self.map(self.mapping.internal_port)
        finally:
            with trio.CancelScope(shield=True):
                await self.release()

    async def release(self) -> None:
        """Release the mapping within RELEASE_SECONDS or not at all: it expires by itself."""
        mapping, router = self.mapping, self._router
        self._forget()
        if mapping is None or router is None:
            return
        with trio.move_on_after(RELEASE_SECONDS) as scope:
            try:
                await router.unmap(mapping.internal_port, mapping.external_port)
            except NetworkError as error:
                logger.info("port %d was not given back: %s", mapping.external_port, error)
        if scope.cancelled_caught:
            logger.info("the router took too long to take port %d back", mapping.external_port)

    # Mapping

    async def _map(self, port: int) -> None:
        gateway = await anyio.to_thread.run_sync(self._find_gateway, abandon_on_cancel=True)
        old = self.mapping
        if self._router is not None and (
            gateway != self._gateway or old is None or old.internal_port != port
        ):
            await self.release()
            old = None
        if gateway is None:
            raise NetworkError("this machine has no home router")
        if self._router is None:
            self._router = await _answering_router(gateway, self._nat_pmp_port)
            self._gateway = gateway
        else:
            await self._router.refresh()
        router = self._router
        _check_outer(router.external_address)
        # Prefer the same number inside and outside: then a hole that is punched for this port and
        # the mapping are the same.
        external_port, lifetime = await router.map(
            port, old.external_port if old else port, LIFETIME_SECONDS
        )
        mapping = Mapping(str(router.external_address), external_port, port, router.protocol)
        self._expires = trio.current_time() + lifetime
        self._take(mapping)

    def _take(self, mapping: Mapping) -> None:
        known, self.mapping = self.mapping, mapping
        self.problem, self.double_nat = "", False
        self._mapped.unpark_all()
        if known is None or known.multiaddr != mapping.multiaddr:
            logger.info("the router forwards %s by %s", mapping.multiaddr, mapping.protocol)
            self._on_change(mapping)

    def _lost(self, error: NetworkError) -> None:
        """A renewal that fails costs nothing before the mapping expires."""
        self.problem = str(error)
        self.double_nat = isinstance(error, DoubleNatError)
        if self.double_nat or self.mapping is None or trio.current_time() >= self._expires:
            self._forget()

    def _forget(self) -> None:
        known, self.mapping = self.mapping, None
        self._router = self._gateway = None
        if known is not None:
            self._on_change(None)


async def _answering_router(gateway: Gateway, nat_pmp_port: int) -> Router:
    """Try both protocols at once. NetworkError with both reasons when neither answers."""
    found: list[Router] = []
    reasons: list[str] = []

    async def attempt(router: Router) -> None:
        try:
            await router.refresh()
        except NetworkError as error:
            reasons.append(str(error))
        else:
            found.append(router)
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(attempt, nat_pmp.NatPmpRouter(gateway.address, nat_pmp_port))
        nursery.start_soon(attempt, upnp.UpnpRouter(gateway))
    if not found:
        raise NetworkError("; ".join(sorted(reasons)))
    return found[0]


def _check_outer(address: ipaddress.IPv4Address) -> None:
    if not is_outer_address(address):
        raise DoubleNatError(
            f"the router's external address is {address}, which cannot be reached from the "
            "internet: it is behind another router, or the provider's (double NAT)"
        )
