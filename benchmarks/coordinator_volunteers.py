"""Simulated volunteers that send real control messages and compute nothing.

Each implements enough of the protocol to join, hold a stage, drive microbatches with signed
receipts, and close and apply steps. It parses no more of a message than necessary, because it runs
on the measured core. Only signing is excluded from the measured time.
"""

from __future__ import annotations

import base64
import heapq
import json
import random
import re
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import trio

from benchmarks.coordinator_heartbeats import Heart, hearts
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import (
    Generation,
    MicrobatchIndex,
    PeerId,
    RunId,
    StageIndex,
    Step,
    Version,
)
from swarm_shared.identity.credentials import Receipt, sign_receipt
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    Applied,
    Hello,
    LeaseResult,
    Ready,
    Receipts,
    RoundReport,
    SnapshotReady,
    StageRequest,
    encode,
)
from swarm_shared.protocol.framing import Frame
from swarm_shared.run.manifest import Manifest

STEP_AND_ATTEMPT = re.compile(rb'"step":(\d+),"attempt":(\d+)')
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
    ) -> None:
        self.run = run
        self.clock = clock
        limits = manifest.limits
        # The heartbeat interval of a large run; volunteers of a small one use it as well.
        self.hearts = hearts(members, max(limits.heartbeat_seconds, limits.dead_after_seconds / 2))
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self.manifest = manifest
        self.step_seconds = step_seconds
        self.rng = random.Random(1)
        self.ready: list[dict[PeerId, SimulatedVolunteer]] = [{} for _ in manifest.stages]
        self.applied = 0
        self.refused = 0
        self.said = 0

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        self._number += 1
        heapq.heappush(self._agenda, (trio.current_time() + seconds, self._number, action))

    async def act(self) -> None:
        """Execute scheduled actions one at a time until cancelled."""
        while True:
            while self._agenda and self._agenda[0][0] <= trio.current_time():
                heapq.heappop(self._agenda)[2]()
                await trio.lowlevel.checkpoint()
            await trio.sleep(0.005)


class SimulatedVolunteer:
    def __init__(self, world: World, identity: Identity) -> None:
        self.identity = identity
        self.peer = identity.peer_id
        self.stage: StageIndex | None = None
        self.beats: deque[tuple[float, float]] = deque()
        """Times due and sent of the heartbeats that the coordinator has not handled yet."""
        self.words: deque[float] = deque()
        """Times sent of all other unhandled messages; heartbeats overtake them."""
        self.beat_seconds = world.manifest.limits.heartbeat_seconds
        self.alive = True
        self.attached = False
        """True after its hello; from then on it sends heartbeats."""
        self._world = world
        self.heart: Heart = world.rng.choice(world.hearts)
        self.beaten = 0
        self._attempt = 0
        self._unreported: list[str] = []
        self.stream: Any = MemoryStream(self.peer, self.hear)

    def hello(self) -> Hello:
        return Hello(
            run=self._world.run, software=SOFTWARE_VERSION, device="simulated",
            addresses=("/ip4/192.0.2.1/tcp/4711",), memory_bytes=2**34,
        )  # fmt: skip

    def attach(self) -> None:
        self.stream.push(encode(self.hello()))
        self.attached = True

    def say(self, message: FrozenModel) -> None:
        if self.alive:
            self.words.append(self._world.clock.current_time())
            self._push(encode(message))

    def _push(self, header: bytes) -> None:
        self._world.said += 1
        self.stream.push(header)

    def beat(self, due: float) -> None:
        self.beats.append((due, self._world.clock.current_time()))
        self._push(self.heart.encoded[Heart.place(self.beaten)])
        self.beaten += 1

    def die(self) -> None:
        self.alive = False
        if self.stage is not None:
            self._world.ready[self.stage].pop(self.peer, None)
        self.stream.cut()

    # ---- messages from the coordinator

    def hear(self, header: bytes) -> None:
        kind = header[9 : header.index(b'"', 9)]
        if kind in (b"roster", b"roster_change", b"abort_round"):
            return
        if kind == b"close":
            self._close(header)
        elif kind == b"apply":
            self._apply(header)
        elif kind == b"lease":
            self._leased(json.loads(header))
        elif kind == b"welcome":
            # As the real client: the stage with the fewest peers announced to the joining peer.
            welcome = json.loads(header)
            self.beat_seconds = welcome["heartbeat_seconds"] or self.beat_seconds
            rows = welcome["stages"]
            stage = min(rows, key=lambda row: (row["peers"], row["stage"]))["stage"]
            self.say(StageRequest(stage=stage))
        elif kind == b"assign_stage":
            self._assigned(json.loads(header))
        elif kind == b"save_snapshot":
            self._save(json.loads(header))
        elif kind == b"refused":
            self._world.refused += 1

    def _assigned(self, message: dict[str, Any]) -> None:
        if message["prepare"]:
            return  # the move never completes: another benchmark measures moves
        stage, version = StageIndex(message["stage"]), Version(message["version"])

        def ready() -> None:
            self.stage = stage
            self.say(Ready(stage=stage, version=version, digest="d"))
            self._world.ready[stage][self.peer] = self

        if message["source"] == "fresh":
            ready()
        else:
            self._world.later(DOWNLOAD_SECONDS, ready)

    def _save(self, message: dict[str, Any]) -> None:
        self.say(
            SnapshotReady(
                version=Version(message["version"]), stage=StageIndex(message["stage"]),
                item="snapshot", bytes=1000, sha256="0" * 64,
            )
        )  # fmt: skip

    def _close(self, header: bytes) -> None:
        found = STEP_AND_ATTEMPT.search(header, 0, 100)
        assert found is not None
        step, attempt = Step(int(found[1])), int(found[2])
        self._attempt = attempt
        report = RoundReport(step=step, attempt=attempt, ok=True, own_squared=1.0)
        wait = self._world.rng.uniform(0.5, 1.0) * CLOSE_SECONDS
        self._world.later(wait, lambda: self._report(report))

    def _report(self, report: RoundReport) -> None:
        if report.attempt == self._attempt:
            self.say(report)

    def _apply(self, header: bytes) -> None:
        found = STEP_AND_ATTEMPT.search(header, 0, 100)
        assert found is not None
        self._world.applied = max(self._world.applied, int(found[1]))
        done = Applied(step=Step(int(found[1])), digest="d", norm=1.0)
        self._world.later(self._world.rng.uniform(0.5, 1.0) * APPLY_SECONDS, lambda: self.say(done))

    def _leased(self, lease: dict[str, Any]) -> None:
        for item in lease["microbatches"]:
            wait = self._world.rng.uniform(0.1, 1.0) * self._world.step_seconds
            if len(item["accumulate"]) < self._world.manifest.stage_count:
                wait *= AGAIN_SHARE  # a repeated item is alone, the first lease had many
            self._world.later(wait, lambda item=item: self._drive(lease, item))  # type: ignore[misc]

    def _drive(self, lease: dict[str, Any], item: dict[str, Any]) -> None:
        """Complete a microbatch: its peers send their receipts and its trainer the result."""
        if not self.alive:
            return
        step, microbatch = Step(lease["step"]), MicrobatchIndex(item["microbatch"])
        receipts: list[str] = []
        for stage in item["accumulate"]:
            members = list(self._world.ready[stage].values())
            if not members:
                return
            server = self._world.rng.choice(members)
            with self._world.clock.elsewhere():
                receipts.append(server.receipt(step, microbatch))
            server.report(receipts[-1])
        self.say(
            LeaseResult(
                step=step, microbatch=microbatch, lease=lease["lease"], ok=True,
                receipts=tuple(receipts),
            )
        )  # fmt: skip

    def report(self, receipt: str) -> None:
        """Send the receipt within a reporting interval, together with all others collected."""
        if not self._unreported:
            interval = self._world.manifest.limits.receipt_interval_seconds
            self._world.later(self._world.rng.uniform(0, interval), self._report_receipts)
        self._unreported.append(receipt)

    def _report_receipts(self) -> None:
        told, self._unreported = self._unreported, []
        self.say(Receipts(receipts=tuple(told)))

    def receipt(self, step: Step, microbatch: MicrobatchIndex) -> str:
        manifest = self._world.manifest
        assert self.stage is not None
        last = self.stage == manifest.stage_count - 1
        receipt = Receipt(
            run=self._world.run, generation=Generation(1), step=step, microbatch=microbatch,
            stage=self.stage, peer=self.peer,
            samples=manifest.training.sequences_per_microbatch,
            tokens=manifest.tokens_per_microbatch, loss_sum=1.0 if last else None,
        )  # fmt: skip
        return base64.b64encode(sign_receipt(self.identity, receipt)).decode()


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
