"""Errors of a round. A failed round applies nothing: inputs are unchanged."""

from __future__ import annotations

from enum import StrEnum

from swarm_client.averaging.all_reduce.routes import Route, RouteFault, StreamTraffic
from swarm_shared.base.errors import NetworkError, SwarmError
from swarm_shared.base.types import PeerId


class RoundFailure(StrEnum):
    """The kind of failure that ended a round. Their order is part of the wire format."""

    LOST = "lost"
    """The stream with the culprit broke."""
    UNREACHABLE = "unreachable"
    """No route to the culprit gives a stream."""
    STALLED = "stalled"
    """The culprit was silent for too long, or never joined."""
    PROTOCOL = "protocol"
    """The culprit sent what the protocol does not allow."""
    NON_FINITE = "non_finite"
    """The culprit's vector holds an infinity, a NaN or a count above what honest parts have (no
    culprit: only the sum does)."""
    STOPPED = "stopped"
    """The round was cancelled on this side, or cannot continue here (out of memory, for
    example)."""
    CARRIER = "carrier"
    """A stream with the culprit over p2pd broke, or p2pd has ended here. Possibly no member is at
    fault, and the next attempt avoids the route."""


class RoundFailed(SwarmError):
    """The round has failed for all members; the next attempt has another group and name.

    The culprit may come from another member's ABORT frame, which `aborted_by` names, and may be
    wrong; the coordinator, which has the reports of all members, decides. `route` is that of the
    stream with the culprit, if it was a stream of ours.
    """

    def __init__(
        self,
        reason: str,
        culprit: PeerId | None = None,
        *,
        failure: RoundFailure = RoundFailure.LOST,
        route: Route | None = None,
        aborted_by: PeerId | None = None,
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.culprit = culprit
        self.failure = failure
        self.route = route
        self.aborted_by = aborted_by
        self.links: tuple[StreamTraffic, ...] = ()
        """Traffic of the round's streams until the failure."""
        self.faults: tuple[RouteFault, ...] = ()
        """Routes that failed."""


class RouteAbsentError(NetworkError):
    """The route does not exist now; that does not predict later attempts."""
