"""What a volunteer has from its first admission on, made from the verified welcome: the links to
stages, the trainer, the stage server and the held stage."""

from __future__ import annotations

from swarm_client.membership.admission_gate import AdmissionGate
from swarm_client.membership.membership import CurrentMembership, Membership, renew_certificate
from swarm_client.membership.roster import RosterView
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.mask_client import MaskClient
from swarm_client.pipeline.samples import RunSamples
from swarm_client.pipeline.stage_links import StageLinks
from swarm_client.pipeline.stage_server import HELLO_LIMITS, StageServer
from swarm_client.pipeline.trainer import Trainer
from swarm_client.pipeline.uplink_share import UplinkShare
from swarm_client.stage.handle.warm_worker import WarmWorker
from swarm_client.volunteer.context import VolunteerContext
from swarm_client.volunteer.dataset import fetch_data
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_client.volunteer.reconnect import Attachment
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_client.volunteer.stage_loader import StageLoader
from swarm_client.volunteer.stage_manager import StageManager
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import StageIndex, Step
from swarm_shared.protocol import (
    STAGE_PROTOCOL,
    AbortRound,
    Apply,
    AssignStage,
    CertificateRenewed,
    Close,
    CoordinatorMessage,
    Lease,
    LeaseResult,
    Mask,
    SaveSnapshot,
    StageRequest,
    Welcome,
)
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.transfer.transfer import TransferSource

MAX_STAGE_STREAMS = 4
"""Maximum number of stage streams of one sender: one per ordered pair, and another while it moves
to a better link."""


class Member:
    """An admitted volunteer's part in the run; outlives sessions."""

    def __init__(
        self,
        context: VolunteerContext,
        membership: Membership,
        attachment: Attachment,
        roster: RosterView,
        gate: AdmissionGate,
        averager: GroupAverager,
        snapshots: SnapshotStore,
        spare: WarmWorker,
    ) -> None:
        self._context = context
        self._current = current = CurrentMembership(membership)
        self._attachment = attachment
        self._averager = averager
        self._masks = MaskClient(attachment.send)
        self._trainer = Trainer(self._report_lease, self._current_step, context.nursery)
        uplink = UplinkShare(context.node.bandwidth, averager)
        self._server = StageServer(current, gate, uplink, attachment)
        self.links = StageLinks(
            context.node, roster, self._server, current, self._masks.ask, context.nursery
        )
        self._spare = spare
        self.stages = StageManager(
            context, current, attachment, averager, snapshots, self.links, self._server, uplink,
            StageLoader(context, current, snapshots, spare),
        )  # fmt: skip
        # Public: the protocol checks a certificate itself, and a joining peer's may arrive before
        # the roster does.
        context.node.serve(
            STAGE_PROTOCOL, self._server.handle, HELLO_LIMITS, public=True,
            max_streams_per_peer=MAX_STAGE_STREAMS,
        )  # fmt: skip
        self._use(membership)

    @property
    def membership(self) -> Membership:
        return self._current.now

    @property
    def holding(self) -> Holding | None:
        return self.stages.holding

    def _current_step(self) -> Step | None:
        return None if self.holding is None else self.holding.step

    # ---- sessions

    async def admitted_again(self, membership: Membership, *, keep: bool) -> None:
        """Go on in a new session, with the held stage if the coordinator lets this peer `keep`
        it."""
        same_manifest = membership.manifest == self.membership.manifest
        self._use(membership)
        if not keep or not same_manifest:
            await self.stages.drop()

    def _use(self, membership: Membership) -> None:
        self._current.now = membership
        self._averager.admitted(membership.manifest, membership.certificate)

    async def join_run(self, welcome: Welcome, *, use_urls: bool) -> None:
        """Fetch the data, then ask for a stage."""
        context, member = self._context, self.membership
        invite, options = context.invite, context.options
        if not self._trainer.begun:
            folder = await fetch_data(
                context.node, context.home, invite.run_id, member.manifest,
                TransferSource(invite.coordinator, invite.addresses), member.certificate,
                context.disk.claim, use_urls=use_urls, lock=options.data_lock,
            )  # fmt: skip
            self._trainer.begin(
                RunSamples(member.manifest, folder),
                self.links.downstream(StageIndex(0), context.nursery),
            )
        # A joining peer holds up the step until its stage is loaded.
        await self._spare.ready()
        stage = options.wanted_stage
        if stage is None:
            stage = most_underserved_stage(welcome.stages, options.device.memory_bytes)
        self._attachment.send(StageRequest(stage=stage))

    def session_lost(self) -> None:
        self.stages.session_lost()
        self._masks.session_lost()

    def handle(self, message: CoordinatorMessage) -> None:
        """Carry out one of the coordinator's orders."""
        match message:
            case CertificateRenewed():
                self._use(
                    renew_certificate(
                        self.membership, message.certificate, self._context.node.peer_id
                    )
                )
            case AssignStage():
                self.stages.take(message)
            case Lease():
                self._trainer.take(message)
            case Mask():
                self._masks.answer(message)
            case Close() | AbortRound() | Apply() | SaveSnapshot():
                self.stages.put_close_order(message)
            case _:
                raise ProtocolError(f"the coordinator sent {message.kind!r} in a session")

    def roster_changed(self) -> None:
        self._trainer.roster_changed()
        if self.holding is not None and self.holding.next_stage is not None:
            self.holding.next_stage.roster_changed()

    def _report_lease(self, result: LeaseResult) -> None:
        self._attachment.send(result)

    # ---- pausing and leaving

    def pause(self) -> None:
        """Take nothing new."""
        self._trainer.pause()
        self._server.pause()

    def resume(self) -> None:
        self._trainer.resume()
        self._server.resume()

    def hand_back(self) -> None:
        """Cancel the microbatches in flight, so that their senders give them to other peers."""
        self._server.hand_back()

    def leave(self) -> None:
        self._trainer.leave()
