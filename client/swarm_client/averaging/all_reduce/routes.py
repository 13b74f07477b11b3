"""Routes over which a stream reaches a member, and the memory of routes that failed. Pure.

Two carriers, each with or without a relay in between, make four routes. The member that opens a
stream tries them in order of preference. Routes that failed recently are backed off and come last,
so that a pair never runs out of routes to try.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated

from pydantic import Field

from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.clock import Clock
from swarm_shared.base.types import Count, PeerId

FIRST_ROUTE_BACKOFF_SECONDS = 60.0
MAX_ROUTE_BACKOFF_SECONDS = 15 * 60.0
_MAX_FAULTS = 4096

Reason = Annotated[str, Field(max_length=64 * 1024)]
"""An error of this machine as text."""


class Route(StrEnum):
    """A route to a member. The values are in order of preference."""

    P2PD = "p2pd"
    """hivemind's p2pd at both ends, connected directly."""
    HOST = "host"
    """The daemons' libp2p hosts, over a direct or a hole-punched connection."""
    P2PD_RELAYED = "p2pd_relayed"
    HOST_RELAYED = "host_relayed"
    """As a route to try: a connection of the hosts, of any kind. As that of an open stream: a
    relayed one."""

    @property
    def over_p2pd(self) -> bool:
        return self in (Route.P2PD, Route.P2PD_RELAYED)


@dataclass(frozen=True, slots=True)
class RouteFault:
    """A route to `peer` that failed to open, or broke."""

    peer: PeerId
    route: Route
    reason: Reason


@dataclass(frozen=True, slots=True)
class StreamTraffic:
    """Bytes carried by one stream of a round."""

    peer: PeerId
    route: Route
    bytes_sent: Count
    bytes_received: Count


def possible_routes(
    *, both_have_p2pd: bool, p2pd_relays: bool, host_is_relayed: bool
) -> list[Route]:
    """The routes to try, best first.

    `p2pd_relays`: the other end's p2pd can be dialled through a relay. `host_is_relayed`: the
    host's connection is known to be relayed, so that asking for a better one would only cost time.
    """
    routes = [Route.P2PD] if both_have_p2pd else []
    if both_have_p2pd and p2pd_relays:
        # Without p2pd's relay between them, the host's two routes would follow one another.
        routes += [Route.P2PD_RELAYED] if host_is_relayed else [Route.HOST, Route.P2PD_RELAYED]
    return [*routes, Route.HOST_RELAYED]


@dataclass(slots=True)
class _Backoff:
    faults: int
    until: float
    addresses: tuple[str, ...]


class RouteMemory:
    """The failed routes of one peer to others, with back-off. A restart clears it, which does no
    harm."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._backoffs: OrderedDict[tuple[PeerId, Route], _Backoff] = OrderedDict()

    def order(
        self, peer: PeerId, routes: Sequence[Route], addresses: tuple[str, ...] = ()
    ) -> tuple[Route, ...]:
        """Order `routes` by the end of their back-off; those without one keep their preference.

        `addresses`: the current addresses of the peer's p2pd. A fault at other addresses does not
        count.
        """
        now = self._clock()

        def backoff_until(route: Route) -> float:
            backoff = self._backoffs.get((peer, route))
            if backoff is None or backoff.until <= now:
                return 0.0
            if route.over_p2pd and backoff.addresses != addresses:
                return 0.0
            return backoff.until

        return tuple(sorted(routes, key=backoff_until))  # stable: keeps the preference among equals

    def failed(self, peer: PeerId, route: Route, addresses: tuple[str, ...] = ()) -> None:
        """Back the route off, longer for each failure without a success in between."""
        key = (peer, route)
        before = self._backoffs.pop(key, None)
        faults = 0 if before is None or before.addresses != addresses else before.faults
        seconds = backoff_seconds(faults, FIRST_ROUTE_BACKOFF_SECONDS, MAX_ROUTE_BACKOFF_SECONDS)
        self._backoffs[key] = _Backoff(faults + 1, self._clock() + seconds, addresses)
        if len(self._backoffs) > _MAX_FAULTS:
            self._backoffs.popitem(last=False)

    def worked(self, peer: PeerId, route: Route) -> None:
        """Forget the failures of a route."""
        self._backoffs.pop((peer, route), None)
