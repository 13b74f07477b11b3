"""Sending microbatches to a stage, as `swarm_shared.volunteer_rules.delivery` decides.

One `Downstream` serves one sender and one target stage: a stage server's next stage, or stage 0 for
a trainer. The rules choose peers, retry, hedge and ask for masks; this module owns the edges, the
streams and the timer, and keeps each tensor until its gradient is back.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import trio

from swarm_client.membership.roster import RosterView
from swarm_client.pipeline.edge import Edge, EdgeAnswer, EdgeRefused
from swarm_client.pipeline.mask_client import MaskClient
from swarm_shared.base.errors import LinkClosed, NetworkError, ProtocolError, SwarmError
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import Forward, PeerRecord
from swarm_shared.protocol.framing import Buffer
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.delivery import (
    Abandoned,
    Action,
    AskMask,
    CancelRequest,
    CloseEdge,
    Completed,
    Dispatcher,
    OpenEdge,
    Transmit,
)
from swarm_shared.volunteer_rules.latency import LatencyEstimate


class MicrobatchAbandoned(SwarmError):
    """The sender has given this microbatch up; the coordinator leases it again if needed."""


@dataclass(frozen=True, slots=True)
class MicrobatchRequest:
    """Everything needed to send one microbatch to a stage, and to send it again."""

    step: Step
    microbatch: MicrobatchIndex
    accumulate: tuple[StageIndex, ...]
    input: Buffer
    targets: Buffer
    ticket: str
    """The coordinator's signed ticket of the microbatch, in base64."""
    is_copy: bool = False
    """Whether another copy of this microbatch may be under way."""


@dataclass(slots=True, eq=False)
class _Sending:
    """One call of `send` in progress. Its nursery runs the requests and mask questions of the
    delivery, so that none of them outlives the tensor."""

    request: MicrobatchRequest
    nursery: trio.Nursery
    answers: dict[int, EdgeAnswer] = field(default_factory=dict)
    """The answers that have come, by request number."""
    result: EdgeAnswer | MicrobatchAbandoned | None = None
    ended: trio.Event = field(default_factory=trio.Event)

    def end(self, result: EdgeAnswer | MicrobatchAbandoned) -> None:
        """Set the result with which `send` returns."""
        self.result = result
        self.ended.set()


class Downstream:
    """Sends microbatches to peers of `stage`. `nursery` runs the edges; closing it closes them."""

    def __init__(
        self,
        stage: StageIndex,
        roster: RosterView,
        open_edge: Callable[[PeerRecord], Awaitable[Edge]],
        masks: MaskClient,
        nursery: trio.Nursery,
        routing: StageRouting,
        depth: int = 1,
        latency: LatencyEstimate | None = None,
    ) -> None:
        """`open_edge` raises NetworkError, ProtocolError or EdgeRefused. `depth` is the number of
        stages from this one to the last."""
        self.stage = stage
        self._dispatcher = Dispatcher(stage, routing, depth, latency)
        self._roster = roster
        self._open_edge = open_edge
        self._masks = masks
        self._nursery = nursery
        self._edges: dict[PeerId, Edge] = {}
        """Edges that take requests."""
        self._sendings: dict[int, _Sending] = {}
        """The calls of `send` in progress, by delivery number."""
        self._requests: dict[int, trio.CancelScope] = {}
        """Requests in flight."""
        self._timer = trio.CancelScope()
        """The scope whose deadline is the time at which the dispatcher wakes."""
        nursery.start_soon(self._tick_when_due)
        self.roster_changed()

    async def send(self, request: MicrobatchRequest) -> EdgeAnswer:
        """Send one microbatch to any peer of the stage; return its gradient.

        MicrobatchAbandoned when its step is over, the attempts are used up, or this sender closes.
        """
        self._retire_superseded()
        async with trio.open_nursery() as nursery:
            sending = _Sending(request, nursery)
            delivery = self._dispatcher.submit(
                request.step, request.microbatch, request.accumulate,
                trio.current_time(), is_copy=request.is_copy,
            )  # fmt: skip
            self._sendings[delivery] = sending
            try:
                self._carry_out()
                await sending.ended.wait()
            finally:
                self._dispatcher.withdraw(delivery, trio.current_time())
                self._carry_out()
                del self._sendings[delivery]
                nursery.cancel_scope.cancel()
        if isinstance(sending.result, EdgeAnswer):
            return sending.result
        raise sending.result or MicrobatchAbandoned("no peer answered")

    def oldest_step_is(self, step: Step | None) -> None:
        """Abandon what is of an older step, now and when it is sent; for None everything."""
        self._dispatcher.oldest_step_is(step, trio.current_time())
        self._carry_out()

    def roster_changed(self) -> None:
        """Use the members of the newest roster; what is with a peer that has left is sent again."""
        serving = {
            peer: record.microbatches_per_second
            for peer, record in self._roster.of_stage(self.stage).items()
        }
        self._dispatcher.roster_changed(serving, self._roster, trio.current_time())
        self._carry_out()

    def close(self) -> None:
        """Send nothing more and abandon what is in flight; called before the nursery ends."""
        self._dispatcher.close()
        self._carry_out()

    async def _tick_when_due(self) -> None:
        while True:
            with self._timer:
                await trio.sleep_forever()
            self._timer = trio.CancelScope()
            self._dispatcher.tick(trio.current_time())
            self._carry_out()

    # ---- carrying out

    def _carry_out(self) -> None:
        """Carry out all that has been decided; to be called after every report."""
        self._retire_superseded()
        for action in self._dispatcher.take_actions():
            self._carry_out_one(action)
        wakes_at = self._dispatcher.wakes_at()
        self._timer.deadline = math.inf if wakes_at is None else wakes_at

    def _retire_superseded(self) -> None:
        for peer in [peer for peer, edge in self._edges.items() if edge.superseded]:
            self._dispatcher.retire(peer, trio.current_time())

    def _carry_out_one(self, action: Action) -> None:
        match action:
            case OpenEdge(peer):
                self._nursery.start_soon(self._open, peer)
            case CloseEdge(peer):
                self._nursery.start_soon(self._edges.pop(peer).finish)
            case Transmit(request, delivery, peer):
                sending, scope = self._sendings[delivery], trio.CancelScope()
                self._requests[request] = scope
                sending.nursery.start_soon(
                    self._transmit, action, sending, self._edges[peer], scope
                )
            case CancelRequest(request):
                if request in self._requests:
                    self._requests[request].cancel()
            case AskMask(delivery=delivery):
                self._sendings[delivery].nursery.start_soon(self._ask, action)
            case Completed(delivery, request):
                sending = self._sendings[delivery]
                sending.end(sending.answers[request])
            case Abandoned(delivery, reason):
                self._sendings[delivery].end(MicrobatchAbandoned(reason))

    async def _transmit(
        self, action: Transmit, sending: _Sending, edge: Edge, scope: trio.CancelScope
    ) -> None:
        request = sending.request
        header = Forward(
            request=0,
            step=request.step,
            microbatch=request.microbatch,
            stage=self.stage,
            accumulate=action.accumulate,
            input_bytes=memoryview(request.input).nbytes,
            target_bytes=memoryview(request.targets).nbytes,
            ticket=request.ticket,
            is_copy=action.is_copy,
        )
        try:
            with scope:
                answer = await edge.request(header, (request.input, request.targets))
                sending.answers[action.request] = answer
                self._dispatcher.answered(
                    action.request, answer.header.service_seconds, answer.header.total_seconds,
                    answer.header.uplink_seconds, trio.current_time(),
                )  # fmt: skip
        except EdgeRefused as refusal:
            self._dispatcher.refused(
                action.request, refusal.reason, refusal.detail, trio.current_time()
            )
        except (NetworkError, ProtocolError) as error:
            self._dispatcher.failed(action.request, str(error), trio.current_time())
        finally:
            del self._requests[action.request]
        self._carry_out()

    async def _ask(self, action: AskMask) -> None:
        missing = await self._masks.ask(action.step, action.microbatch)
        self._dispatcher.masked(action.query, missing, trio.current_time())
        self._carry_out()

    async def _open(self, peer: PeerId) -> None:
        try:
            record = self._roster.get(peer)
            if record is None:
                raise LinkClosed(f"{peer} has left the roster")
            edge = await self._open_edge(record)
        except (NetworkError, ProtocolError, EdgeRefused):
            self._dispatcher.open_failed(peer, trio.current_time())
        else:
            self._edges[peer] = edge
            self._nursery.start_soon(self._run_edge, edge)
            self._dispatcher.opened(peer, edge.credits, trio.current_time())
        self._carry_out()

    async def _run_edge(self, edge: Edge) -> None:
        reason = await edge.run()
        if self._edges.get(edge.peer) is edge:
            del self._edges[edge.peer]
            self._dispatcher.edge_lost(edge.peer, reason, trio.current_time())
            self._carry_out()
