"""One volunteer in one run: its view of the run, its sessions, and the user's orders.

Owns the state that outlives a session, so that losing the coordinator costs nothing: the stage, its
accumulator and its receipts stay, and the next hello reports them (design: the life of a step).
"""

from __future__ import annotations

import logging
import time

import trio

from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.connectivity.relay_policy import RelayPolicy
from swarm_client.control.status_document import SuspendReason
from swarm_client.control.status_sentence import Suspension
from swarm_client.membership.admission_gate import AdmissionGate
from swarm_client.membership.membership import Membership, verify_welcome
from swarm_client.membership.roster import RosterView
from swarm_client.pipeline.held_stage import Holding
from swarm_client.stage.handle.self_test import fault_error, passed_text, run_self_test
from swarm_client.stage.handle.warm_worker import WarmWorker
from swarm_client.volunteer.context import VolunteerContext, WorkerLimits
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_client.volunteer.member import Member
from swarm_client.volunteer.pause import Pause
from swarm_client.volunteer.peer_directory import PUBLISH_INTERVAL_SECONDS, PeerDirectory
from swarm_client.volunteer.reconnect import Attachment, heartbeat_seconds
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.text import duration_text
from swarm_shared.base.types import PeerId, StageIndex, Version
from swarm_shared.probe.server import answer_members_only, serve_probe
from swarm_shared.protocol import (
    SOFTWARE_VERSION,
    CoordinatorMessage,
    DoctorHello,
    Heartbeat,
    Hello,
    LinkBytes,
    PeerRecord,
    Roster,
    RosterChange,
    RunNews,
    Welcome,
)
from swarm_shared.protocol.versions import PROTOCOL_VERSIONS
from swarm_shared.run.manifest import LimitsConfig
from swarm_shared.transfer.download_meter import DownloadProgress
from swarm_shared.transfer.transfer import serve_transfers
from swarm_shared.volunteer_rules.heartbeat import HeartbeatDelta, HeartbeatSnapshot

log = logging.getLogger(__name__)


class Volunteer:
    """The volunteer of one device. `run` takes part until the run ends or the volunteer leaves; its
    other methods carry out what users, the governor and the session ask for."""

    def __init__(self, context: VolunteerContext, worker: AveragingWorker) -> None:
        invite, node, report = context.invite, context.node, context.report
        self.context = context
        self.node = node
        self.roster = RosterView()
        self.attachment = Attachment(node, invite, report)
        self.member: Member | None = None
        """What exists from the first admission on; None before."""
        self.admitted = trio.Event()
        self.news: RunNews | None = None
        self._heartbeat_delta = HeartbeatDelta(heartbeat_seconds=1.0)
        self._snapshots = SnapshotStore(context.home, invite.run_id, context.claim_disk)
        self._spare = WarmWorker(context.options.threads, context.home.log_folder / "worker.log")
        context.nursery.start_soon(self._spare.run)
        self._own_transport_only = False
        self._self_test: trio.CancelScope | None = None
        """The self-test in progress."""
        self._waits_for_memory: Suspension | None = None
        """The latest pause because no stage fitted."""
        self.pause = Pause(self, context.options.long_pause_seconds, context.nursery)
        self._directory = PeerDirectory(
            context.identity, worker, invite.run_id, invite.organiser, context.clock
        )
        self.averager = GroupAverager(
            worker, node, self.roster, context.identity, invite.run_id, invite.organiser,
            context.clock,
        )  # fmt: skip
        self.relay_policy = RelayPolicy(
            node, invite, self.roster, self.averager, self.attachment, report,
            may_relay=context.options.may_relay,
        )  # fmt: skip
        worker.on_change(self.relay_policy.wake)
        node.admit_only(lambda peer, protocol: self.roster.knows(peer))
        node.on_network_change.append(self.attachment.network_changed)
        context.nursery.start_soon(self._hand_over_stages)
        self._gate = AdmissionGate(invite.run_id, invite.organiser, self.roster, context.clock)
        self._snapshots.clear()
        serve_transfers(node, self._snapshots.find, self._gate.check_transfer)
        judge = answer_members_only(
            invite.run_id, invite.organiser, self._gate.check, context.clock
        )
        serve_probe(node, judge)

    async def run(self) -> None:
        """Take part until the run has ended or this volunteer has left."""
        await self.attachment.run(self)

    # ---- state

    @property
    def membership(self) -> Membership | None:
        """The membership of the latest admission; None before the first."""
        return None if self.member is None else self.member.membership

    @property
    def holding(self) -> Holding | None:
        """The stage that is served; None while there is none."""
        return None if self.member is None else self.member.pipeline.holding

    @property
    def loading_stage(self) -> StageIndex | None:
        """The stage that is being loaded while none is held."""
        return None if self.member is None else self.member.stages.loading_stage

    @property
    def downloads(self) -> tuple[DownloadProgress, ...]:
        """The downloads in progress."""
        return () if self.member is None else self.member.downloads

    async def use_directory(self) -> None:
        """Publish this peer in hivemind's DHT while it holds a stage; then look other members up,
        too, while the coordinator is absent."""
        while True:
            record = self._directory_record()
            if record is not None:
                await self._directory.publish(record)
                if not self.attachment.attached:
                    for member_record in await self._directory.lookup():
                        self.roster.refresh(member_record)
            await trio.sleep(PUBLISH_INTERVAL_SECONDS)

    def _directory_record(self) -> PeerRecord | None:
        holding, membership = self.holding, self.membership
        if holding is None or membership is None:
            return None
        return PeerRecord(
            peer=self.node.peer_id, stage=holding.stage, addresses=self.node.addresses,
            certificate=membership.certificate, carrier=self.averager.carrier_address(),
            microbatches_per_second=holding.meter.microbatches_per_second,
        )  # fmt: skip

    def doctor_hello(self) -> DoctorHello:
        """The hello to a peer that is asked to probe this one from outside."""
        invite, membership = self.context.invite, self.membership
        return DoctorHello(
            run=invite.run_id, software=SOFTWARE_VERSION, protocols=PROTOCOL_VERSIONS,
            token=None if membership is not None else invite.token,
            certificate=None if membership is None else membership.certificate,
        )  # fmt: skip

    # ---- a session (`swarm_client.volunteer.reconnect`)

    async def give_up_stage(self) -> None:
        """Drop the held stage, and the one that is loaded."""
        if self.member is not None:
            await self.member.stages.drop()

    async def self_test(self) -> bool:
        """Test this device, without a held stage; False when the volunteer leaves instead. A pause
        frees it at once; the test begins anew when that is over.

        MachineError if a fault was found; another SwarmError if the test cannot be carried out.
        """
        options, report = self.context.options, self.context.report
        while await self.wait_may_attach() and not self.attachment.leaving:
            report(f"this machine tests itself for {duration_text(options.self_test_seconds)}")
            with trio.CancelScope() as self._self_test:
                result = await run_self_test(
                    options.device, min(options.threads, options.limits.threads),
                    options.self_test_seconds, self.context.home.log_folder,
                    options.limits.duty_cycle,
                )  # fmt: skip
                if result.fault:
                    raise fault_error(options.device, result)
                report(f"the self-test has passed: {passed_text(result)}; attaching again")
                return True
        return False

    async def wait_may_attach(self) -> bool:
        """Wait until a pause without a held stage ends; False when the volunteer leaves
        meanwhile."""
        if self.suspended is not None and self.holding is None:
            await self.pause.over.wait()
            return not self.attachment.leaving
        return True

    def hello(self) -> Hello:
        """Return the hello that opens a session with the coordinator."""
        invite, options, holding = self.context.invite, self.context.options, self.holding
        announced = self.relay_policy.announcement()
        return Hello(
            run=invite.run_id, software=SOFTWARE_VERSION, protocols=PROTOCOL_VERSIONS,
            token=invite.token, name=options.name, team=options.team, owner=options.owner,
            addresses=announced.addresses, carrier=announced.carrier,
            reachability=announced.reachability, offers_relay=announced.offers_relay,
            device=options.device.label, memory=options.offer(trio.current_time()),
            wanted_stage=options.wanted_stage,
            stage=holding.stage if holding is not None else None,
            version=holding.version if holding is not None else Version(0),
            digest=holding.worker.digest if holding is not None else "",
            averaged_attempt=holding.close.averaged_attempt if holding is not None else None,
            receipts=holding.account.receipts() if holding is not None else (),
        )  # fmt: skip

    async def accept_welcome(self, welcome: Welcome) -> LimitsConfig:
        """Verify the welcome before anything of it is used."""
        context = self.context
        membership = verify_welcome(welcome, context.invite, self.node.peer_id, context.clock)
        manifest = membership.manifest
        self._gate.attached(welcome.generation)
        self.roster.site = welcome.site
        self._heartbeat_delta = HeartbeatDelta(heartbeat_seconds(welcome, manifest.limits))
        if self.member is None:
            self.member = self._become_member(membership)
        else:
            self.context.report("attached to the coordinator again")
            await self.member.admitted_again(membership, keep=welcome.keep)
        self._directory.bootstrap_from(welcome.directory)
        self.relay_policy.admitted()
        self.admitted.set()
        return manifest.limits

    def _become_member(self, membership: Membership) -> Member:
        member = Member(
            self.context, membership, self.attachment, self.roster, self._gate, self.averager,
            self._snapshots, self._spare,
        )  # fmt: skip
        member.use_mirrors(allowed=not self._own_transport_only)
        if self.suspended is not None:
            member.pipeline.pause()
        if self.attachment.leaving:
            member.pipeline.trainer.leave()
        manifest = membership.manifest
        self.context.report(
            f"admitted to run {manifest.name!r}: {manifest.stage_count} stages, "
            f"{manifest.training.steps} steps"
        )
        return member

    async def join_run(self, welcome: Welcome) -> None:
        """Ask for a stage."""
        if self.member is not None:
            await self.member.join_run(welcome)

    def heartbeat(self) -> Heartbeat:
        """Return the next heartbeat; it takes the work that was done since the previous one."""
        holding = self.holding
        computed, busy_seconds = holding.meter.take_work() if holding else (0, 0.0)
        return self._heartbeat_delta.heartbeat(
            HeartbeatSnapshot(
                microbatches_per_second=holding.meter.microbatches_per_second if holding else 0.0,
                queued=holding.in_flight if holding else 0,
                up_bytes_per_second=self.node.bandwidth.own_up_bytes_per_second,
                links=self.links(), paths=tuple(self.node.paths()),
                paused=self.suspended is not None, computed=computed, busy_seconds=busy_seconds,
                arithmetic=holding.worker.configured.arithmetic if holding else None,
            ),
            len(self.roster),
        )  # fmt: skip

    def take_receipts(self) -> tuple[str, ...]:
        """Receipts that have not been sent to the coordinator yet."""
        return self.holding.account.take_unreported() if self.holding is not None else ()

    def detached(self) -> None:
        """End what belongs to the session, which is lost."""
        self._gate.detached()
        if self.member is not None:
            self.member.session_lost()

    def links(self) -> tuple[LinkBytes, ...]:
        """Bytes per remote and protocol, in both directions, over all carriers."""
        return (*self.node.link_bytes(), *self.averager.links())

    async def handle(self, message: CoordinatorMessage) -> None:
        """Carry out one of the coordinator's orders."""
        match message:
            case Roster():
                self._roster_changed(self.roster.replace(message))
            case RosterChange():
                self._roster_changed(self.roster.change(message))
            case RunNews():
                self.news = message
            case _ if self.member is not None:
                self.member.handle(message)
            case _:
                raise ProtocolError(f"the coordinator sent {message.kind!r} before a welcome")

    def _roster_changed(self, revoked: frozenset[PeerId]) -> None:
        for peer in filter(self.node.is_connected, revoked):
            self.context.nursery.start_soon(self._disconnect_revoked, peer)
        self.relay_policy.roster_changed()
        if self.member is not None:
            self.member.pipeline.roster_changed()

    async def _disconnect_revoked(self, peer: PeerId) -> None:
        """Close all connections with a peer that the coordinator has revoked."""
        try:
            await self.node.disconnect(peer)
        except NetworkError as error:
            log.info("the links with %s did not close cleanly: %s", peer, error)

    # ---- pausing (`swarm_client.volunteer.pause`)

    @property
    def suspended(self) -> Suspension | None:
        """The suspension in force; None while the volunteer computes."""
        return self.pause.suspension

    def suspend(self, reason: SuspendReason, until: float | None = None) -> None:
        """Compute nothing from now on, and keep what is accumulated
        (`swarm_client.volunteer.pause`). A second call replaces reason and time."""
        self.pause.suspend(reason, until)

    def resume(self) -> None:
        """End the suspension."""
        self.pause.resume()

    def _interrupt_self_test(self) -> None:
        if self._self_test is not None:
            self._self_test.cancel()

    def pause_work(self) -> None:
        """Take no new work."""
        self._interrupt_self_test()
        if self.member is not None:
            self.member.pipeline.pause()
        self.attachment.send(self.heartbeat())

    def resume_work(self) -> None:
        """Take new work again, and report that."""
        if self.member is not None:
            self.member.pipeline.resume()
        self.attachment.send(self.heartbeat())

    def hand_back_work(self) -> None:
        """Cancel what is in flight."""
        if self.member is not None:
            self.member.pipeline.server.hand_back()

    def leave_until_resumed(self) -> None:
        """Give the stage up for a long pause; attach again when it is over."""
        self.context.report("this pause is long, so the stage is given up until it ends")
        self.attachment.leave_until_resumed()

    # ---- a sleep of the machine (decision 0052)

    async def fall_asleep(self, seconds: float) -> None:
        """Pause, ask the coordinator to go, and end the session when it agrees or `seconds` are
        over. The stage stays: after a short sleep it is still of use."""
        suspended = self.suspended
        if suspended is None or suspended.reason is not SuspendReason.PAUSED_BY_USER:
            self.suspend(SuspendReason.MACHINE_SLEEPS)
        await self.attachment.fall_asleep(seconds)
        self.hand_back_work()

    def wake(self) -> None:
        """Attach again after a sleep, and end the suspension that the sleep began."""
        suspended = self.suspended
        if suspended is not None and suspended.reason is SuspendReason.MACHINE_SLEEPS:
            self.resume()
        self.attachment.wake()

    # ---- limits

    def limit_network(self, *, own_transport_only: bool, for_others: bool) -> None:
        """Restrict transfers to this peer's own host, and whether it relays for other peers."""
        self._own_transport_only = own_transport_only
        if self.member is not None:
            self.member.use_mirrors(allowed=not own_transport_only)
        self.relay_policy.set_relaying_disabled(not for_others)

    def limit(self, limits: WorkerLimits) -> None:
        """Limit the compute process's use of its device from now on."""
        options = self.context.options
        if limits != options.limits:
            options.limits = limits
            if self.member is not None:
                self.member.stages.limits_changed()

    def offer_memory(self, memory: MemoryOffer) -> None:
        """Set the memory that a stage may take. A held stage keeps to it, or is handed over."""
        options = self.context.options
        options.device = options.device.offering(memory)
        if self.member is not None:
            self.member.stages.offer_changed()
        waiting = self._waits_for_memory
        if waiting is not None and waiting is self.suspended and self._some_stage_fits():
            self.resume()

    # ---- memory that does not suffice (`swarm_client.volunteer.memory_shortage`)

    async def _hand_over_stages(self) -> None:
        """Hand over each stage that the device has too little memory for; pause if no other stage
        fits."""
        shortage = self.context.options.shortage
        while True:
            await shortage.wait_begun()
            if not self._some_stage_fits():
                self._wait_for_memory(shortage.seconds_left(trio.current_time()))
            self.attachment.leave_until_resumed()

    def _wait_for_memory(self, seconds: float) -> None:
        """Pause for this time; 0: until the preferences offer more memory."""
        why = "no stage of this run fits the memory that is left"
        if not seconds:
            self.context.report(f"{why}; waiting until the preferences leave more")
            self.suspend(SuspendReason.MEMORY_SHORT)
        else:
            self.context.report(f"{why}; trying again in {duration_text(seconds)}")
            # When this pause ends, or a user ends it, the same stage is tried again.
            self.context.options.shortage.lift()
            self.suspend(SuspendReason.MEMORY_SHORT, time.time() + seconds)
            self.context.nursery.start_soon(self._resume_after, seconds, self.suspended)
        self._waits_for_memory = self.suspended

    def _some_stage_fits(self) -> bool:
        options, membership = self.context.options, self.membership
        if membership is None:
            return True
        offer = options.offer(trio.current_time())
        return any(
            offer.holds(stage.memory)
            for number, stage in enumerate(membership.manifest.stages)
            if options.wanted_stage in (None, number)
        )

    async def _resume_after(self, seconds: float, suspension: Suspension | None) -> None:
        """End a suspension after a time, unless another one has taken its place."""
        await trio.sleep(seconds)
        if self.suspended is suspension:
            self.resume()

    # ---- leaving

    def leave(self) -> None:
        """Finish what is in flight, take nothing new, and leave when the coordinator agrees."""
        self.pause.leave()
        self._interrupt_self_test()
        if self.member is not None:
            self.member.pipeline.trainer.leave()
        self.attachment.leave()
