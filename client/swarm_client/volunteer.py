"""One volunteer in one run: what it holds, whom it knows, and how it acts on orders.

Owns the state between sessions, so that losing the coordinator costs nothing: the stage, its
accumulator and its receipts stay, and the next Hello tells of them (design: the life of a step).
"""

from __future__ import annotations

import base64
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import trio

from swarm_client.averager import GroupAverager
from swarm_client.contribution import Contribution
from swarm_client.control.documents import SuspendReason
from swarm_client.device import Device
from swarm_client.directory import Directory
from swarm_client.engine.downstream import Downstream
from swarm_client.engine.edge import Stream
from swarm_client.engine.gate import Gate
from swarm_client.engine.holding import Holding
from swarm_client.engine.local_stream import LocalStream, local_pair
from swarm_client.engine.roster import RosterView
from swarm_client.engine.stage_server import HELLO_LIMITS, StageServer, stage_limits
from swarm_client.holder import Holder, WorkerLimits
from swarm_client.home import Home
from swarm_client.masks import MaskDesk
from swarm_client.session import Session, attach
from swarm_client.suspension import GRACE_SECONDS, LONG_SECONDS, Suspension
from swarm_client.sync import Snapshots, fetch_data
from swarm_client.trainer_role import TrainerRole
from swarm_client.traversal import Traversal
from swarm_shared.credentials import check_certificate
from swarm_shared.errors import (
    AdmissionError,
    CapacityError,
    LinkClosed,
    NetworkError,
    ProtocolError,
    SignatureError,
    SwarmError,
    VersionError,
)
from swarm_shared.identity import Identity
from swarm_shared.invite import Invite
from swarm_shared.manifest import Manifest
from swarm_shared.messages import (
    SOFTWARE_VERSION,
    STAGE_PROTOCOL,
    AbortRound,
    Apply,
    AssignStage,
    CertificateRenewed,
    Close,
    CoordinatorMessage,
    DoctorHello,
    Goodbye,
    Heartbeat,
    Hello,
    Lease,
    LeaseResult,
    Leaving,
    LinkBytes,
    Mask,
    PeerRecord,
    Receipts,
    Roster,
    RosterChange,
    RunNews,
    SaveSnapshot,
    StageHello,
    StageRequest,
    Welcome,
)
from swarm_shared.model_config import FrozenModel
from swarm_shared.network import Node
from swarm_shared.placement import most_underserved_stage
from swarm_shared.probe import member_judge, serve_probe
from swarm_shared.signed_manifest import open_manifest, run_id_of
from swarm_shared.transfer import Source, serve_transfers
from swarm_shared.types import Generation, PeerId, RunId, StageIndex, Step, Version

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
MAXIMUM_BACKOFF_SECONDS = 7.0
"""With the fifth that chance adds, a coordinator that comes back is found again within 10 s."""

MAX_STAGE_STREAMS = 4
"""Of one sender: one per ordered pair, and another while it moves to a better link."""

DIRECTORY_SECONDS = 20.0
"""How often this peer's record is renewed; records last six times as long."""

MOST_PATHS = 1024
"""Reported with a heartbeat; a peer that has more links is a relay."""

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Membership:
    """What being welcomed gave this peer. Satisfies the stage server's protocol of that name."""

    run: RunId
    organiser: PeerId
    certificate: str
    manifest: Manifest
    generation: Generation


@dataclass(frozen=True, slots=True)
class VolunteerOptions:
    device: Device
    threads: int
    wanted_stage: StageIndex | None
    name: str | None
    may_relay: bool = True
    long_pause_seconds: float = LONG_SECONDS
    team: str | None = None


class Volunteer:
    """Give it a node and a nursery, then `stay_attached` until it returns."""

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
        self.session: Session | None = None
        self.roster = RosterView()
        self.finished = False
        self.leaving = False
        self._suspension: Suspension | None = None
        self._go_on = trio.Event()
        """Set when a pause ends, or when the volunteer is to leave in the middle of one."""
        self._stepping_back = False
        self.problem: SwarmError | None = None
        """Why there is no session, if there has been no other one since."""
        self.news: RunNews | None = None
        self.on_admitted: Callable[[Manifest], None] = lambda manifest: None
        self.contribution = Contribution()
        self.snapshots = Snapshots(home, invite.run_id)
        self.averager = averager
        self.disk_guard: Callable[[int], None] = lambda size_bytes: None
        self._own_transport_only = False
        self._nursery = nursery
        self._holder = Holder(self, nursery)
        self._trainer = TrainerRole(self._report_lease, self.current_step, nursery)
        self._masks = MaskDesk(self._try_to_send)
        self._session_scope: trio.CancelScope | None = None
        averager.worker.on_change(lambda: self.traversal.wake())
        self.directory = Directory(identity, averager.worker, invite.run_id, invite.organiser)
        averager.bind(node, self.roster, invite.run_id)
        self.traversal = Traversal(
            node, invite, self.roster, lambda: averager.carrier_address(identity),
            lambda relays: averager.worker.reconfigure(trusted_relays=relays),
            self._try_to_send, report, may_relay=options.may_relay,
        )  # fmt: skip
        self._attach_now = trio.Event()
        node.admit_only(lambda peer, protocol: self.roster.knows(peer))
        node.on_network_change(self._network_changed)
        self.gate = Gate(invite.run_id, invite.organiser, self.roster)
        server = StageServer(
            lambda: self.membership, lambda: self.holding, lambda: self._holder.next_stage,
            self.gate, self.send,
        )  # fmt: skip
        self.stage_server = server
        self.snapshots.clear()
        serve_transfers(node, self.snapshots.find, self.gate.check_transfer)
        serve_probe(node, member_judge(invite.run_id, invite.organiser, self.gate.check))

    # ---- what others ask

    @property
    def holding(self) -> Holding | None:
        return self._holder.holding

    @property
    def getting(self) -> StageIndex | None:
        """The stage that is being brought here while none is held."""
        return self._holder.getting

    def current_step(self) -> Step | None:
        return self.holding.step if self.holding is not None else None

    def generation(self) -> Generation:
        assert self.membership is not None
        return self.membership.generation

    def send(self, message: FrozenModel) -> None:
        """To the coordinator, if it is there."""
        if self.session is not None:
            self.session.send(message)

    def _try_to_send(self, message: FrozenModel) -> bool:
        self.send(message)
        return self.session is not None

    def _report_lease(self, result: LeaseResult) -> None:
        self.send(result)

    def stage_hello(self) -> StageHello:
        assert self.membership is not None
        return StageHello(run=self.membership.run, certificate=self.membership.certificate)

    async def open_stage_stream(self, record: PeerRecord) -> Stream:
        """A stream to a peer's stage server; this volunteer's own is in this process."""
        if record.peer == self.node.peer_id:
            ours, served = local_pair(record.peer)
            self._nursery.start_soon(self._serve_locally, served)
            return ours
        assert self.membership is not None
        return await self.node.open_stream(
            record.peer, STAGE_PROTOCOL, stage_limits(self.membership.manifest), record.addresses
        )

    async def _serve_locally(self, stream: LocalStream) -> None:
        try:
            await self.stage_server.handle(stream)
        except SwarmError as error:
            log.warning("this volunteer's own stage ended a link: %s", error)
        finally:
            await stream.reset()

    def downstream(self, stage: StageIndex, nursery: trio.Nursery) -> Downstream:
        assert self.membership is not None
        return Downstream(
            stage, self.roster, self.stage_hello, self.open_stage_stream, self._masks.ask, nursery,
            depth=self.membership.manifest.stage_count - stage,
        )  # fmt: skip

    # ---- sessions

    async def use_directory(self) -> None:
        """Publish this peer in hivemind's DHT; look for others while the coordinator is away."""
        while True:
            holding, membership = self.holding, self.membership
            if holding is not None and membership is not None:
                await self.directory.publish(
                    PeerRecord(
                        peer=self.node.peer_id,
                        stage=holding.stage,
                        addresses=self.node.addresses,
                        certificate=membership.certificate,
                        microbatches_per_second=holding.microbatches_per_second,
                        carrier=self.averager.carrier_address(self.identity),
                    )
                )
                if self.session is None:
                    for record in await self.directory.lookup():
                        self.roster.refresh(record)
            await trio.sleep(DIRECTORY_SECONDS)

    def doctor_hello(self) -> DoctorHello:
        """How this peer introduces itself to those that it asks to look at it from outside."""
        membership = self.membership
        return DoctorHello(
            run=self.invite.run_id,
            software=SOFTWARE_VERSION,
            token=None if membership is not None else self.invite.token,
            certificate=None if membership is None else membership.certificate,
        )

    def _show_membership(self) -> None:
        membership = self.membership
        if membership is not None:
            self.averager.show_membership(
                self.identity, self.invite.organiser, membership.certificate,
                tuple(self.roster.revoked),
            )  # fmt: skip

    async def stay_attached(self) -> None:
        """Attach, and attach again whenever the coordinator was lost, until the end."""
        backoff_seconds = FIRST_BACKOFF_SECONDS
        while not self.finished:
            if not await self._may_attach():
                return
            problem: SwarmError | None = None
            try:
                async with attach(self.node, self.invite, self._hello()) as session:
                    backoff_seconds = FIRST_BACKOFF_SECONDS
                    problem = await self._attached(session)
            except (NetworkError, ProtocolError) as error:
                problem = error
            if self.finished:
                return
            self.problem = problem
            if self._stepping_back:
                continue
            if self.leaving:
                self.report("the coordinator is away; leaving without its goodbye")
                return
            pause = backoff_seconds * random.uniform(0.8, 1.2)
            self.report(
                f"no link to the coordinator{self._reason(problem)}; trying again in {pause:.1f} s"
            )
            self._attach_now = trio.Event()
            with trio.move_on_after(pause):
                await self._attach_now.wait()
            backoff_seconds = min(MAXIMUM_BACKOFF_SECONDS, 2 * backoff_seconds)

    async def _may_attach(self) -> bool:
        """Wait out a pause in which nothing is held; False when the volunteer leaves meanwhile."""
        if self._stepping_back:
            self._stepping_back = False
            await self._holder.drop()
        if self._suspension is not None and self.holding is None:
            await self._go_on.wait()
            return not self.leaving
        return True

    def _reason(self, problem: SwarmError | None) -> str:
        """In words for people, to whom the coordinator's peer ID says nothing."""
        return "" if problem is None else f" ({self.explain(problem)})"

    def explain(self, problem: SwarmError) -> str:
        return str(problem).replace(str(self.invite.coordinator), "it")

    def _network_changed(self) -> None:
        """Another network, or awake again: no reason to wait out a pause that was for the old."""
        self.report("this machine's network has changed")
        self._attach_now.set()

    def _hello(self) -> Hello:
        holding = self.holding
        position = self.traversal.position()
        return Hello(
            run=self.invite.run_id,
            software=SOFTWARE_VERSION,
            token=self.invite.token,
            name=self.options.name,
            team=self.options.team,
            addresses=position.addresses,
            carrier=position.carrier,
            reachability=position.reachability,
            offers_relay=position.offers_relay,
            device=self.options.device.label,
            memory_bytes=self.options.device.memory_bytes,
            wanted_stage=self.options.wanted_stage,
            stage=holding.stage if holding is not None else None,
            version=holding.version if holding is not None else Version(0),
            averaged_attempt=holding.averaged_attempt if holding is not None else None,
            receipts=holding.receipts.all() if holding is not None else (),
        )

    async def _attached(self, session: Session) -> SwarmError | None:
        """Live through one session; the reason why it ended."""
        await self._enter(session.welcome)
        assert self.membership is not None
        limits = self.membership.manifest.limits
        self.session = session
        self.problem = None
        problem: SwarmError | None = None
        try:
            async with trio.open_nursery() as nursery:
                self._session_scope = nursery.cancel_scope
                nursery.start_soon(session.write_all)
                beat_seconds = session.welcome.heartbeat_seconds or limits.heartbeat_seconds
                nursery.start_soon(session.beat, beat_seconds, self._heartbeat)
                nursery.start_soon(self._report_receipts, limits.receipt_interval_seconds)
                if self.leaving or self._stepping_back:
                    self.send(Leaving())
                if not session.welcome.keep:
                    nursery.start_soon(self._take_part, session.welcome)
                while not self.finished:
                    if await self._act(await session.receive()):
                        break
                nursery.cancel_scope.cancel()
        except* (AdmissionError, VersionError, CapacityError) as refusals:
            raise _first(refusals) from None
        except* (NetworkError, ProtocolError) as errors:
            problem = _first(errors)
        finally:
            self.session = self._session_scope = None
            self.gate.detached()
            self._holder.session_lost()
            self._masks.session_lost()
        return problem

    async def _enter(self, welcome: Welcome) -> None:
        """Check what the coordinator shows before anything of it is used."""
        try:
            envelope = base64.b64decode(welcome.manifest, validate=True)
        except ValueError as error:
            raise ProtocolError("the coordinator's manifest is not base64") from error
        manifest = open_manifest(envelope, self.invite.organiser)
        if run_id_of(manifest) != self.invite.run_id:
            raise SignatureError(
                "the coordinator shows another run than the invite names; ask for a new invite"
            )
        self._check_own(welcome.certificate)
        changed = self.membership is not None and self.membership.manifest != manifest
        first = self.membership is None
        self.gate.attached(welcome.generation)
        self.membership = Membership(
            self.invite.run_id, self.invite.organiser, welcome.certificate, manifest,
            welcome.generation,
        )  # fmt: skip
        if first:
            # It asks for a certificate itself: a newcomer's may be here before the roster is.
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
        if changed or not welcome.keep:
            await self._holder.drop()
        self.averager.use_manifest(manifest)
        self._show_membership()
        self.directory.enter(welcome.directory)
        self.traversal.admitted()

    def _check_own(self, certificate: str) -> None:
        try:
            envelope = base64.b64decode(certificate, validate=True)
        except ValueError as error:
            raise ProtocolError("the coordinator's certificate is not base64") from error
        check_certificate(
            envelope, self.invite.run_id, self.invite.organiser, time.time(), self.node.peer_id
        )

    async def _take_part(self, welcome: Welcome) -> None:
        """A newcomer's way in: data first, then the choice of a stage."""
        assert self.membership is not None
        manifest = self.membership.manifest
        if not self._trainer.begun:
            folder = await fetch_data(
                self.node, self.home, self.invite.run_id, manifest,
                Source(self.invite.coordinator, self.invite.addresses),
                self.membership.certificate, self.claim_disk,
                use_urls=not self._own_transport_only,
            )  # fmt: skip
            self._trainer.begin(manifest, folder, self.downstream(StageIndex(0), self._nursery))
        await self._holder.ready_to_take()
        stage = self.options.wanted_stage
        if stage is None:
            stage = most_underserved_stage(welcome.stages, self.options.device.memory_bytes)
        self.send(StageRequest(stage=stage))

    async def _report_receipts(self, interval_seconds: float) -> None:
        while True:
            await trio.sleep(interval_seconds)
            batch = self.holding.receipts.take_unreported() if self.holding is not None else ()
            if batch:
                self.send(Receipts(receipts=batch))

    def _heartbeat(self) -> Heartbeat:
        holding = self.holding
        computed, busy_seconds = holding.take_work() if holding else (0, 0.0)
        return Heartbeat(
            microbatches_per_second=holding.microbatches_per_second if holding else 0.0,
            queued=holding.in_flight if holding else 0,
            links=self.links(),
            paths=tuple(self.node.paths()[:MOST_PATHS]),
            paused=self._suspension is not None,
            computed=computed,
            busy_seconds=busy_seconds,
        )

    def links(self) -> tuple[LinkBytes, ...]:
        """Bytes per remote and protocol, both directions, over all carriers."""
        return (*self._links(), *self.averager.links())

    def _links(self) -> tuple[LinkBytes, ...]:
        """The same over the py-libp2p host."""
        totals: dict[tuple[PeerId, str], list[int]] = {}
        for link in self.node.traffic():
            entry = totals.setdefault((link.remote, link.protocol), [0, 0])
            entry[0 if link.direction == "sent" else 1] += link.bytes
        return tuple(
            LinkBytes(remote=remote, protocol=protocol, sent=sent, received=received)
            for (remote, protocol), (sent, received) in totals.items()
        )

    # ---- the coordinator's word

    async def _act(self, message: CoordinatorMessage) -> bool:
        """Carry out one message; True when it ends the session."""
        match message:
            case Roster():
                self._roster_changed(self.roster.replace(message))
            case RosterChange():
                self._roster_changed(self.roster.change(message))
            case CertificateRenewed():
                self._renew(message)
            case AssignStage():
                await self._holder.take(message)
            case Lease():
                self._trainer.take(message)
            case Mask():
                self._masks.answer(message)
            case Close() | AbortRound() | Apply() | SaveSnapshot():
                self._holder.round_message(message)
            case RunNews():
                self.news = message
            case Goodbye():
                return self._goodbye(message)
            case _:
                raise ProtocolError(f"the coordinator sent {message.kind!r} in a session")
        return False

    def _roster_changed(self, revoked: frozenset[PeerId]) -> None:
        for peer in filter(self.node.is_connected, revoked):
            self._nursery.start_soon(self._part_from, peer)
        self._show_membership()
        self._trainer.roster_changed()
        self.traversal.roster_changed()
        if self._holder.next_stage is not None:
            self._holder.next_stage.roster_changed()

    async def _part_from(self, peer: PeerId) -> None:
        """The coordinator has revoked it: whatever there is between it and this peer ends now."""
        try:
            await self.node.disconnect(peer)
        except NetworkError as error:
            log.info("the links with %s did not end in order: %s", peer, error)

    def _renew(self, message: CertificateRenewed) -> None:
        assert self.membership is not None
        try:
            self._check_own(message.certificate)
        except AdmissionError as error:
            # The one that is held still counts: attach again for another, or for the reason.
            raise ProtocolError(f"the coordinator's new certificate fails: {error}") from error
        self.membership = replace(self.membership, certificate=message.certificate)

    def _goodbye(self, message: Goodbye) -> bool:
        self.report(f"the coordinator says goodbye: {message.reason}")
        self.finished = message.finished or self.leaving
        return True

    # ---- pausing

    @property
    def suspended(self) -> Suspension | None:
        return self._suspension

    def suspend(self, reason: SuspendReason, until: float | None = None) -> None:
        """Compute nothing from now on, and keep what is accumulated (`suspension`)."""
        began = self._suspension is None
        self._suspension = Suspension(reason, until)
        if began:
            self._trainer.pause()
            self.stage_server.pause()
            self.send(self._heartbeat())
            self._go_on = trio.Event()
            if not self.leaving:
                self._nursery.start_soon(self._look_after_pause, self._go_on)

    def resume(self) -> None:
        if self._suspension is not None:
            self._suspension = None
            self._go_on.set()
            self._trainer.resume()
            self.stage_server.resume()
            self.send(self._heartbeat())

    async def _look_after_pause(self, over: trio.Event) -> None:
        with trio.move_on_after(GRACE_SECONDS):
            await over.wait()
            return
        self.stage_server.hand_back()
        with trio.move_on_after(self.options.long_pause_seconds - GRACE_SECONDS):
            await over.wait()
            return
        self._step_back()

    def _step_back(self) -> None:
        """A long pause: leave in order, and attach anew when it is over."""
        self.report("this pause is a long one: the stage is given back until it is over")
        self._stepping_back = True
        self.send(Leaving())
        self._attach_now.set()

    # ---- limits

    def claim_disk(self, size_bytes: int) -> None:
        """StorageError when so much more may not be written; `disk_guard` decides."""
        self.disk_guard(size_bytes)

    def limit_network(self, *, own_transport_only: bool, for_others: bool) -> None:
        """Whether bytes may pass elsewhere than over this peer's host, and others' over it."""
        self._own_transport_only = own_transport_only
        self.traversal.hold_relaying_back(not for_others)

    def limit(self, limits: WorkerLimits) -> None:
        """How much of its device the compute process may use, from now on."""
        self._holder.limit(limits)

    def offer_memory(self, memory_bytes: int) -> None:
        """What a stage may take; counts at the next choice of a stage, not for the one held."""
        if memory_bytes != self.options.device.memory_bytes:
            device = replace(self.options.device, memory_bytes=memory_bytes)
            self.options = replace(self.options, device=device)

    # ---- leaving

    def leave(self) -> None:
        """Finish what is in flight, take nothing new, and go when the coordinator agrees."""
        self.leaving = True
        self._go_on.set()
        self._trainer.leave()
        self.send(Leaving())

    def restart_session(self) -> None:
        """Attach anew, as a newcomer: what was held is lost (its worker died)."""
        if self._session_scope is not None:
            self._session_scope.cancel()


def _first(group: BaseExceptionGroup[SwarmError]) -> SwarmError:
    """The telling error of a group: a closed link is mostly the echo of another one."""
    leaves: list[SwarmError] = []
    queue: list[BaseException] = [group]
    while queue:
        error = queue.pop(0)
        if isinstance(error, BaseExceptionGroup):
            queue.extend(error.exceptions)
        elif isinstance(error, SwarmError):
            leaves.append(error)
    telling = [error for error in leaves if not isinstance(error, LinkClosed)]
    return (telling or leaves)[0]
