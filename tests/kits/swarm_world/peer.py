"""A simulated volunteer: the client's side of the control protocol, and the faults it can have."""

from __future__ import annotations

from collections.abc import Callable

from kits.swarm_world.facts import Violation, sha_of
from kits.swarm_world.microbatches import Computing
from kits.swarm_world.peer_base import Answer, Holding, Link, Params, Parcel
from kits.swarm_world.rounds import Averaging
from swarm_coordinator.core.events import ReceiptsVerified, SessionNumber
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.types import RunId, StageIndex, Version
from swarm_shared.identity.credentials import Receipt
from swarm_shared.protocol import (
    AbortRound,
    AddressUpdate,
    Apply,
    AssignStage,
    CarrierAddress,
    Close,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    Leaving,
    Mask,
    Reachability,
    Ready,
    Refused,
    Roster,
    RosterChange,
    SaveSnapshot,
    SnapshotFailed,
    SnapshotReady,
    StageRequest,
    SyncFailed,
    Welcome,
)
from swarm_shared.scheduling.placement import most_underserved_stage


class SimPeer(Averaging, Computing):
    # ---- life

    def start(self) -> None:
        self.life += 1
        self.alive, self.hung, self.wedged = True, False, False
        self._forget()
        self.later(self.world.rng.random(), self.attach)
        self.later(1.0, self._heartbeats)
        self.later(0.5, self._report)

    def kill(self, _seconds: float = 0.0) -> None:
        self.alive = False
        self.world.end_rounds_of(self)
        for sender, reply in self.serving:
            sender.later(self.world.delay(), lambda reply=reply: reply(Answer("dead")))
        self.serving.clear()
        if self.link is not None and self.link.open:
            self.world.cut(self.link)

    def restart(self, seconds: float) -> None:
        self.kill()
        if not self.leaving:
            self.world.later(seconds, lambda: self.alive or self.gone or self.start())

    def cut(self, _seconds: float) -> None:
        if self.link is not None and self.link.open:
            self.world.cut(self.link)

    def hang(self, seconds: float) -> None:
        self.hung = True
        life = self.life

        def wake() -> None:
            self.hung, self.woke_at = False, self.world.now
            backlog, self.backlog = self.backlog, []
            for entry in backlog:
                self._act(*entry)

        self.world.later(seconds, lambda: self.alive and life == self.life and wake())

    def pause(self, seconds: float) -> None:
        """Its user needs the machine. Started work is finished, as in a grace period."""
        self.paused = True
        for lease, leased in self.waiting:
            self._resolve(lease, leased.microbatch, Answer("failed"))
        self.waiting.clear()
        self._send_heartbeat()
        self.later(seconds, self._resume)

    def _resume(self) -> None:
        self.paused = False
        self._send_heartbeat()

    def wedge(self, seconds: float) -> None:
        """Averaging stands still while heartbeats continue."""
        self.wedged = True
        self.later(4 * seconds, lambda: setattr(self, "wedged", False))

    def worker(self, _seconds: float) -> None:
        """The compute process dies: its state is lost, and the daemon attaches again."""
        self._drop()
        self.cut(0.0)

    def lose(self, _seconds: float) -> None:
        """A microbatch with a signed receipt is lost without the peer noticing."""
        for held in self.holding.held.values() if self.holding is not None else ():
            if held:
                held.popitem()
                return

    def unsaving(self, seconds: float) -> None:
        """No disk space for snapshots."""
        self.unsaving_until = self.world.now + seconds

    def differ(self, _seconds: float) -> None:
        """Its next parameters are wrong."""
        self.differs = True

    def slow(self, seconds: float) -> None:
        """Its computations take a hundred times as long."""
        self.slowness = 100.0
        self.later(seconds, lambda: setattr(self, "slowness", 1.0))

    def stick(self, _seconds: float) -> None:
        """Its compute process stops answering; the daemon ends it after a while."""
        self.stuck = True

        def end() -> None:
            self.stuck = False
            # The process ends with what it holds by then. Work that it received while stuck stays
            # in the queue of that holding, also if it got the holding after it had stuck.
            if self.holding is not None:
                self.worker(0.0)

        self.later(6.0, end)

    def stall(self, seconds: float) -> None:
        """As a trainer it drives nothing; as a stage server it works."""
        self.stalled = True

        def go_on() -> None:
            self.stalled = False
            self._drive_more()

        self.later(4 * seconds, go_on)

    def nan(self, _seconds: float) -> None:
        """Its next computation is not a number."""
        self.gives_nan = True

    def nan_sum(self, _seconds: float) -> None:
        """The sum of its gradients will not be a number."""
        self.sums_nan = True

    def move(self, _seconds: float) -> None:
        """Its router assigns another address."""
        self.address += 1
        self.send(
            AddressUpdate(
                addresses=self.addresses, carrier=self.carrier,
                reachability=Reachability.BEHIND_NAT, offers_relay=False,
            )
        )  # fmt: skip

    def leave(self) -> None:
        self.leaving = True
        for lease, leased in self.waiting:
            self._resolve(lease, leased.microbatch, Answer("failed"))
        self.waiting.clear()
        self.send(Leaving())

    # ---- sessions

    def hello(self) -> tuple[Hello, tuple[Receipt, ...]]:
        holding = self.holding
        hello = Hello(
            run=RunId("run"), software="0", addresses=self.addresses, carrier=self.carrier,
            device="cpu",
            memory_bytes=self.memory_bytes,
            stage=None if holding is None else StageIndex(holding.stage),
            version=Version(0 if holding is None else holding.version),
            averaged_attempt=holding.averaged[0] if holding and holding.averaged else None,
        )  # fmt: skip
        held = holding.held.values() if holding is not None else ()
        return hello, tuple(receipt for of_step in held for receipt in of_step.values())

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"address-{self.address}",)

    @property
    def carrier(self) -> CarrierAddress:
        return CarrierAddress(peer=f"p2pd-{self.id}", addresses=self.addresses, binding="b")

    def attach(self) -> None:
        if not self.gone:
            self.attached = False
            self.world.attach(self)

    def link_lost(self, link: Link) -> None:
        if link is not self.link:
            return
        self.link, self.attached = None, False
        if self.holding is not None:
            self._cancel_round()
            self.holding.closing = None
        self._unprepare()
        masks, self.masks = self.masks, {}
        for answer in masks.values():
            answer(None)
        if self.leaving:
            self.gone = True
            self.kill()
        if not self.gone:
            self.later(0.2 + 2.0 * self.world.rng.random(), self.attach)

    def _heartbeats(self) -> None:
        self._send_heartbeat()
        self.later(1.0, self._heartbeats)

    def _send_heartbeat(self) -> None:
        queued = len(self.serving)
        self.send(Heartbeat(microbatches_per_second=self.speed, queued=queued, paused=self.paused))

    def _report(self) -> None:
        holding = self.holding
        if holding is not None and holding.unreported and self.link is not None and self.attached:
            batch, holding.unreported = tuple(holding.unreported), []
            self.deliver(ReceiptsVerified(SessionNumber(self.link.number), self.id, batch))
        self.later(0.5, self._report)

    # ---- messages of the coordinator

    def on_message(self, link: Link, message: object) -> None:
        if link is not self.link or self.gone:
            return
        if isinstance(message, Welcome):
            self._welcome(message)
        elif not self.attached and not isinstance(message, Refused):
            raise Violation(f"{self.id} gets {message} before its welcome")
        elif isinstance(message, Roster):
            self.roster = message
            self.parted_from(message.revoked)
        elif isinstance(message, RosterChange):
            self._roster_changed(message)
        elif isinstance(message, AssignStage):
            self._assigned(message)
        elif isinstance(message, Lease):
            self.window = message.window
            self.waiting.extend((message, leased) for leased in message.microbatches)
            self.waiting.sort(key=lambda entry: entry[0].step)  # a later one is not awaited
            self._drive_more()
        elif isinstance(message, Mask):
            answer = self.masks.pop(message.request, None)
            if answer is not None:
                answer(frozenset(message.accumulate))
        elif isinstance(message, Close):
            self._close(message)
        elif isinstance(message, AbortRound):
            self._abort(message)
        elif isinstance(message, Apply):
            self._apply(message)
        elif isinstance(message, SaveSnapshot):
            self.later(0.05 * self.world.rng.random(), self._saving(message))
        elif isinstance(message, Goodbye | Refused):
            self.gone = isinstance(message, Refused) or message.finished or self.leaving
            if isinstance(message, Refused) and message.code == "admission":
                if self.id in self.world.banned:
                    self._defy()
                else:
                    # The ban ended while the refusal was in flight, or this peer hung.
                    self.world.start_again(self)

    def _defy(self) -> None:
        """Ignore the refusal, and keep sending work to known peers."""
        holding = self.holding
        if holding is None or self.id not in self.world.banned:
            return
        microbatch = self.world.rng.randrange(self.world.options.microbatches)
        everywhere = frozenset(range(self.world.options.stages))
        step = holding.version + 1
        self._send_on(0, Parcel("train", step, microbatch, everywhere), lambda _: None)
        self.later(0.4, self._defy)

    def _welcome(self, message: Welcome) -> None:
        self.attached, self.generation = True, message.generation
        self.attached_at = self.world.now
        if self.leaving:
            self.send(Leaving())
        if message.keep:
            return
        self._drop()
        if not self.leaving:
            try:
                stage = most_underserved_stage(message.stages, self.memory_bytes)
            except CapacityError:
                stage = StageIndex(0)  # the coordinator has to refuse it
            self.later(0.1 * self.world.rng.random(), lambda: self.send(StageRequest(stage=stage)))

    def _drop(self) -> None:
        self._cancel_round()
        self.holding = None
        self.assignment = None
        self._unprepare()
        self.waiting.clear()
        for sender, reply in self.serving:
            sender.later(self.world.delay(), lambda reply=reply: reply(Answer("failed")))
        self.serving.clear()

    def _roster_changed(self, change: RosterChange) -> None:
        known, whole = self.roster, self.world.whole_rosters[change.serial]
        if known is None or known.serial != change.since:
            raise Violation(f"{self.id} has {known} and receives a change to {change.since}")
        peers = {r.peer: r for r in known.peers if r.peer not in change.removed}
        peers |= {record.peer: record for record in change.changed}
        revoked = known.revoked if change.revoked is None else change.revoked
        if peers != {record.peer: record for record in whole.peers} or revoked != whole.revoked:
            raise Violation(f"{self.id} receives {change}, which does not give {whole}")
        self.roster = whole
        self.parted_from(revoked)

    def _assigned(self, message: AssignStage) -> None:
        if message.prepare:
            self.preparation, self.prepared = message, None
        else:
            self._drop()
            self.assignment = message
        self.later(0.1 + 2.0 * self.world.rng.random() ** 3, lambda: self._downloaded(message))

    def _downloaded(self, message: AssignStage) -> None:
        if message is not self.assignment and message is not self.preparation:
            return
        stage, version = message.stage, message.version
        params: Params | None = () if message.source == "fresh" else None
        for holder in message.holders:
            found = self.world.download(holder.peer, message.item, version, stage)
            if found is not None and found[0] == message.sha256:
                params = found[1]
        if message is self.assignment:
            self.assignment = None
        else:
            self.preparation = None
        if params is None:
            self.send(SyncFailed(stage=stage, version=version, reason="no holder has it"))
            return
        if len(params) != version:
            raise Violation(f"{self.id} fetched version {version} and got {params}")
        if message.prepare:
            self.prepared = Holding(stage, version, params, self.world.options.staleness)
        else:
            self.holding = Holding(stage, version, params, self.world.options.staleness)
        self.send(Ready(stage=stage, version=version, digest=sha_of(params, stage)[:16]))

    def _saving(self, message: SaveSnapshot) -> Callable[[], None]:
        holding = self.holding

        def save() -> None:
            version, stage = message.version, message.stage
            elsewhere = holding is None or (holding.version, holding.stage) != (version, stage)
            if elsewhere or holding is None or self.world.now < self.unsaving_until:
                self.send(SnapshotFailed(version=version, stage=stage, reason="elsewhere by now"))
                return
            item, sha = f"snapshot/{version}/{stage}", sha_of(holding.params, stage)
            self.snapshots[item] = (sha, holding.params)
            self.send(SnapshotReady(version=version, stage=stage, item=item, bytes=1, sha256=sha))

        return save
