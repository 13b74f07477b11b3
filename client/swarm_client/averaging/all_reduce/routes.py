"""By which way a stream reaches a member, and what is remembered of ways that failed. Pure.

Two carriers, each with or without a relay in between, make four routes. Whoever opens a stream
tries them in order of preference; those that failed lately backoff, and come last, so that a pair
never runs out of routes to try.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.clock import Clock
from swarm_shared.base.types import PeerId

FIRST_ROUTE_BACKOFF_SECONDS = 60.0
MAX_ROUTE_BACKOFF_SECONDS = 15 * 60.0
_MAX_FAULTS = 4096


class Route(StrEnum):
    """In order of preference."""

    P2PD = "p2pd"
    """hivemind's p2pd at both ends, nobody in between."""
    HOST = "host"
    """The daemons' libp2p hosts, by a direct or a punched connection."""
    P2PD_RELAYED = "p2pd_relayed"
    HOST_RELAYED = "host_relayed"
    """As something to try: the host's connection, whatever it is. Of a stream: a relayed one."""

    @property
    def over_p2pd(self) -> bool:
        return self in (Route.P2PD, Route.P2PD_RELAYED)


@dataclass(frozen=True, slots=True)
class RouteFault:
    """A route to `peer` that was tried in vain, or broke."""

    peer: PeerId
    route: Route
    reason: str


@dataclass(frozen=True, slots=True)
class StreamTraffic:
    """What went over one stream of a round."""

    peer: PeerId
    route: Route
    bytes_sent: int
    bytes_received: int


def possible_routes(
    *, both_have_p2pd: bool, p2pd_relays: bool, host_is_relayed: bool
) -> list[Route]:
    """What can be tried, best first.

    `p2pd_relays`: the other end's p2pd can be dialled through a relay. `host_is_relayed`: the
    host's connection is known to be, so that asking for a better one would only cost time.
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
    """Of one peer, about its routes to the others. Lost at a restart, which does no harm."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._backoffs: OrderedDict[tuple[PeerId, Route], _Backoff] = OrderedDict()

    def order(
        self, peer: PeerId, routes: Sequence[Route], addresses: tuple[str, ...] = ()
    ) -> tuple[Route, ...]:
        """`routes` with those that backoff at the end, the one that has rested longest first.

        `addresses`: where the peer's p2pd is now. A fault at other addresses says nothing.
        """
        now = self._clock()

        def rest_until(route: Route) -> float:
            backoff = self._backoffs.get((peer, route))
            if backoff is None or backoff.until <= now:
                return 0.0
            if route.over_p2pd and backoff.addresses != addresses:
                return 0.0
            return backoff.until

        return tuple(sorted(routes, key=rest_until))  # stable: preference stays where it can

    def failed(self, peer: PeerId, route: Route, addresses: tuple[str, ...] = ()) -> None:
        """Let the route backoff: longer each time that it fails without having worked in
        between."""
        key = (peer, route)
        before = self._backoffs.pop(key, None)
        faults = 0 if before is None or before.addresses != addresses else before.faults
        seconds = backoff_seconds(faults, FIRST_ROUTE_BACKOFF_SECONDS, MAX_ROUTE_BACKOFF_SECONDS)
        self._backoffs[key] = _Backoff(faults + 1, self._clock() + seconds, addresses)
        if len(self._backoffs) > _MAX_FAULTS:
            self._backoffs.popitem(last=False)

    def worked(self, peer: PeerId, route: Route) -> None:
        self._backoffs.pop((peer, route), None)
