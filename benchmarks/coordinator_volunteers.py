"""Simulated volunteers that send real control messages and compute nothing.

Each drives the rules that ship, as the simulator's volunteers do (`stage_holder`), and signs its
receipts. It runs on the measured core; parsing, counting and signing are excluded from the measured
time, and rosters are not read.
"""

from __future__ import annotations

import base64
import heapq
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Protocol

import trio

from benchmarks.coordinator_heartbeats import Heart, hearts
from swarm_coordinator.core.trust.samples import SampledTokens
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_coordinator.simulator.stage_holder import StageHolder, first_request
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt, sign_receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.work_statements import SumStatement, sign_sums
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    AbortRound,
    Apply,
    AssignStage,
    Close,
    Hello,
    Lease,
    LeasedMicrobatch,
    LeaseResult,
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
from swarm_shared.volunteer_rules.lease_queue import LeaseQueue, StartedMicrobatch, handed_back
from swarm_shared.volunteer_rules.step_close import ApplyStep, Reduce, Work

ROSTER = re.compile(rb'{"kind":"roster')
MEMORY_BYTES = 2**34
CLOSE_SECONDS = 1.0
DOWNLOAD_SECONDS = 2.0
AGAIN_SHARE = 0.1
APPLY_SECONDS = 0.3


class Times(Protocol):
    """Clock of the simulated volunteers, with a context for work that takes no measured time."""

    def current_time(self) -> float: ...

    def elsewhere(self) -> AbstractContextManager[None]: ...


class MemoryStream:
    """Control stream whose other end is in the same process."""

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
        self.ready: list[dict[PeerId, SimulatedVolunteer]] = [{} for _ in manifest.stages]
        self.applied = 0
        self.refused = 0
        self.said = 0

    def server(self, stage: StageIndex, step: Step) -> SimulatedVolunteer | None:
        """Return a peer that works on the step in this stage, if there is one."""
        peers = self.ready[stage].values()
        able = [peer for peer in peers if peer.held and peer.held.account.works_on(step)]
        return self.rng.choice(able) if able else None

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (trio.current_time() + seconds, self._number, action))

    async def act(self) -> None:
        """Execute scheduled actions one at a time until cancelled."""
        while True:
            while self._agenda and self._agenda[0][0] <= trio.current_time():
                heapq.heappop(self._agenda)[2]()
                await trio.lowlevel.checkpoint()
            await trio.sleep(0.005)


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
        self._leases = LeaseQueue()
        self._reporting = False
        self.stream: Any = MemoryStream(self.peer, self.hear)

    def attach(self) -> None:
        hello = Hello(
            run=self._world.run, software=SOFTWARE_VERSION, device="simulated",
            addresses=("/ip4/192.0.2.1/tcp/4711",), memory_bytes=MEMORY_BYTES,
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

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        self._world.later(seconds, lambda: self.alive and action())

    def drawn(self, step: Step, microbatch: MicrobatchIndex) -> SampledTokens:
        return self._world.tokens.drawn(step, microbatch)

    def sign(self, receipt: Receipt) -> str:
        return base64.b64encode(sign_receipt(self.identity, receipt)).decode()

    def sign_sums(self, statement: SumStatement) -> str:
        return base64.b64encode(sign_sums(self.identity, statement)).decode()

    def begin_load(self, assignment: AssignStage) -> float:
        return 0.0 if assignment.source == "fresh" else DOWNLOAD_SECONDS

    def work_seconds(self, work: Work, stage: StageIndex) -> float:
        most = {Reduce: CLOSE_SECONDS, ApplyStep: APPLY_SECONDS}.get(type(work), 0.0)
        return self._world.rng.uniform(0.5, 1.0) * most

    def serves(self, *, switched: bool) -> None:
        if self.stage is not None:
            self._world.ready[self.stage][self.peer] = self

    def stops(self) -> None:
        if self.stage is not None:
            self._world.ready[self.stage].pop(self.peer, None)

    def step_applied(self) -> None:
        if self.held is not None:
            self._world.applied = max(self._world.applied, self.held.account.version)
        self._start_leased()

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
                for refused in self._leases.take(message):
                    self.send(refused)
                self._start_leased()
            case AssignStage():
                self.assigned(message)
            case Welcome():
                self.beat_seconds = message.heartbeat_seconds or self.beat_seconds
                self.send(first_request(message, MEMORY_BYTES))
            case Refused():
                self._world.refused += 1

    # ---- microbatches

    def _start_leased(self) -> None:
        world, held = self._world, self.held
        now, step = world.clock.current_time(), None if held is None else held.account.step
        for started in self._leases.start(step, now):
            wait = world.rng.uniform(0.1, 1.0) * world.step_seconds
            if len(started.leased.accumulate) < world.manifest.stage_count:
                wait *= AGAIN_SHARE  # a repeated item is alone, the first lease had many
            self.later(wait, partial(self._drive, started))

    def _drive(self, started: StartedMicrobatch) -> None:
        """Complete a microbatch: its peers send their receipts and its trainer the result."""
        world, lease, leased = self._world, started.lease, started.leased
        counting = [world.server(stage, lease.step) for stage in leased.accumulate]
        ok = None not in counting
        self._leases.finished(started, world.clock.current_time(), ok=ok)
        if ok:
            receipts = (peer.count(lease.step, leased) for peer in counting if peer is not None)
            self.send(
                LeaseResult(
                    step=lease.step, microbatch=leased.microbatch, lease=lease.lease, ok=True,
                    receipts=tuple(filter(None, receipts)),
                )
            )  # fmt: skip
        else:
            self.send(handed_back(lease, leased, "a stage has no peer"))
        self._start_leased()

    def count(self, step: Step, leased: LeasedMicrobatch) -> str | None:
        """Count a microbatch, and report it within an interval, with all others until then."""
        if self.held is None:
            return None
        with self._world.clock.elsewhere():
            account = self.held.account
            receipt = self.held.count(account.begin(step, leased.microbatch, leased.accumulate))
        if not self._reporting:
            self._reporting = True
            interval = self._world.manifest.limits.receipt_interval_seconds
            self.later(self._world.rng.uniform(0, interval), self._report_receipts)
        return receipt

    def _report_receipts(self) -> None:
        self._reporting = False
        if self.held is not None and (receipts := self.held.account.take_unreported()):
            self.send(Receipts(receipts=receipts))


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
