"""What a volunteer has from its first admission on, made from the verified welcome: its part of the
pipelines, and its stages."""

from __future__ import annotations

import trio

from swarm_client.auditing.auditor import Auditor
from swarm_client.connectivity.web_download import WebClient
from swarm_client.membership.admission_gate import AdmissionGate
from swarm_client.membership.member_context import MemberContext
from swarm_client.membership.membership import CurrentMembership, Membership, renew_certificate
from swarm_client.membership.roster import RosterView
from swarm_client.pipeline.pipeline import Pipeline
from swarm_client.pipeline.stage_server import HELLO_LIMITS
from swarm_client.stage.handle.warm_worker import WarmWorker
from swarm_client.training_data.fetcher import LeafFetcher
from swarm_client.training_data.mirrors import Mirrors
from swarm_client.training_data.run_samples import RunSamples
from swarm_client.volunteer.context import VolunteerContext
from swarm_client.volunteer.gradient_averager import GroupAverager
from swarm_client.volunteer.reconnect import Attachment
from swarm_client.volunteer.snapshots import SnapshotStore
from swarm_client.volunteer.stage_loader import StageLoader
from swarm_client.volunteer.stage_manager import StageManager
from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import StageIndex
from swarm_shared.protocol import (
    STAGE_PROTOCOL,
    AbortRound,
    Apply,
    AssignStage,
    Audit,
    CertificateRenewed,
    Close,
    CoordinatorMessage,
    Drop,
    Lease,
    Mask,
    SaveSnapshot,
    StageRequest,
    SumCheck,
    Welcome,
)
from swarm_shared.scheduling.placement import most_underserved_stage
from swarm_shared.scheduling.placement.stage_sizes import streamed_work
from swarm_shared.transfer.download_meter import DownloadProgress
from swarm_shared.transfer.source import TransferSource

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
        self._roster = roster
        self._averager = averager
        self._spare = spare
        shared = MemberContext(
            context.identity, context.node, current, roster, gate, attachment, context.nursery,
            context.report,
        )  # fmt: skip
        self.pipeline = Pipeline(shared, averager.sent_bytes)
        invite = context.invite
        coordinator = TransferSource(invite.coordinator, invite.addresses)
        self.stages = StageManager(
            context, current, attachment, averager, snapshots, self.pipeline,
            StageLoader(context, current, snapshots, spare, coordinator),
        )  # fmt: skip
        self._fetcher = LeafFetcher(
            context.node, current, coordinator,
            context.data_cache, context.claim_disk,
            Mirrors(
                membership.manifest,
                WebClient(allow_private=context.options.private_web_downloads),
            ),
            context.report,
        )  # fmt: skip
        self._samples = RunSamples(membership.manifest, self._fetcher)
        self._auditor = Auditor(
            shared, self.pipeline, self._samples, context.home.audit_folder(invite.run_id)
        )
        # Public: the protocol checks a certificate itself, and a joining peer's may arrive before
        # the roster does.
        context.node.serve(
            STAGE_PROTOCOL, self.pipeline.server.handle, HELLO_LIMITS, public=True,
            max_streams_per_peer=MAX_STAGE_STREAMS,
        )  # fmt: skip
        self._use(membership)

    @property
    def membership(self) -> Membership:
        """The membership of the latest admission."""
        return self._current.now

    # ---- sessions

    async def admitted_again(self, membership: Membership, *, keep: bool) -> None:
        """Go on in a new session, with the held stage if the coordinator lets this peer `keep`
        it."""
        if not keep or membership.manifest != self.membership.manifest:
            # Before the new manifest is used: it may have fewer stages.
            await self.stages.drop()
        self._use(membership)

    def _use(self, membership: Membership) -> None:
        self._current.now = membership
        self._averager.admitted(membership.manifest, membership.certificate)

    @property
    def downloads(self) -> tuple[DownloadProgress, ...]:
        """Downloads in progress: the state of a stage, training data that is waited for."""
        downloads = (self.stages.loader.download, self._fetcher.download)
        return tuple(progress for progress in downloads if progress is not None)

    def use_mirrors(self, *, allowed: bool) -> None:
        """Allow or forbid training data from web folders, whose bytes are not counted."""
        self._fetcher.use_mirrors = allowed

    async def join_run(self, welcome: Welcome) -> None:
        """Ask for a stage. Training data is fetched when a lease names it."""
        context, options = self._context, self._context.options
        if not self.pipeline.trainer.begun:
            context.nursery.start_soon(self._fetcher.run)
            self.pipeline.trainer.begin(
                self._samples,
                self.pipeline.links.downstream(StageIndex(0), context.nursery),
            )
        # A joining peer holds up the step until its stage is loaded.
        await self._spare.ready()
        stage, up = options.wanted_stage, context.node.bandwidth.expected_up_bytes_per_second
        if stage is None:
            manifest = self.membership.manifest
            work = streamed_work(manifest.model, manifest.training)
            offer = options.offer(trio.current_time())
            stage = most_underserved_stage(welcome.stages, offer, work, up)
        self._attachment.send(StageRequest(stage=stage, up_bytes_per_second=up))

    def session_lost(self) -> None:
        """End what belongs to the session, which is lost."""
        self.stages.session_lost()
        self.pipeline.masks.session_lost()

    def handle(self, message: CoordinatorMessage) -> None:
        """Carry out one of the coordinator's orders."""
        match message:
            case CertificateRenewed():
                me, clock = self._context.node.peer_id, self._context.clock
                self._use(renew_certificate(self.membership, message.certificate, me, clock))
            case AssignStage():
                holders = tuple(self._roster.dialable(holder) for holder in message.holders)
                self.stages.take(message.model_copy(update={"holders": holders}))
            case Lease():
                self.pipeline.trainer.take(message)
            case Mask():
                self.pipeline.masks.answer(message)
            case Audit():
                self._auditor.take(message)
            case Drop():
                self.stages.drop_microbatches(message)
            case Close() | SumCheck() | AbortRound() | Apply() | SaveSnapshot():
                self.stages.put_close_order(message)
            case _:
                raise ProtocolError(f"the coordinator sent {message.kind!r} in a session")
