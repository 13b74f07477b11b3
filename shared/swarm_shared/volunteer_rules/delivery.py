"""The delivery of microbatches from one sender to the peers of one stage: choice of the peer,
retries, masks and hedges.

Sans I/O. The owner reports what happened (`submit`, `opened`, `answered`, `masked`, `tick`, ...), each
with the time where time matters, then carries out what `take_actions` returns, and calls `tick` no
later than `wakes_at`. The microbatch's tensor stays with the owner, so a lost peer is replaced by
sending the same tensor to another one, and nothing upstream is computed again.

A delivery has one or more attempts. An attempt waits for a peer, is sent to it, pauses after a
refusal, or asks the coordinator for a new mask after a failure. A peer may answer late because it is
slow, because its worker hangs, or because a peer behind it does. The sender cannot distinguish these
cases and need not: when an answer is overdue (`latency`) and no other microbatch waits for room, the
delivery is hedged: a further attempt goes to another peer (the backup tasks of MapReduce, Dean &
Ghemawat 2004). The first answer is taken and the other requests are cancelled. Two peers may then
have counted the microbatch: the coordinator's table has one of them, and the other one removes it at
the step close.

Invariants:

1. Every submitted delivery ends exactly once: with `Completed`, with `Abandoned`, or withdrawn.
2. An edge has at most as many requests in flight as its peer granted credits, and at most one
   opening of an edge to a peer is under way.
3. A peer never has two requests in flight of one delivery.
4. After a failure, an attempt of a training microbatch is sent again only with a mask that was asked
   for after the failure. A hedge of a training microbatch is sent only with a mask asked for when it
   began. Both masks are restricted to this stage and those after it.
5. No attempt waits while a serving peer that is not banned and has not got its microbatch has room.
   Attempts wait in the order in which they began to.
6. A delivery that has ended has no request in flight: each was answered, failed, or cancelled.
7. Nothing is sent to a peer that does not serve the stage, and nothing of a step older than the
   oldest wanted one.
"""

from __future__ import annotations

from collections.abc import Collection, Container
from dataclasses import dataclass
from typing import Literal

from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import RefusalReason
from swarm_shared.scheduling.routing import ShortestExpectedDelay
from swarm_shared.volunteer_rules.latency import LatencyEstimate

BUSY_RETRY_SECONDS = 0.05
"""Pause after a busy refusal; a full queue drains by one microbatch in about this time or more."""

STEP_RETRY_SECONDS = 0.1
"""Pause after a wrong-step refusal; peers apply a step within a fraction of a second of
each other."""

MAX_FAILURES = 8
"""Failures of one attempt after which it ends, and the coordinator leases the microbatch again."""

MAX_HEDGES = 2
"""Maximum number of hedges of one delivery; beyond that the step itself is slow."""

OVERDUE_CHECK_SECONDS = 0.25
"""Seconds between two searches for overdue answers, while some are overdue that cannot be hedged."""

Mode = Literal["train", "evaluate"]


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """Open an edge to `peer`; report `opened` or `open_failed`."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class CloseEdge:
    """Send nothing more on the edge to `peer`, and close it once all requests on it have ended. A
    new edge to the same peer may be opened meanwhile."""

    peer: PeerId


@dataclass(frozen=True, slots=True)
class Transmit:
    """Send the microbatch of `delivery` to `peer` on its edge; report `answered`, `refused` or
    `failed`, or `edge_lost` for all requests on the edge together."""

    request: int
    delivery: int
    peer: PeerId
    accumulate: tuple[StageIndex, ...]
    """The stages that shall count the microbatch."""


@dataclass(frozen=True, slots=True)
class CancelRequest:
    """Cancel the request at its receiver. Reports of it are ignored from now on."""

    request: int


@dataclass(frozen=True, slots=True)
class AskMask:
    """Ask the coordinator which stages have not counted the microbatch; report `masked`."""

    query: int
    delivery: int
    step: Step
    microbatch: MicrobatchIndex


@dataclass(frozen=True, slots=True)
class Completed:
    """The answer of `request` is the delivery's; the delivery has ended."""

    delivery: int
    request: int


@dataclass(frozen=True, slots=True)
class Abandoned:
    """There will be no answer; the delivery has ended. The coordinator leases the microbatch again
    if it is still needed."""

    delivery: int
    reason: str


Action = OpenEdge | CloseEdge | Transmit | CancelRequest | AskMask | Completed | Abandoned


class Dispatcher:
    """The deliveries of one sender to one stage.

    Reports about requests, queries and deliveries that have ended are ignored: they may cross a
    cancellation on their way.
    """

    def __init__(
        self,
        stage: StageIndex,
        depth: int = 1,
        latency: LatencyEstimate | None = None,
        routing: ShortestExpectedDelay | None = None,
    ) -> None:
        """`depth` is the number of stages from `stage` to the last. No peer serves the stage before
        the first `roster_changed`; every step is wanted before the first `oldest_step_is`."""
        self.stage = stage
        self.hedged = 0
        """Hedges begun."""

    def take_actions(self) -> list[Action]:
        """Return the actions decided since the previous call, to be carried out in this order."""
        raise NotImplementedError

    def wakes_at(self) -> float | None:
        """When `tick` has to be called at the latest, if nothing is reported before; None: never.

        To be read after every report.
        """
        raise NotImplementedError

    def tick(self, now: float) -> None:
        """Carry on with what waited for this time: pauses, bans, overdue answers."""
        raise NotImplementedError

    # ---- the sender's own

    def submit(
        self,
        step: Step,
        microbatch: MicrobatchIndex,
        mode: Mode,
        accumulate: tuple[StageIndex, ...],
        now: float,
    ) -> int:
        """Begin a delivery; return its number. It may end before this returns (`take_actions`)."""
        raise NotImplementedError

    def withdraw(self, delivery: int, now: float) -> None:
        """End a delivery without a result: its owner no longer waits for it."""
        raise NotImplementedError

    def oldest_step_is(self, step: Step | None, now: float) -> None:
        """Abandon what is of an older step, now and when it is submitted; for None everything."""
        raise NotImplementedError

    def close(self) -> None:
        """Abandon everything, close all edges, and abandon whatever is submitted afterwards."""
        raise NotImplementedError

    # ---- peers and edges

    def roster_changed(
        self, serving: Collection[PeerId], present: Container[PeerId], now: float
    ) -> None:
        """`serving` are the peers that accept work at the stage, `present` all in the roster.

        What is in flight to a peer that is not present any more fails at once; a peer that merely
        serves no longer (it has moved, or leaves) finishes what it has.
        """
        raise NotImplementedError

    def opened(self, peer: PeerId, credits: int, now: float) -> None:
        """The edge to `peer` is open, which has granted `credits` requests at a time."""
        raise NotImplementedError

    def open_failed(self, peer: PeerId, now: float) -> None:
        """No edge to `peer` could be opened."""
        raise NotImplementedError

    def edge_lost(self, peer: PeerId, reason: str, now: float) -> None:
        """The edge to `peer` has ended, and with it every request on it. (A request on an earlier
        edge to the peer, one that `CloseEdge` named, fails by `failed`.)"""
        raise NotImplementedError

    def retire(self, peer: PeerId, now: float) -> None:
        """There is a better link to `peer`: the next request opens an edge over it; what is in
        flight on the present edge finishes there."""
        raise NotImplementedError

    # ---- requests and masks

    def answered(
        self,
        request: int,
        service_seconds: float,
        total_seconds: float,
        uplink_seconds: float,
        now: float,
    ) -> None:
        """The gradient has arrived. The seconds are those that the peer reported: of computing,
        from the request's arrival there to its answer, and of its uplink per microbatch."""
        raise NotImplementedError

    def refused(self, request: int, reason: RefusalReason, detail: str, now: float) -> None:
        """The peer has refused the request."""
        raise NotImplementedError

    def failed(self, request: int, reason: str, now: float) -> None:
        """The request has failed, and whether the peer has counted the microbatch is unknown."""
        raise NotImplementedError

    def masked(self, query: int, missing: tuple[StageIndex, ...] | None, now: float) -> None:
        """The stages that have not counted the microbatch. None: there is no coordinator, or the
        session ended before it answered."""
        raise NotImplementedError
