"""One volunteer in one run: its stage, its view of the run, and the coordinator's orders.

Owns the state that outlives a session, so that losing the coordinator costs nothing: the stage, its
accumulator and its receipts stay, and the next hello reports them (design: the life of a step).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import trio

from swarm_client.connectivity.relay_policy import RelayPolicy
from swarm_client.control.status_document import SuspendReason
from swarm_client.control.suspension import Suspension
from swarm_client.machine.home import Home
from swarm_client.membership.admission_gate import AdmissionGate
from swarm_client.membership.membership import Membership, renew_certificate, verify_welcome
from swarm_client.membership.roster import RosterView
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.mask_client import MaskClient
from swarm_client.pipeline.samples import RunSamples
from swarm_client.pipeline.stage_links import StageLinks
from swarm_client.pipeline.stage_server import HELLO_LIMITS, StageServer
from swarm_client.pipeline.trainer import Trainer
from swarm_client.pipeline.uplink_share import UplinkShare
from swarm_client.volunteer import hello as self_report
from swarm_client.volunteer.contribution import ContributionCounter
from swarm_client.volunteer.dataset import fetch_data
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_client.volunteer.options import VolunteerOptions
from swarm_client.volunteer.pause import Pause
from swarm_client.volunteer.peer_directory import PeerDirectory
from swarm_client.volunteer.reconnect import Attachment
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_client.volunteer.stage_manager import StageManager, WorkerLimits
from swarm_shared.base.errors import NetworkError, ProtocolError
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.types import Generation, PeerId, StageIndex, Step
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.network import Node
from swarm_shared.probe.server import answer_members_only, serve_probe
from swarm_shared.protocol import (
    STAGE_PROTOCOL,
    AbortRound,
    Apply,
    AssignStage,
    CertificateRenewed,
    Close,
    CoordinatorMessage,
    DoctorHello,
    Heartbeat,
    Hello,
    Lease,
    LinkBytes,
    Mask,
    PeerRecord,
    Roster,
    RosterChange,
    RunNews,
    SaveSnapshot,
    StageRequest,
    Welcome,
)
from swarm_shared.run.manifest import LimitsConfig, Manifest
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.transfer.transfer import TransferSource, serve_transfers
from swarm_shared.volunteer_rules.heartbeat import HeartbeatDelta

log = logging.getLogger(__name__)

MAX_STAGE_STREAMS = 4
"""Maximum number of stage streams of one sender: one per ordered pair, and another while it moves
to a better link."""

Report = Callable[[str], None]


class Volunteer:
    """Needs a node and a nursery; `attachment.run` drives it until it returns."""

    def __init__(
        self,
        identity: Identity,
        invite: Invite,
        home: Home,
        node: Node,
        averager: GroupAverager,
        options: VolunteerOptions,
        report: Report,
        nursery: trio.Nursery,
    ) -> None:
        self.identity = identity
        self.invite = invite
        self.home = home
        self.node = node
        self.options = options
        self.report = report
        self.membership: Membership | None = None
        self.attachment = Attachment(self, node, invite, report)
        self.roster = RosterView()
        self._heartbeat_delta = HeartbeatDelta(heartbeat_seconds=1.0)
        self.news: RunNews | None = None
        self.on_admitted: Callable[[Manifest], None] = lambda manifest: None
        self.contribution = ContributionCounter()
        self.snapshots = SnapshotStore(home, invite.run_id)
        self.averager = averager
        self.disk_guard: Callable[[int], None] = lambda size_bytes: None
        self._own_transport_only = False
        self._nursery = nursery
        self._stage_manager = StageManager(self, nursery)
        self._trainer = Trainer(self.send, self.current_step, nursery)
        self._masks = MaskClient(self.attachment.send)
        self.directory = PeerDirectory(
            identity, averager.worker.directory, invite.run_id, invite.organiser
        )
        averager.bind(node, self.roster, invite.run_id)
        self.relay_policy = RelayPolicy(
            node, invite, self.roster, lambda: averager.carrier_address(identity),
            lambda relays: averager.worker.reconfigure(trusted_relays=relays),
            self.attachment.send, report, may_relay=options.may_relay,
        )  # fmt: skip
        averager.worker.on_change(self.relay_policy.wake)
        node.admit_only(lambda peer, protocol: self.roster.knows(peer))
        node.on_network_change(self.attachment.network_changed)
        self.gate = AdmissionGate(invite.run_id, invite.organiser, self.roster)
        self.uplink_share = UplinkShare(node.bandwidth, averager)
        self.stage_server = StageServer(self.gate, self.uplink_share, self.send)
        self.pause = Pause(
            self._trainer, self.stage_server, lambda: self.send(self.heartbeat()),
            self._leave_until_resumed, options.long_pause_seconds, nursery,
        )  # fmt: skip
        self.stage_links = StageLinks(
            node, self.roster, self.stage_server, lambda: self.member, self._masks.ask, nursery
        )
        self.snapshots.clear()
        serve_transfers(node, self.snapshots.find, self.gate.check_transfer)
        serve_probe(node, answer_members_only(invite.run_id, invite.organiser, self.gate.check))

    # ---- state

    @property
    def holding(self) -> Holding | None:
        return self._stage_manager.holding

    @property
    def loading_stage(self) -> StageIndex | None:
        """The stage that is being loaded while none is held."""
        return self._stage_manager.loading_stage

    def current_step(self) -> Step | None:
        return self.holding.step if self.holding is not None else None

    @property
    def member(self) -> Membership:
        """The membership; only once the volunteer has been admitted, which stays so."""
        assert self.membership is not None
        return self.membership

    def step_changed(self) -> None:
        """The held stage has another step now, or no stage is held any more."""
        self._trainer.step_changed()

    def generation(self) -> Generation:
        return self.member.generation

    def send(self, message: FrozenModel) -> None:
        """Send to the coordinator, if there is a session."""
        self.attachment.send(message)

    async def use_directory(self) -> None:
        """Publish this peer in hivemind's DHT; look other members up while the coordinator is
        absent."""
        await self.directory.run(
            self._directory_record, lambda: self.attachment.session is None, self.roster.refresh
        )

    def _directory_record(self) -> PeerRecord | None:
        holding, membership = self.holding, self.membership
        if holding is None or membership is None:
            return None
        carrier = self.averager.carrier_address(self.identity)
        return self_report.directory_record(holding, self.node, membership, carrier)

    def doctor_hello(self) -> DoctorHello:
        return self_report.doctor_hello(self.invite, self.membership)

    def _show_membership(self) -> None:
        membership = self.membership
        if membership is not None:
            self.averager.set_membership(
                self.identity, self.invite.organiser, membership.certificate,
                tuple(self.roster.revoked),
            )  # fmt: skip

    # ---- a session (`swarm_client.volunteer.reconnect.AttachmentHandler`)

    async def give_up_stage(self) -> None:
        await self._stage_manager.drop()

    async def wait_may_attach(self) -> bool:
        """Wait until a pause without a held stage ends; False when the volunteer leaves
        meanwhile."""
        if self.suspended is not None and self.holding is None:
            await self.pause.wait_over()
            return not self.attachment.leaving
        return True

    def hello(self) -> Hello:
        return self_report.hello(
            self.invite, self.options, self.relay_policy.announcement(), self.holding
        )

    async def accept_welcome(self, welcome: Welcome) -> LimitsConfig:
        """Verify the welcome before anything of it is used."""
        membership = verify_welcome(welcome, self.invite, self.node.peer_id)
        manifest, before = membership.manifest, self.membership
        self.gate.attached(welcome.generation)
        self.membership = self.stage_server.membership = membership
        self._heartbeat_delta = HeartbeatDelta(
            welcome.heartbeat_seconds or manifest.limits.heartbeat_seconds
        )
        if before is None:
            # Public: the protocol checks a certificate itself, and a joining peer's may arrive
            # before the roster does.
            self.node.serve(
                STAGE_PROTOCOL, self.stage_server.handle, HELLO_LIMITS, public=True,
                max_streams_per_peer=MAX_STAGE_STREAMS,
            )  # fmt: skip
            self.report(
                f"admitted to run {manifest.name!r}: {manifest.stage_count} stages, "
                f"{manifest.training.steps} steps"
            )
            self.on_admitted(manifest)
        else:
            self.report("attached to the coordinator again")
        if not welcome.keep or (before is not None and before.manifest != manifest):
            await self._stage_manager.drop()
        self.averager.use_manifest(manifest)
        self._show_membership()
        self.directory.bootstrap_from(welcome.directory)
        self.relay_policy.admitted()
        return manifest.limits

    async def join_run(self, welcome: Welcome) -> None:
        """Fetch the data, then ask for a stage."""
        manifest = self.member.manifest
        if not self._trainer.begun:
            folder = await fetch_data(
                self.node, self.home, self.invite.run_id, manifest,
                TransferSource(self.invite.coordinator, self.invite.addresses),
                self.member.certificate, self.claim_disk,
                use_urls=not self._own_transport_only, lock=self.options.data_lock,
            )  # fmt: skip
            self._trainer.begin(
                RunSamples(manifest, folder),
                self.stage_links.downstream(StageIndex(0), self._nursery),
            )
        await self._stage_manager.wait_ready()
        stage = self.options.wanted_stage
        if stage is None:
            stage = most_underserved_stage(welcome.stages, self.options.device.memory_bytes)
        self.send(StageRequest(stage=stage))

    def heartbeat(self) -> Heartbeat:
        paused = self.suspended is not None
        return self_report.heartbeat(
            self._heartbeat_delta,
            len(self.roster),
            self.holding,
            self.node,
            self.links(),
            paused=paused,
        )

    def take_receipts(self) -> tuple[str, ...]:
        return self.holding.account.take_unreported() if self.holding is not None else ()

    def detached(self) -> None:
        self.gate.detached()
        self._stage_manager.session_lost()
        self._masks.session_lost()

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
            case CertificateRenewed():
                self.membership = self.stage_server.membership = renew_certificate(
                    self.member, message.certificate, self.node.peer_id
                )
            case AssignStage():
                await self._stage_manager.take(message)
            case Lease():
                self._trainer.take(message)
            case Mask():
                self._masks.answer(message)
            case Close() | AbortRound() | Apply() | SaveSnapshot():
                self._stage_manager.put_close_order(message)
            case RunNews():
                self.news = message
            case _:
                raise ProtocolError(f"the coordinator sent {message.kind!r} in a session")

    def _roster_changed(self, revoked: frozenset[PeerId]) -> None:
        for peer in filter(self.node.is_connected, revoked):
            self._nursery.start_soon(self._disconnect_revoked, peer)
        self._show_membership()
        self._trainer.roster_changed()
        self.relay_policy.roster_changed()
        if self.holding is not None and self.holding.next_stage is not None:
            self.holding.next_stage.roster_changed()

    async def _disconnect_revoked(self, peer: PeerId) -> None:
        """Close all connections with a peer that the coordinator has revoked."""
        try:
            await self.node.disconnect(peer)
        except NetworkError as error:
            log.info("the links with %s did not close cleanly: %s", peer, error)

    # ---- pausing

    @property
    def suspended(self) -> Suspension | None:
        return self.pause.suspension

    def suspend(self, reason: SuspendReason, until: float | None = None) -> None:
        """Compute nothing from now on, and keep what is accumulated
        (`swarm_client.volunteer.pause`)."""
        self.pause.suspend(reason, until)

    def resume(self) -> None:
        self.pause.resume()

    def _leave_until_resumed(self) -> None:
        """Give the stage up for a long pause; attach again when it is over."""
        self.report("this pause is long, so the stage is given up until it ends")
        self.attachment.leave_until_resumed()

    # ---- limits

    def claim_disk(self, size_bytes: int) -> None:
        """Raise StorageError when `size_bytes` more may not be written; `disk_guard` decides."""
        self.disk_guard(size_bytes)

    def limit_network(self, *, own_transport_only: bool, for_others: bool) -> None:
        """Restrict transfers to this peer's own host, and whether it relays for other peers."""
        self._own_transport_only = own_transport_only
        self.relay_policy.set_relaying_disabled(not for_others)

    def limit(self, limits: WorkerLimits) -> None:
        """Limit the compute process's use of its device from now on."""
        self._stage_manager.limit(limits)

    def offer_memory(self, memory_bytes: int) -> None:
        """Set the memory that a stage may take; counts for the next choice of a stage, not for the
        held one."""
        if memory_bytes != self.options.device.memory_bytes:
            device = replace(self.options.device, memory_bytes=memory_bytes)
            self.options = replace(self.options, device=device)

    # ---- leaving

    def leave(self) -> None:
        """Finish what is in flight, take nothing new, and leave when the coordinator agrees."""
        self.pause.leave()
        self._trainer.leave()
        self.attachment.leave()
