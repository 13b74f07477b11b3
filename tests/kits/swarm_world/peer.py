"""A simulated volunteer: its life, its sessions and its stages.

The rules are the ones that ship (`swarm_shared.volunteer_rules`). What is modelled is the hardware
around them, and the daemon's wiring: it carries messages and waits.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from kits.memory import WORK, offers
from kits.swarm_world import audits
from kits.swarm_world.checks import check_account, check_hello
from kits.swarm_world.decisions import CarryOut
from kits.swarm_world.downstream import Downstream, Parcel
from kits.swarm_world.facts import Params, Violation
from kits.swarm_world.network import Edge, Link
from kits.swarm_world.server import StageServer
from kits.swarm_world.stage import Stage
from kits.swarm_world.sums import LEAVING, SumLie
from kits.swarm_world.trainer import Trainer
from swarm_coordinator.core import events
from swarm_coordinator.core.state.held_time import REFUSED_FOR_SECONDS
from swarm_shared import protocol
from swarm_shared.base.errors import CapacityError
from swarm_shared.base.types import Generation, MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.credentials import Receipt
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.volunteer_rules import stage_tenure
from swarm_shared.volunteer_rules.heartbeat import HeartbeatDelta, HeartbeatSnapshot
from swarm_shared.volunteer_rules.stage_account import StageAccount
from swarm_shared.volunteer_rules.stage_tenure import Load, StageTenures, TenureNumber

if TYPE_CHECKING:
    from kits.swarm_world.world import World


class SimPeer:
    def __init__(self, world: World, peer: PeerId, memory_bytes: int, speed: float) -> None:
        self.world, self.id, self.memory, self.speed = world, peer, offers(memory_bytes), speed
        self.life = 0
        self.machine = 0
        """Machines of the same number compute alike, to the bit."""
        self.lies = False
        self.sum_lie = SumLie.NONE
        self.shown: set[tuple[int, int]] = set()
        """Steps and microbatches whose inputs it has given to auditors."""
        self.known_secret = ""
        """The newest secret in an order to audit."""
        self.alive = self.leaving = self.gone = self.hung = False
        self.woke_at = 0.0
        self.address = 0
        self.edges: dict[Edge, None] = {}
        """All that are open, in both roles."""
        self.old_links: list[Link] = []
        self._begin_life()

    def _begin_life(self) -> None:
        """What a process starts with."""
        self.hung = self.wedged = self.paused = self.echoes = False
        self.gives_nan = self.differs = self.cannot_apply = False
        self.expects_other_apply = self.expects_old_apply = False
        self.slowness, self.unsaving_until = 1.0, -1.0
        self.link: Link | None = None
        self.attached, self.attached_at, self.generation = False, 0.0, Generation(0)
        self.roster: protocol.Roster | None = None
        self.members: dict[PeerId, protocol.PeerRecord] = {}
        self.snapshots: dict[str, tuple[str, Params]] = {}
        self.backlog: list[tuple[int, Callable[[], object]]] = []
        self.masks: dict[int, tuple[Downstream, int]] = {}
        """Questions to the coordinator: whose, and which of its."""
        self.tenures = StageTenures()
        self.stages: dict[TenureNumber, Stage] = {}
        self.holding: Stage | None = None
        self.prepared: Stage | None = None
        self.trainer, self.server = Trainer(self), StageServer(self)
        self._ending: set[TenureNumber] = set()
        self._heartbeat = HeartbeatDelta(heartbeat_seconds=1.0)
        self._masks_asked = 0
        self._carry_out = CarryOut(self.tenures.take_actions, self._carry_out_one)

    # ---- life

    def start(self) -> None:
        self.life += 1
        self.alive = True
        self._begin_life()
        self.later(self.world.rng.random(), self.attach)
        self.later(1.0, self._heartbeats)
        self.later(0.5, self._report_receipts)

    def kill(self) -> None:
        self.alive = False
        self.world.all_reduces.lose(self.id)
        for edge in list(self.edges):
            edge.end()
        if self.link is not None:
            self.world.cut(self.link)

    def wake(self) -> None:
        self.hung, self.woke_at = False, self.world.now
        backlog, self.backlog = self.backlog, []
        for entry in backlog:
            self.act(*entry)

    def later(self, seconds: float, action: Callable[[], object]) -> None:
        """Schedule within this process's life; a hung process acts when it wakes."""
        self.world.later(seconds, action, self)

    def act(self, life: int, action: Callable[[], object]) -> None:
        if not self.alive or life != self.life:
            return
        if self.hung:
            self.backlog.append((life, action))
        else:
            action()
            if self.holding is not None and self.holding.worker.shrunk:
                check_account(self.holding)

    def die(self, stage: Stage) -> None:
        """A worker dies; the daemon lives on."""
        tenure = stage.load.tenure
        if self.stages.get(tenure) is stage:
            self._end(tenure)
            self.tenures.worker_died(tenure, "its process is gone")
            self._carry_out()

    def pause(self) -> None:
        """Its user needs the machine. Started work is finished, as in a grace period, but for what
        no other peer waits for."""
        self.paused = True
        for stage in self.stages.values():
            for owed in list(stage.owed):
                owed.give_up()
        self.trainer.pause()
        self._send_heartbeat()

    def resume(self) -> None:
        self.paused = False
        self.trainer.resume()
        self._send_heartbeat()

    def move_address(self) -> None:
        self.address += 1
        self.send(
            protocol.AddressUpdate(
                addresses=self.addresses, carrier=self.carrier,
                reachability=protocol.Reachability.BEHIND_NAT, offers_relay=False,
            )
        )  # fmt: skip

    def leave(self) -> None:
        self.leaving = True
        self.trainer.leave()
        self.send(protocol.Leaving())

    # ---- sessions

    def hello(self) -> tuple[protocol.Hello, tuple[Receipt, ...]]:
        holding = self.holding
        close = holding.close if holding is not None else None
        hello = protocol.Hello(
            run=RunId("run"), software="0", addresses=self.addresses, carrier=self.carrier,
            device="cpu", memory=self.memory,
            stage=None if holding is None else holding.index,
            version=0 if holding is None else holding.account.version,
            digest="" if holding is None else holding.worker.digest,
            averaged_attempt=close.averaged_attempt if close is not None else None,
        )  # fmt: skip
        receipts = holding.account.receipts() if holding is not None else ()
        if holding is not None:
            check_hello(holding, receipts)
        return hello, receipts

    @property
    def addresses(self) -> tuple[str, ...]:
        return (f"address-{self.address}",)

    @property
    def carrier(self) -> protocol.CarrierAddress:
        return protocol.CarrierAddress(
            peer=f"p2pd-{self.id}", addresses=self.addresses, binding="b"
        )

    def attach(self) -> None:
        if not self.gone and self.link is None:
            self.attached = False
            self.world.attach(self)

    def attach_again(self) -> None:
        """End this session, and begin another one."""
        if self.link is not None:
            self.world.cut(self.link)

    def link_lost(self, link: Link) -> None:
        if link is not self.link:
            return
        link.open = False
        self.old_links.append(link)
        self.link, self.attached = None, False
        if self.holding is not None:
            self.holding.report(lambda close: close.session_lost())
        self.tenures.session_lost()
        self._carry_out()
        masks, self.masks = self.masks, {}
        for sender, query in masks.values():
            sender.masked(query, None)
        if self.leaving:
            self.gone = True
            self.kill()
        if not self.gone:
            self.later(0.2 + 2.0 * self.world.rng.random(), self.attach)

    def deliver(self, event: Callable[[events.SessionNumber, PeerId], events.Event]) -> None:
        """Pass an event of the present session to the coordinator, if there is one."""
        if self.link is not None and self.link.open and self.attached:
            self.world.to_coordinator(self.link, event(self.link.number, self.id))

    def send(self, message: protocol.ClientMessage) -> None:
        self.deliver(lambda session, peer: events.MessageReceived(session, peer, message))

    def _heartbeats(self) -> None:
        self._send_heartbeat()
        self.later(1.0, self._heartbeats)

    def _send_heartbeat(self) -> None:
        if self.link is None or not self.attached:
            return
        queued = len(self.holding.tasks) if self.holding is not None else 0
        present = HeartbeatSnapshot(self.speed, queued, 0.0, (), (), self.paused, 0, 0.0)
        message = self._heartbeat.heartbeat(present, len(self.members))
        self.deliver(
            lambda session, peer: events.HeartbeatsReceived(
                (events.PeerHeartbeat(session, peer, message),)
            )
        )

    def _report_receipts(self) -> None:
        if self.holding is not None:
            self.report_receipts(self.holding.account)
        self.later(0.5, self._report_receipts)

    def report_receipts(self, account: StageAccount[Receipt]) -> None:
        if self.link is None or not self.attached:
            return
        batch = account.take_unreported()
        if batch:
            self.deliver(lambda session, peer: events.ReceiptsVerified(session, peer, batch))

    def ask_mask(
        self, step: Step, microbatch: MicrobatchIndex, sender: Downstream, query: int
    ) -> None:
        if self.link is None or not self.attached:
            sender.masked(query, None)
            return
        self._masks_asked += 1
        self.masks[self._masks_asked] = (sender, query)
        self.send(
            protocol.MaskRequest(request=self._masks_asked, step=step, microbatch=microbatch)
        )  # fmt: skip

    # ---- messages of the coordinator

    def on_message(self, link: Link, message: object) -> None:
        if link is not self.link or self.gone:
            return
        if not self.attached and not isinstance(message, protocol.Welcome | protocol.Refused):
            raise Violation(f"{self.id} gets {message} before its welcome")
        match message:
            case protocol.Welcome():
                self._welcome(message)
            case protocol.Roster():
                self._use_roster(message)
            case protocol.RosterChange():
                self._use_roster(self.world.roster_after(self, message))
            case protocol.AssignStage():
                self.tenures.assigned(message)
                self._carry_out()
            case protocol.Lease():
                self.trainer.take(message)
            case protocol.Mask():
                if asked := self.masks.pop(message.request, None):
                    asked[0].masked(asked[1], message.accumulate)
            case (
                protocol.Close()
                | protocol.SumCheck()
                | protocol.AbortRound()
                | protocol.Apply()
                | protocol.SaveSnapshot()
            ):
                if self.holding is not None:
                    self.holding.report(lambda close: close.order(message))
                if self.sum_lie in LEAVING and isinstance(message, protocol.AbortRound):
                    self.kill()
            case protocol.Drop():
                audits.drop(self, message)
            case protocol.Audit():
                audits.audit(self, message)
            case protocol.Goodbye() | protocol.Refused():
                self._parted(message)

    def _welcome(self, message: protocol.Welcome) -> None:
        self.attached, self.generation = True, message.generation
        self.attached_at = self.world.now
        self._heartbeat = HeartbeatDelta(message.heartbeat_seconds or 1.0)
        if self.leaving:
            self.send(protocol.Leaving())
        if message.keep:
            return
        self.tenures.drop()
        self._carry_out()
        if not self.leaving:
            try:
                stage = most_underserved_stage(message.stages, self.memory, WORK)
            except CapacityError:
                stage = StageIndex(0)  # the coordinator has to refuse it
            self.later(
                0.1 * self.world.rng.random(), lambda: self.send(protocol.StageRequest(stage=stage))
            )

    def _use_roster(self, roster: protocol.Roster) -> None:
        self.roster = roster
        self.members = {r.peer: r for r in roster.peers if r.peer not in roster.revoked}
        self.parted_from(roster.revoked)
        for sender in self.senders():
            sender.roster_changed()

    def parted_from(self, revoked: Container[PeerId]) -> None:
        """End all links with these peers."""
        for edge in list(self.edges):
            if edge.sender.peer.id in revoked or edge.receiver.id in revoked:
                edge.end()

    def _is_expelled(self, message: protocol.Goodbye | protocol.Refused) -> bool:
        return isinstance(message, protocol.Refused) and message.code == "protocol"

    def _rest_seconds(self, message: protocol.Goodbye | protocol.Refused) -> float:
        """Seconds after which a peer may come back that accidents had hold up several steps."""
        if not isinstance(message, protocol.Refused) or "held up the run" not in message.reason:
            return 0.0
        seconds = message.retry_seconds or 0.0
        return seconds if seconds < REFUSED_FOR_SECONDS else 0.0

    def _parted(self, message: protocol.Goodbye | protocol.Refused) -> None:
        rest_seconds = self._rest_seconds(message)
        if rest_seconds:
            self.world.counts["rest"] += 1
            self.world.later(rest_seconds, lambda: self.world.start_again(self))
        elif self._is_expelled(message) and not (self.lies or self.sum_lie):
            raise Violation(f"{self.id} is honest and is refused: {message.reason}")
        self.gone = isinstance(message, protocol.Refused) or message.finished or self.leaving
        if isinstance(message, protocol.Refused) and message.code == "admission":
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
        microbatch = MicrobatchIndex(self.world.rng.randrange(self.world.options.microbatches))
        everywhere = tuple(StageIndex(s) for s in range(self.world.options.stages))
        parcel = Parcel(holding.account.step, microbatch, everywhere)
        self.trainer.first.send(parcel, lambda _: None)
        self.later(0.4, self._defy)

    # ---- stages

    def senders(self) -> list[Downstream]:
        """To stage 0, and to the one after the held stage."""
        following = self.holding.next if self.holding is not None else None
        return [self.trainer.first] if following is None else [self.trainer.first, following]

    def current_step(self) -> Step | None:
        return self.holding.account.step if self.holding is not None else None

    def _carry_out_one(self, action: stage_tenure.Action) -> None:
        match action:
            case stage_tenure.StartTenure(load):
                stage = self.stages[load.tenure] = Stage(self, load)
                if self._ending or len(self.stages) > 2:
                    raise Violation(f"{self.id} starts a worker beside {self.stages}")
                self._load(stage, load)
            case stage_tenure.Reload(load):
                stage = self.stages[load.tenure]
                stage.stop_serving()
                if self.holding is stage:
                    self._hold(None)
                self._load(stage, load)
            case stage_tenure.EndTenure(tenure):
                self._end(tenure)
                self._ending.add(tenure)
                self.later(0.05 * self.world.rng.random(), lambda: self._ended(tenure))
            case stage_tenure.Install(tenure, switched):
                stage = self.stages[tenure]
                if stage.account.version != stage.load.assignment.version + switched:
                    raise Violation(f"{self.id} serves {stage.load} at {stage.account.version}")
                stage.install()
                self._hold(stage)
            case stage_tenure.PreparedReady(tenure):
                prepared = self.prepared = self.stages[tenure]
                if self.holding is not None:
                    self.holding.report(lambda close: close.stage_prepared(prepared.account))
            case stage_tenure.PreparedLost():
                self.prepared = None
                if self.holding is not None:
                    self.holding.report(lambda close: close.prepared_lost())
            case stage_tenure.ForgetSnapshots():
                self.snapshots.clear()
            case stage_tenure.Send(message):
                self.send(message)
            case stage_tenure.RejoinAfter(seconds):
                self.later(seconds, self.attach_again)

    def _load(self, stage: Stage, load: Load) -> None:
        """Start a worker if there is none, and fetch the state."""
        stage.load = load
        self.later(
            0.1 + 2.0 * self.world.rng.random() ** 3, lambda: self._fetched(stage, load)
        )  # fmt: skip

    def _fetched(self, stage: Stage, load: Load) -> None:
        if self.stages.get(load.tenure) is not stage or stage.load is not load:
            return
        message = load.assignment
        params: Params | None = () if message.source == "fresh" else None
        for holder in message.holders:
            found = self.world.download(holder.peer, message.item, message.version, message.stage)
            if found is not None and found[0] == message.sha256:
                params = found[1]
        if params is None:
            self._end(load.tenure)
            self.tenures.load_failed(load.tenure, "no holder has it")
            self._carry_out()
            return
        if len(params) != message.version:
            raise Violation(f"{self.id} fetched version {message.version} and got {params}")

        def loaded(digest: str) -> None:
            self.tenures.loaded(load, digest)  # perhaps an older one than the latest
            self._carry_out()

        def take() -> str:
            stage.loaded(params)
            return stage.worker.digest

        stage.worker.request(0.3 * self.world.rng.random() ** 3, take, loaded)

    def _hold(self, stage: Stage | None) -> None:
        if self.prepared is stage:
            self.prepared = None
        self.holding = stage
        self._step_changed()

    def _end(self, tenure: TenureNumber) -> None:
        stage = self.stages.pop(tenure)
        stage.end()
        if self.holding is stage:
            self._hold(None)

    def _ended(self, tenure: TenureNumber) -> None:
        self._ending.discard(tenure)
        self.tenures.ended(tenure)
        self._carry_out()

    # ---- what the held stage's close decides

    def step_applied(self) -> None:
        self.tenures.step_applied()
        self._step_changed()

    def _step_changed(self) -> None:
        """What is in flight of an older step is not wanted any more."""
        for sender in self.senders():
            sender.oldest_step_is(self.current_step())

    def switch(self) -> None:
        self.tenures.switched()
        self._carry_out()

    def drop_outdated(self) -> None:
        self.tenures.prepared_outdated()
        self._carry_out()

    def reported(self, stage: Stage, message: object) -> None:
        """By a fault, an Apply follows a report: one of an attempt that the run has given up, or
        the one that was carried out last, which is answered again."""
        if not isinstance(message, protocol.RoundReport) or not message.ok:
            return
        order = stage.worker.last_apply if self.expects_old_apply else None
        if self.expects_other_apply:
            order = protocol.Apply(
                step=message.step, attempt=message.attempt - 1, global_norm=1.0, learning_rate=0.1
            )
        if order is not None:
            self.expects_other_apply = self.expects_old_apply = False
            self.later(
                0.0,
                lambda: stage is self.holding and stage.report(lambda close: close.order(order)),
            )
