"""Simulated volunteers that send real control messages and compute nothing.

Each drives the rules that ship, as the simulator's volunteers do (`stage_holder`,
`pipeline_peer`), and signs its receipts. It runs on the measured core; parsing and the way of the
microbatches from peer to peer, with counting and signing, are excluded from the measured time. A
roster of thousands is not read by each of them: `World.members` is what it would show.
"""

from __future__ import annotations

import heapq
import random
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import trio

from benchmarks.coordinator.heartbeats import Heart, hearts
from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_coordinator.simulator.event_heap import Action
from swarm_coordinator.simulator.pipeline_peer import (
    PART_OF_WORK,
    Members,
    PipelinePeer,
    Request,
    WeightGradients,
)
from swarm_coordinator.simulator.stage_holder import StageHolder, first_request
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import SumStatement
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    AbortRound,
    Apply,
    AssignStage,
    Close,
    Hello,
    Lease,
    LeaseResult,
    Mask,
    MaskRequest,
    Receipts,
    Refused,
    SaveSnapshot,
    SumCheck,
    Welcome,
    coordinator_messages,
    encode,
    parse,
)
from swarm_shared.protocol.framing import Frame
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes
from swarm_shared.scheduling.routing import StageRouting
from swarm_shared.volunteer_rules.compute_order import Part
from swarm_shared.volunteer_rules.stage_account import Computation
from swarm_shared.volunteer_rules.step_close import ApplyStep, Reduce, Work

ROSTER = re.compile(rb'{"kind":"roster')
MEMORY = MemoryOffer(device_bytes=2**34)
CLOSE_SECONDS = 1.0
DOWNLOAD_SECONDS = 2.0
APPLY_SECONDS = 0.3
ROSTER_SECONDS = 0.5
"""Seconds until senders know that a stage has won or lost a peer."""
AGAIN_SHARE = 0.1
"""Duration of a repeated microbatch over that of others: it is alone, they had many beside them."""
PACES = 16
"""Number of durations of a microbatch, which spread over a step."""


class Times(Protocol):
    """Clock of the simulated volunteers, with a context for work that takes no measured time."""

    def current_time(self) -> float: ...

    def elsewhere(self) -> AbstractContextManager[None]: ...


class MemoryStream:
    """Control stream whose other end is in the same process."""

    remote_address: str | None = None
    """Not known, as that of a peer behind a relay."""

    def __init__(self, remote: PeerId, take: Callable[[bytes], None]) -> None:
        self.remote = remote
        self._take = take
        self._frames: deque[bytes] = deque()
        self._wake = trio.Event()
        self._closed = False

    def push(self, header: bytes) -> None:
        """Deliver a message from the volunteer's side."""
        self._frames.append(header)
        self._wake.set()

    def cut(self) -> None:
        self._closed = True
        self._wake.set()

    async def receive(self, timeout_seconds: float | None = None) -> Frame:
        if self._frames or self._closed:
            await trio.lowlevel.checkpoint()
        while not self._frames:
            if self._closed:
                raise LinkClosed(f"{self.remote} is gone")
            self._wake = trio.Event()
            await self._wake.wait()
        return Frame(self._frames.popleft(), bytearray())

    async def send(
        self, header: bytes, payload: bytes = b"", timeout_seconds: float | None = None
    ) -> None:
        await trio.lowlevel.checkpoint()
        if self._closed:
            raise LinkClosed(f"{self.remote} is gone")
        self._take(header)

    async def close(self) -> None:
        self.cut()

    async def reset(self) -> None:
        self.cut()


class World:
    """State shared by all simulated volunteers without messages."""

    def __init__(
        self,
        run: RunId,
        manifest: Manifest,
        step_seconds: float,
        clock: Times,
        members: int,
        tokens: RunTokens,
    ) -> None:
        self.run = run
        self.tokens = tokens
        self.clock = clock
        limits = manifest.limits
        # The heartbeat interval of a large run; volunteers of a small one use it as well.
        self.hearts = hearts(members, max(limits.heartbeat_seconds, limits.dead_after_seconds / 2))
        self._agenda: list[tuple[float, int, Callable[[], object]]] = []
        self._number = 0
        self.manifest = manifest
        self.sizes = stage_sizes(manifest)
        self.step_seconds = step_seconds
        self.rng = random.Random(1)
        self.now = 0.0
        """The time of the volunteer whose turn it is."""
        self._arriving: deque[Action] = deque()
        self.peers: dict[PeerId, _Peer] = {}
        """Those that serve a stage."""
        self._rates: defaultdict[StageIndex, dict[PeerId, float]] = defaultdict(dict)
        self.members = Members(self.peers, self._rates)
        self._changed: set[StageIndex] = set()
        self.applied = 0
        self.refused = 0
        self.said = 0
        self._masks_requested = 0

    def elsewhere(self, action: Action) -> None:
        """Do what costs the measured core nothing, in no time."""
        self.now = self.clock.current_time()
        with self.clock.elsewhere():
            action()
            while self._arriving:
                self._arriving.popleft()()

    def arrives(self, action: Action) -> None:
        """Do it when the present action is over, in the same `elsewhere`."""
        self._arriving.append(action)

    def serves(self, peer: _Peer) -> None:
        self.peers[peer.volunteer.peer] = peer
        self._rates[peer.stage][peer.volunteer.peer] = 1.0
        self._stage_changed(peer.stage)

    def stops(self, peer: PeerId) -> None:
        stopped = self.peers.pop(peer, None)
        if stopped is not None:
            del self._rates[stopped.stage][peer]
            self._stage_changed(stopped.stage)

    def _stage_changed(self, stage: StageIndex) -> None:
        if not self._changed:
            self.later(ROSTER_SECONDS, lambda: self.elsewhere(self._spread_roster))
        self._changed.add(stage)

    def _spread_roster(self) -> None:
        changed, self._changed = self._changed, set()
        for peer in list(self.peers.values()):
            for stage in changed & peer.downstreams.keys():
                peer.downstreams[stage].learn(self.members)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (trio.current_time() + seconds, self._number, action))

    def next_mask(self) -> int:
        self._masks_requested += 1
        return self._masks_requested

    async def act(self) -> None:
        """Execute scheduled actions one at a time until cancelled."""
        while True:
            while self._agenda and self._agenda[0][0] <= trio.current_time():
                heapq.heappop(self._agenda)[2]()
                await trio.lowlevel.checkpoint()
            await trio.sleep(0.005)


class _Peer(PipelinePeer[str]):
    """A volunteer while it holds a stage. Links take no time, and its device computes any number of
    microbatches at once. Messages to the coordinator are sent in measured time."""

    def __init__(self, world: World, volunteer: SimulatedVolunteer) -> None:
        assert volunteer.held is not None
        seconds = world.step_seconds / world.manifest.stage_count
        super().__init__(
            volunteer.peer, world.manifest, world.sizes, volunteer.held, world.members, seconds
        )
        self.volunteer = volunteer
        self._world = world
        self._reporting = False

    @property
    def now(self) -> float:
        return self._world.now

    @property
    def is_up(self) -> bool:
        return self._world.peers.get(self.volunteer.peer) is self

    def later(self, seconds: float, action: Action) -> None:
        world = self._world
        world.later(seconds, lambda: world.elsewhere(action) if self.is_up else None)

    def find(self, peer: PeerId) -> _Peer | None:
        return self._world.peers.get(peer)

    def routing(self) -> StageRouting:
        return StageRouting(self._world.rng, self.manifest.training.microbatches_per_step)

    def uplink_seconds(self) -> float:
        return 0.0

    def transfer(self, receiver: PipelinePeer[str], size: int, arrive: Action) -> None:
        self._world.arrives(arrive)

    def compute(self, part: Part, request: Request[str] | WeightGradients, done: Action) -> None:
        pace = 1.0
        if isinstance(request, Request):
            microbatch = request.microbatch
            pace = (1 + microbatch.index % PACES) / PACES
            if len(microbatch.accumulate) < self.manifest.stage_count - self.stage:
                pace *= AGAIN_SHARE
        seconds = pace * PART_OF_WORK * self.microbatch_seconds
        self.later(seconds, lambda: request.ended or done())

    def count(self, computation: Computation) -> str | None:
        """Count a microbatch, and report it within an interval, with all others until then."""
        if not self._reporting:
            self._reporting = True
            interval = self.manifest.limits.receipt_interval_seconds
            self._world.later(self._world.rng.uniform(0, interval), self._interval_over)
        return super().count(computation)

    def _interval_over(self) -> None:
        self._reporting = False
        self.report_receipts()

    def report_receipts(self) -> None:
        if self.is_up and (receipts := self.account.take_unreported()):
            self.volunteer.send(Receipts(receipts=receipts))

    def resolve(self, result: LeaseResult, receipts: tuple[str, ...] = ()) -> None:
        self.volunteer.send_later(result.model_copy(update={"receipts": receipts}))

    def request_mask(self, step: Step, microbatch: MicrobatchIndex) -> int:
        number = self._world.next_mask()
        self.volunteer.send_later(MaskRequest(request=number, step=step, microbatch=microbatch))
        return number


class SimulatedVolunteer(StageHolder[str]):
    def __init__(self, world: World, identity: Identity) -> None:
        super().__init__(identity.peer_id, world.run, world.manifest, world.sizes)
        self.identity = identity
        self.beats: deque[tuple[float, float]] = deque()
        """Times due and sent of the heartbeats that the coordinator has not handled yet."""
        self.words: deque[float] = deque()
        """Times sent of all other unhandled messages; heartbeats overtake them."""
        self.beat_seconds = world.manifest.limits.heartbeat_seconds
        self.alive = True
        self.attached = False
        """True after its hello; from then on it sends heartbeats."""
        self.heart: Heart = world.rng.choice(world.hearts)
        self.beaten = 0
        self._world = world
        self.stream: Any = MemoryStream(self.peer, self.hear)

    def attach(self) -> None:
        hello = Hello(
            run=self._world.run, software=SOFTWARE_VERSION, device="simulated",
            addresses=("/ip4/192.0.2.1/tcp/4711",), memory=MEMORY,
        )  # fmt: skip
        self.stream.push(encode(hello))
        self.attached = True

    def beat(self, due: float) -> None:
        self.beats.append((due, self._world.clock.current_time()))
        self._push(self.heart.encoded[Heart.place(self.beaten)])
        self.beaten += 1

    def _push(self, header: bytes) -> None:
        self._world.said += 1
        self.stream.push(header)

    def die(self) -> None:
        self.alive = False
        self.stops()
        self.stream.cut()

    # ---- its stages, as `stage_holder` asks

    def send(self, message: FrozenModel) -> None:
        if self.alive:
            self.words.append(self._world.clock.current_time())
            self._push(encode(message))

    def send_later(self, message: FrozenModel) -> None:
        self.later(0.0, lambda: self.send(message))

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._world.later(seconds, lambda: self.alive and action())

    def drawn(self, step: Step, microbatch: MicrobatchIndex) -> SampledTokens:
        return self._world.tokens.drawn(step, microbatch)

    def sign(self, receipt: Receipt) -> str:
        return encode_envelope(receipt.sign(self.identity))

    def sign_sums(self, statement: SumStatement) -> str:
        return encode_envelope(statement.sign(self.identity))

    def begin_load(self, assignment: AssignStage) -> float:
        return 0.0 if assignment.source == "fresh" else DOWNLOAD_SECONDS

    def work_seconds(self, work: Work, stage: StageIndex) -> float:
        most = {Reduce: CLOSE_SECONDS, ApplyStep: APPLY_SECONDS}.get(type(work), 0.0)
        return self._world.rng.uniform(0.5, 1.0) * most

    def serves(self, *, switched: bool) -> None:
        self._world.serves(_Peer(self._world, self))

    def stops(self) -> None:
        self._world.stops(self.peer)

    def step_applied(self) -> None:
        if self.held is not None:
            self._world.applied = max(self._world.applied, self.held.account.version)
        self._in_pipeline(lambda peer: peer.step_changed())

    def _in_pipeline(self, action: Callable[[_Peer], None]) -> None:
        peer = self._world.peers.get(self.peer)
        if peer is not None:
            self._world.elsewhere(lambda: action(peer))

    def rejoin(self) -> None:
        self.die()

    # ---- messages from the coordinator

    def hear(self, header: bytes) -> None:
        if ROSTER.match(header) or not self.alive:
            return
        with self._world.clock.elsewhere():
            message = parse(coordinator_messages, header)
        match message:
            case Close() | SumCheck() | Apply() | AbortRound() | SaveSnapshot():
                self.ordered(message)
            case Lease():
                self._in_pipeline(lambda peer: peer.lease(message))
            case Mask():
                self._in_pipeline(lambda peer: peer.masked(message))
            case AssignStage():
                self.assigned(message)
            case Welcome():
                self.beat_seconds = message.heartbeat_seconds or self.beat_seconds
                self.send(first_request(message, MEMORY, self._world.sizes[0].streamed, 0.0))
            case Refused():
                self._world.refused += 1


async def beat_for_ever(volunteers: Sequence[SimulatedVolunteer]) -> None:
    """Send all heartbeats at the interval that the coordinator requested; `volunteers` may grow."""
    known = 0
    due: list[tuple[float, int]] = []
    while True:
        now = trio.current_time()
        for number in range(known, len(volunteers)):
            heapq.heappush(due, (now, number))
        known = len(volunteers)
        while due and due[0][0] <= now:
            at, number = due[0]
            volunteer = volunteers[number]
            if not volunteer.alive:
                heapq.heappop(due)
                continue
            heapq.heapreplace(due, (at + volunteer.beat_seconds, number))
            if volunteer.attached:
                volunteer.beat(at)
        await trio.sleep(0.005)
