"""Sending microbatches to a stage: choice of the peer, retries, masks (design: a microbatch).

One `Downstream` serves one sender and one target stage: a stage server's next stage, or stage 0 for
a trainer. It keeps what it sends until the gradient is back, so that a dead peer is replaced by
sending the same tensor to another one, and nothing upstream is computed again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import trio

from swarm_client.membership.roster import RosterView
from swarm_client.pipeline.edge import Buffer, Edge, EdgeAnswer, Stream, open_edge
from swarm_client.pipeline.errors import EdgeRefused, MicrobatchAbandoned
from swarm_client.pipeline.hedging import MAX_HEDGES, LatencyEstimate, Race
from swarm_shared.base.errors import LinkClosed, LinkTimeout, NetworkError, ProtocolError
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex, Step
from swarm_shared.protocol import Backward, Forward, PeerRecord, RefusalReason, StageHello
from swarm_shared.scheduling.routing import Observation, ShortestExpectedDelay

BUSY_RETRY_SECONDS = 0.05
"""Pause after a busy refusal; a full queue drains by one microbatch in about this time or more."""

STEP_RETRY_SECONDS = 0.1
"""Pause after a wrong-step refusal; peers apply a step within a fraction of a second of
each other."""

MAX_ATTEMPTS = 8
"""Failed sends of one microbatch after which it is left to the coordinator to lease it again."""

OVERDUE_CHECK_SECONDS = 0.25
"""Seconds between two checks of a microbatch in flight."""

AskMask = Callable[[Step, MicrobatchIndex], Awaitable[tuple[StageIndex, ...]]]
OpenStream = Callable[[PeerRecord], Awaitable[Stream]]


@dataclass(frozen=True, slots=True)
class MicrobatchRequest:
    """Everything needed to send one microbatch to a stage, and to send it again."""

    mode: str
    step: Step
    microbatch: MicrobatchIndex
    accumulate: tuple[StageIndex, ...]
    input: Buffer
    targets: Buffer


class Downstream:
    """Routes microbatches to peers of `stage`. `nursery` runs the edges; closing it closes them."""

    def __init__(
        self,
        stage: StageIndex,
        roster: RosterView,
        hello: Callable[[], StageHello],
        open_stream: OpenStream,
        ask_mask: AskMask,
        nursery: trio.Nursery,
        depth: int = 1,
        latency: LatencyEstimate | None = None,
        routing: ShortestExpectedDelay | None = None,
    ) -> None:
        """`depth` is the number of stages from this one to the last."""
        self.stage = stage
        self._roster = roster
        self._hello = hello
        self._open_stream = open_stream
        self._ask_mask = ask_mask
        self._nursery = nursery
        self._routing = routing or ShortestExpectedDelay()
        self._edges: dict[PeerId, Edge] = {}
        self._opening: dict[PeerId, trio.Event] = {}
        self._capacity_changed = trio.Event()
        self._depth = depth
        self._latency = latency or LatencyEstimate()
        self._closed = False
        self._waiting_sends = 0
        """Sends that wait for a peer with a free credit."""
        self.hedged = 0
        """Microbatches sent to a second peer while the first had not answered."""

    async def send(
        self, request: MicrobatchRequest, still_wanted: Callable[[], bool]
    ) -> EdgeAnswer:
        """Send one microbatch to any peer of the stage; return its gradient.

        A request that takes much longer than usual is hedged: it goes to another peer as well, and
        the first answer wins. `still_wanted` is checked repeatedly. MicrobatchAbandoned when it
        returns False or the attempts are used up.
        """
        race = Race()
        async with trio.open_nursery() as nursery:
            race.begin(nursery, self._deliver(race, request, request.accumulate, still_wanted))
            await self._watch(race, nursery, request, still_wanted)
            nursery.cancel_scope.cancel()
        return race.result()

    async def _watch(
        self,
        race: Race,
        nursery: trio.Nursery,
        request: MicrobatchRequest,
        still_wanted: Callable[[], bool],
    ) -> None:
        """Wait until there is an answer, all attempts have failed, or the microbatch is no longer
        wanted; hedge it when it is overdue."""
        while True:
            with trio.move_on_after(OVERDUE_CHECK_SECONDS):
                await race.decided.wait()
            if race.decided.is_set():
                return
            if not still_wanted():
                # The peer that has it may never answer, and the next step needs the slot that it
                # takes.
                race.failed(MicrobatchAbandoned("the step is over"))
                return
            overdue = self._overdue_peer(race)
            if overdue is not None:
                race.hedges += 1
                race.begin(nursery, self._hedge(race, overdue, request, still_wanted))

    def _overdue_peer(self, race: Race) -> PeerId | None:
        """The latest peer to have been sent the microbatch, if its answer is overdue, another peer
        has room, and no other microbatch waits for that room."""
        if not race.sent_at or self._waiting_sends or race.hedges >= MAX_HEDGES:
            return None
        if self._latency.is_expected(trio.current_time() - max(race.sent_at.values()), self._depth):
            return None
        others = self._roster.of_stage(self.stage).keys() - race.sent_at.keys()
        if not any(self._has_room(peer) for peer in others):
            return None
        return max(race.sent_at, key=race.sent_at.__getitem__)

    async def _hedge(
        self,
        race: Race,
        overdue: PeerId,
        request: MicrobatchRequest,
        still_wanted: Callable[[], bool],
    ) -> None:
        self.hedged += 1
        accumulate = request.accumulate
        if request.mode == "train":
            try:
                missing = await self._ask_mask(request.step, request.microbatch)
            except MicrobatchAbandoned:
                return  # no coordinator; the first peer may still answer
            accumulate = tuple(stage for stage in missing if stage >= self.stage)
        # The overdue peer gets nothing more until it has answered something.
        self._routing.failed(overdue, trio.current_time())
        await self._deliver(race, request, accumulate, still_wanted)

    async def _deliver(
        self,
        race: Race,
        request: MicrobatchRequest,
        accumulate: tuple[StageIndex, ...],
        still_wanted: Callable[[], bool],
    ) -> None:
        """One attempt of the race: send to some peer, and to another one when that fails."""
        failures = 0
        reason: Exception | None = None
        while failures < MAX_ATTEMPTS:
            edge = await self._choose(still_wanted, race.sent_at)
            try:
                race.won(await self._attempt(race, edge, request, accumulate))
                return
            except EdgeRefused as refusal:
                self._routing.refused(edge.peer, trio.current_time())
                if refusal.reason is RefusalReason.BUSY:
                    await trio.sleep(BUSY_RETRY_SECONDS)
                    continue
                if refusal.reason is RefusalReason.WRONG_STEP:
                    await trio.sleep(STEP_RETRY_SECONDS)
                    continue
                reason = refusal
            except (NetworkError, ProtocolError) as error:
                reason = error
            failures += 1
            self._routing.failed(edge.peer, trio.current_time())
            if not still_wanted():
                raise MicrobatchAbandoned("the step is over") from reason
            if request.mode == "train":
                # A peer downstream may have counted it before the link broke.
                missing = await self._ask_mask(request.step, request.microbatch)
                accumulate = tuple(stage for stage in missing if stage >= self.stage)
        raise MicrobatchAbandoned(
            f"{failures} attempts to reach stage {self.stage} failed, the last one because {reason}"
        )

    async def _attempt(
        self, race: Race, edge: Edge, request: MicrobatchRequest, accumulate: tuple[StageIndex, ...]
    ) -> EdgeAnswer:
        header = Forward(
            request=0,
            mode="evaluate" if request.mode == "evaluate" else "train",
            step=request.step,
            microbatch=request.microbatch,
            stage=self.stage,
            accumulate=accumulate,
            input_bytes=memoryview(request.input).nbytes,
            target_bytes=memoryview(request.targets).nbytes,
        )
        in_flight = edge.in_flight + 1
        began = time.monotonic()
        race.sent_at[edge.peer] = trio.current_time()
        try:
            answer = await edge.request(header, (request.input, request.targets))
        finally:
            del race.sent_at[edge.peer]
            self._notify()
        total = time.monotonic() - began
        self._latency.observe(total)
        seen = _observation(answer.header, total, in_flight)
        self._routing.observe(edge.peer, seen, trio.current_time())
        return answer

    async def _choose(self, still_wanted: Callable[[], bool], excluded: Collection[PeerId]) -> Edge:
        """An edge with a free credit to a peer not in `excluded`, opened if needed; waits until
        there is one."""
        while True:
            if self._closed:
                raise MicrobatchAbandoned("this peer has given up its stage")
            if not still_wanted():
                raise MicrobatchAbandoned("the step is over")
            members = self._members()
            self._routing.update(members)
            free = members.keys() - self._opening.keys() - set(excluded)
            usable = {p: self._in_flight(p) for p in free if self._has_room(p)}
            now = trio.current_time()
            peer = self._routing.choose(now, usable)
            if peer is None:
                await self._wait_for_capacity(now)
                continue
            edge = self._edges.get(peer)
            if edge is not None and edge.superseded:
                self._retire(edge)
            elif edge is not None and not edge.closed:
                return edge
            edge = await self._open(members[peer])
            if edge is not None and edge.free_credits > 0:
                return edge

    def _members(self) -> dict[PeerId, PeerRecord]:
        members = dict(self._roster.of_stage(self.stage))
        for peer in [p for p in self._edges if p not in members]:
            # Not in the roster any more: dead, moved or revoked. Its requests in flight fail and
            # are sent again.
            edge = self._edges.pop(peer)
            if self._roster.get(peer) is None:
                edge.fail(LinkClosed(f"{peer} has left the roster"))
        return members

    def roster_changed(self) -> None:
        """Drop edges to peers that have left, at once; their microbatches are sent again."""
        self._members()
        self._notify()

    def _has_room(self, peer: PeerId) -> bool:
        edge = self._edges.get(peer)
        return edge is None or edge.closed or edge.free_credits > 0

    def _in_flight(self, peer: PeerId) -> int:
        edge = self._edges.get(peer)
        return 0 if edge is None else edge.in_flight

    async def _wait_for_capacity(self, now: float) -> None:
        """Wait until a credit is free, the roster has changed or a ban has ended."""
        ban_end = self._routing.next_ban_end(now)
        changed = self._capacity_changed
        self._waiting_sends += 1
        try:
            with trio.move_on_after(1.0 if ban_end is None else max(0.01, ban_end - now)):
                await changed.wait()
        finally:
            self._waiting_sends -= 1

    def _notify(self) -> None:
        self._capacity_changed.set()
        self._capacity_changed = trio.Event()

    async def _open(self, record: PeerRecord) -> Edge | None:
        done = self._opening[record.peer] = trio.Event()
        try:
            stream = await self._open_stream(record)
            try:
                edge = await open_edge(stream, self._hello())
                if self._closed:
                    raise LinkClosed("this peer has given up its stage meanwhile")
            except BaseException:
                with trio.CancelScope(shield=True):
                    await stream.reset()
                raise
            self._edges[record.peer] = edge
            self._nursery.start_soon(self._run_edge, edge)
            return edge
        except (NetworkError, ProtocolError, EdgeRefused, LinkTimeout):
            self._routing.failed(record.peer, trio.current_time())
            return None
        finally:
            del self._opening[record.peer]
            done.set()
            self._notify()

    def _retire(self, edge: Edge) -> None:
        """Replace an edge by one over a better link; requests in flight on it may finish."""
        del self._edges[edge.peer]
        self._nursery.start_soon(edge.finish)

    async def _run_edge(self, edge: Edge) -> None:
        try:
            await edge.run()
        finally:
            if self._edges.get(edge.peer) is edge:
                del self._edges[edge.peer]
            self._notify()

    def close(self) -> None:
        """Send nothing more and fail what is in flight; called before the nursery ends."""
        self._closed = True
        for edge in list(self._edges.values()):
            edge.fail(LinkClosed("this peer closes its links"))


def _observation(answer: Backward, total_seconds: float, in_flight: int) -> Observation:
    """The share of the total time that the peer's own account does not explain is the link's."""
    link_seconds = max(0.0, total_seconds - answer.total_seconds) if answer.total_seconds else 0.0
    return Observation(
        min(answer.service_seconds, total_seconds), answer.uplink_seconds, link_seconds, in_flight
    )
