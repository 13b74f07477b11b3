"""Why a round failed. Nothing is applied in a failed round: inputs are as they were."""

from __future__ import annotations

from enum import StrEnum

from swarm_client.averaging.all_reduce.routes import Route, RouteFault, StreamTraffic
from swarm_shared.base.errors import NetworkError, SwarmError
from swarm_shared.base.types import PeerId


class RoundFailure(StrEnum):
    """What kind of failure ended the round. Their order is part of the wire format."""

    LOST = "lost"
    """The stream with the culprit broke."""
    UNREACHABLE = "unreachable"
    """No stream to the culprit can be had by any route."""
    STALLED = "stalled"
    """The culprit said nothing for too long, or never joined."""
    PROTOCOL = "protocol"
    """The culprit sent something that is not allowed."""
    NON_FINITE = "non_finite"
    """The culprit's vector holds an infinity or a NaN (no culprit: only the sum does)."""
    STOPPED = "stopped"
    """This side was told to stop, or cannot go on (out of memory, say)."""
    CARRIER = "carrier"
    """A stream with the culprit over p2pd broke, or p2pd is gone here: perhaps nobody's fault,
    and the next attempt goes around it."""


class RoundFailed(SwarmError):
    """The round is over for everybody; try again with another group and attempt.

    `culprit` may be wrong where another member reported it. `route` is that of the stream with the
    culprit, when it was a stream of ours.
    """

    def __init__(
        self,
        reason: str,
        culprit: PeerId | None = None,
        *,
        failure: RoundFailure = RoundFailure.LOST,
        route: Route | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprit = culprit
        self.failure = failure
        self.route = route
        self.links: tuple[StreamTraffic, ...] = ()
        """What its streams carried all the same."""
        self.faults: tuple[RouteFault, ...] = ()
        """Routes that were tried in vain."""


class RouteAbsentError(NetworkError):
    """There is no such route now; that says nothing about the next time."""
