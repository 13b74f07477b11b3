"""The coordinator's shell around the core: passes events to it and carries out its commands.

Owns the one task that takes events from the queue: the core is never re-entered, and commands are
carried out in order, a `Persist` durable before the next command. Not here: restoring the run and
opening the network (`server.startup`), and every decision about the run (`core.transition`).
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial

import anyio.to_thread
import trio

from swarm_coordinator.admission.authority import AdmissionAuthority
from swarm_coordinator.admission.device_owners import DeviceOwners
from swarm_coordinator.admission.tickets import TicketOffice
from swarm_coordinator.core.events import (
    AppliedStep,
    Ban,
    Broadcast,
    CheckpointRecord,
    CheckpointStored,
    CloseSession,
    Command,
    Event,
    FetchSnapshot,
    LeaseResolved,
    Note,
    PeerAttached,
    PeersRevoked,
    Persist,
    ReceiptsVerified,
    Remember,
    RolledBack,
    Send,
    SessionLost,
    ShutDown,
    StopRequested,
    VerdictRecord,
)
from swarm_coordinator.core.rules.microbatches.cells import may_count
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.transition import transition
from swarm_coordinator.run_dir.checkpoint_files import CheckpointFolder
from swarm_coordinator.run_dir.sampled_tokens import RunTokens
from swarm_coordinator.server.admission_service import AdmissionService
from swarm_coordinator.server.checkpoint_transfer import CheckpointFetcher, catalogue
from swarm_coordinator.server.control_protocol import (
    ControlServer,
    ReceiptChecker,
    control_limits,
    most_microbatches,
)
from swarm_coordinator.server.core_failures import CoreFailure
from swarm_coordinator.server.doctor_answers import probe_judge
from swarm_coordinator.server.event_queue import EventQueue
from swarm_coordinator.server.gc_policy import collect_garbage, low_latency
from swarm_coordinator.server.link_reports import LinkReports
from swarm_coordinator.server.listen_addresses import invite_for
from swarm_coordinator.server.run_news import Leaderboard, NewsPublisher
from swarm_coordinator.server.sessions import ClientSessions
from swarm_coordinator.server.startup import CoordinatorContext, begin_run, open_network, restore
from swarm_coordinator.server.status_writer import StatusWriter
from swarm_coordinator.storage.admission_rows import read_admission, read_owners
from swarm_coordinator.storage.contributions import read_contributions
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.store import Store
from swarm_shared.addresses.dial_order import Interfaces
from swarm_shared.base.clock import RunClock, wall
from swarm_shared.base.error_groups import leaves
from swarm_shared.base.errors import NetworkError, StorageError, SwarmError, UsageError
from swarm_shared.base.text import duration_text, printable
from swarm_shared.base.types import Generation, PeerId, Version
from swarm_shared.credit.credit import normalised_team
from swarm_shared.data.leaf_files import LeafFiles
from swarm_shared.data.shards import write_missing_trees
from swarm_shared.host.stop_signals import asks_again, stop_signals
from swarm_shared.identity.credentials import Receipt
from swarm_shared.identity.signed_manifest import run_id_of
from swarm_shared.network import RelayLimits
from swarm_shared.probe.address_proof import AddressProof
from swarm_shared.probe.server import serve_probe
from swarm_shared.protocol import CONTROL_PROTOCOL, Audit, Lease
from swarm_shared.transfer.transfer import serve_transfers

log = logging.getLogger(__name__)

MAX_CONTROL_STREAMS = 4
"""Control streams of one client: it attaches again before the old stream is known to be dead."""

FLUSH_SECONDS = 5.0
"""Seconds at the end for messages that are still in outboxes."""
REVOKED_LINGER_SECONDS = 2.0
"""Seconds for a revoked peer to read the reason before its connection is closed."""


async def serve(context: CoordinatorContext) -> None:
    """Run until the run finishes or the organiser stops it. SwarmError when it cannot go on.

    A run that has finished before is served until the organiser stops it.
    A peer on whose event the core fails is refused for some time, and the run continues from the
    store, as after a crash: a failed event may have left the state half-changed.
    """
    while True:
        try:
            await _serve_once(context)
            return
        except CoreFailure as failure:
            context.report(f"{failure}; the run is started again without that peer")
            context = replace(context, verified=None)


async def _serve_once(context: CoordinatorContext) -> None:
    coordinator = Coordinator(context)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep_leading, context.store)
            await coordinator.run()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The first error cancels all tasks, so the group holds the cause and its consequences.
        raise first_cause(group) from group


async def _keep_leading(store: Store) -> None:
    """Renew the leader's lease for as long as messages may be sent."""
    while store.renew_seconds is not None:
        await trio.sleep(store.renew_seconds)
        await store.renew_lease()


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error to report to the organiser: an expected error before an unexpected one."""
    errors = list(leaves(group))
    for kind in (KeyboardInterrupt, SwarmError):
        for leaf in errors:
            if isinstance(leaf, kind):
                return leaf
    return errors[0]


class Coordinator:
    """One start of the coordinator. `run` does everything; the other methods are its parts."""

    def __init__(self, context: CoordinatorContext) -> None:
        self._context = context
        self._run_id = run_id_of(context.manifest)
        self._queue = EventQueue()
        self._sessions = ClientSessions()
        self._news = NewsPublisher(Leaderboard(context.manifest))
        self._checkpoints = CheckpointFolder.of_run(
            context.folder, context.manifest, context.settings.checkpoint.keep
        )

    async def run(self) -> None:
        """Restore the run and serve it until it ends or the organiser stops it."""
        context = self._context
        restored = await restore(context, self._checkpoints, self._note)
        await self._count_contributions()
        # Members go by the certificates of this start: a clock that is set meanwhile must not make
        # those of some members ones of the past or the future for the others.
        run_clock = RunClock()
        run_clock.learn(wall())
        self._admission = AdmissionAuthority(
            context.identity, self._run_id, Generation(restored.generation),
            context.settings.admission.mode, context.store.read(read_admission),
            context.store.write, run_clock, DeviceOwners(context.store.read(read_owners)),
        )  # fmt: skip
        self._admission_service = AdmissionService(
            context.folder, self._admission, context.store, self._sessions,
            self._queue.put_and_wait, context.clock, context.renew_after_seconds,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            stack.enter_context(low_latency())
            self._node, addresses = await open_network(context, stack)
            token = await self._admission_service.standing_token()
            await anyio.to_thread.run_sync(
                write_missing_trees, context.folder.data, context.manifest.data, self._note
            )
            tokens = RunTokens(context.manifest, context.folder.data)
            self._tickets = TicketOffice(
                context.identity, self._run_id, Generation(restored.generation), tokens
            )
            self._state = begin_run(
                context, restored, addresses, self._own_certificate(),
                self._admission_service.revoked_at_start(), tokens,
            )  # fmt: skip
            status_writer = self._serve_protocols(addresses)
            await status_writer.write_status()
            # Before `on_serving` announces the coordinator: from now on a Ctrl-C stops in order.
            signals = stack.enter_context(trio.open_signal_receiver(*stop_signals()))
            context.on_serving(invite_for(context.manifest, addresses, token))
            try:
                await self._run_tasks(status_writer, signals)
            finally:
                status_writer.save_links()
                with trio.CancelScope(shield=True):
                    await status_writer.write_status(running=False)

    def _serve_protocols(self, addresses: tuple[str, ...]) -> StatusWriter:
        """Serve every protocol of the coordinator. Until now the node has refused all streams."""
        context, node, admission = self._context, self._node, self._admission
        if context.settings.network.relay:
            node.serve_relay(RelayLimits(), self._may_use_relay)
        reports = LinkReports(node, self._state.peers.__contains__)
        self.control = ControlServer(
            admission, self._sessions, self._queue, reports.record,
            AddressProof(self._known_addresses, Interfaces.of_this_machine),
            lambda peer: context.core_failures.check(peer, context.clock()),
            ReceiptChecker(
                self._run_id, partial(may_count, self._state), most_microbatches(context.manifest)
            ),
        )  # fmt: skip
        self._fetcher = CheckpointFetcher(
            node, self._checkpoints, self._run_id, context.manifest.stage_count,
            self._own_certificate, self._queue.put,
        )  # fmt: skip
        serve_transfers(
            node, catalogue(context.folder, context.manifest, self._checkpoints),
            self._admission_service.transfer_check(),
            LeafFiles(context.folder.data, context.manifest.data),
        )  # fmt: skip
        node.admit_only(lambda peer, _: admission.refusal(peer) is None, knows=self._may_use_relay)
        serve_probe(node, probe_judge(admission, lambda: self._state, context.manifest))
        node.serve(
            CONTROL_PROTOCOL, self.control.handle, control_limits(context.manifest), public=True,
            max_streams_per_peer=MAX_CONTROL_STREAMS,
        )  # fmt: skip
        return StatusWriter(
            context, self._state, addresses, reports, self._admission_service, self._sessions,
            self.control,
        )  # fmt: skip

    @property
    def attached(self) -> int:
        """Number of attached peers."""
        return self._sessions.attached

    async def _run_tasks(self, status_writer: StatusWriter, signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._take_signals, signals)
            nursery.start_soon(self._queue.tick)
            nursery.start_soon(collect_garbage)
            nursery.start_soon(self._sessions.wake_writers)
            nursery.start_soon(status_writer.write_status_repeatedly)
            nursery.start_soon(status_writer.write_links_repeatedly)
            nursery.start_soon(status_writer.prune_rows_repeatedly)
            nursery.start_soon(self._admission_service.serve_commands, self._note)
            nursery.start_soon(self._admission_service.renew_certificates)
            if self._context.dashboard_process is not None:
                nursery.start_soon(self._context.dashboard_process.run)
            if self._context.evaluator_process is not None:
                nursery.start_soon(self._context.evaluator_process.run, self._context.store)
            await self._queue.take_all(self._handle_event)
            nursery.cancel_scope.cancel()

    def _own_certificate(self) -> str:
        return self._admission.certificate(self._context.identity.peer_id, "coordinator")

    def _known_addresses(self, peer: PeerId) -> Sequence[str]:
        """The known addresses of a relay, which is the coordinator or an attached peer."""
        if peer == self._context.identity.peer_id:
            return self._state.start.record.addresses
        relay = self._state.peers.get(peer)
        return () if relay is None else (*relay.contact.addresses, *relay.contact.local)

    def _may_use_relay(self, peer: PeerId) -> bool:
        """Whether a peer is a member, by its own peer ID or that of its p2pd."""
        return self._state.peers.admits(peer)

    async def _count_contributions(self) -> None:
        """Begin the leaderboard with the database's sums. Read in a thread: a run may be long."""
        store = self._context.store
        self._news.leaderboard.begin(
            await anyio.to_thread.run_sync(store.read, read_contributions),
            await anyio.to_thread.run_sync(store.read, read_owners),
        )

    # ------------------------------------------------------------ events and commands

    async def _handle_event(self, event: Event) -> bool:
        """Process one event. Returns True when the core commands the end."""
        # A process that was frozen and has lost the leadership must not send anything more.
        await self._context.store.ensure_leadership()
        if isinstance(event, PeerAttached):
            refusal = self._admission.refusal(event.peer)
            if refusal is not None:  # since its hello was answered
                self._sessions.refuse(event.session, refusal)
                return False
            self._sessions.make_current(event.session, event.peer)
            hello = event.hello
            team, owner = normalised_team(hello.team), event.owner
            binding = "" if owner is None else hello.owner
            self._context.store.post(PeerSeen(event.peer, hello.name, team, binding))
            self._news.leaderboard.describe(event.peer, hello.name, team, owner)
        elif isinstance(event, PeersRevoked):
            for peer in event.peers:
                self._nursery.start_soon(self._disconnect_revoked, peer)
        elif isinstance(event, SessionLost):
            self._context.store.post(PeerSeen(event.peer))
        elif isinstance(event, CheckpointStored) and not self._fetcher.is_current(event.version):
            log.info("the checkpoint of step %d was abandoned", event.version)
            return False
        try:
            commands = transition(self._state, event, self._context.clock())
        except Exception as error:
            self._refuse_author(event, error)
            raise
        if isinstance(event, ReceiptsVerified | LeaseResolved | PeerAttached):
            self._keep_evidence(event.receipts)
        for command in commands:
            if isinstance(command, Send):
                # By far the most frequent command; it never waits.
                message = command.message
                if isinstance(message, Lease):
                    message = self._tickets.with_tickets(message)
                elif isinstance(message, Audit):
                    message = self._tickets.with_permit(message, command.peer)
                self._sessions.send(command.peer, message)
            elif isinstance(command, ShutDown):
                await self._sessions.finish_all(FLUSH_SECONDS)
                return True
            else:
                await self._carry_out(command)
        self._publish_news(event)
        self._queue.complete(event, commands)
        return False

    def _refuse_author(self, event: Event, error: Exception) -> None:
        """Refuse the peer on whose event the core failed for some time, and raise CoreFailure.
        Returns if the event is not a peer's."""
        author = getattr(event, "peer", None)
        if author is None:
            return
        kind = type(event).__name__
        log.exception("the core failed on %s of %s", kind, author)
        seconds = self._context.core_failures.failed_on(author, self._context.clock())
        raise CoreFailure(
            f"the coordinator failed on {kind} of {author}, which is refused for "
            f"{duration_text(seconds)}; see the log for the cause"
        ) from error

    def _publish_news(self, event: Event) -> None:
        """Send due run news, after the event's commands: a joining peer has its Welcome by then."""
        evaluator = self._context.evaluator_process
        shown = None if evaluator is None else evaluator.shown(self._state.history.version)
        news = self._news.due(self._state, self._context.clock(), shown)
        if news is not None:
            self._sessions.broadcast(self._state.peers, news)
        elif isinstance(event, PeerAttached) and self._news.latest is not None:
            self._sessions.send(event.peer, self._news.latest)

    async def _disconnect_revoked(self, peer: PeerId) -> None:
        """Close the connection of a revoked peer after it could read the reason."""
        await trio.sleep(REVOKED_LINGER_SECONDS)
        if self._admission.refusal(peer) is not None:
            try:
                await self._node.disconnect(peer)
            except NetworkError as error:
                log.info("the connection to %s did not close in order: %s", peer, error)

    async def _carry_out(self, command: Command) -> None:
        if isinstance(command, Broadcast):
            self._sessions.broadcast(command.peers, command.message)
        elif isinstance(command, Persist):
            if isinstance(command.record, RolledBack):
                self._fetcher.cancel()
            record = command.record
            if isinstance(record, VerdictRecord):
                record = self._with_receipt(record)
            await self._context.store.write(record)
            if isinstance(command.record, AppliedStep):
                self._news.leaderboard.add_step(command.record)
            elif isinstance(command.record, CheckpointRecord):
                self._nursery.start_soon(self._prune_checkpoints, command.record.version)
            elif isinstance(command.record, RolledBack | VerdictRecord):
                await self._count_contributions()
        elif isinstance(command, Remember):
            self._context.store.post(command.record)
        elif isinstance(command, Ban):
            self._nursery.start_soon(self._ban, command)
        elif isinstance(command, Note):
            self._note(command.text, command.peer)
        elif isinstance(command, FetchSnapshot):
            checkpoint = self._fetcher.begin(command)
            self._nursery.start_soon(self._fetcher.fetch_stage, command, checkpoint)
        elif isinstance(command, CloseSession):
            self._sessions.finish(command.peer)

    def _keep_evidence(self, receipts: Sequence[Receipt]) -> None:
        """Keep the envelopes of the receipts that have counted."""
        for receipt in receipts:
            step = self._state.steps.numbered(receipt.step)
            cell = step.table.get((receipt.microbatch, receipt.stage)) if step is not None else None
            if cell is not None and cell.transcript is receipt.transcript:
                self.control.receipts.counted(receipt)

    def _with_receipt(self, verdict: VerdictRecord) -> VerdictRecord:
        """The verdict with the audited receipt, which the core knows without its signature."""
        if verdict.evidence is None:
            return verdict
        receipt = self.control.receipts.envelope(verdict)
        return replace(
            verdict, evidence=verdict.evidence.model_copy(update={"receipt": receipt}), claim=None
        )

    async def _ban(self, command: Ban) -> None:
        """Ban an owner with all its devices."""
        devices = [
            peer.peer
            for peer in self._state.peers.values()
            if command.owner in (peer.peer, peer.profile.owner)
        ]
        try:
            await self._admission_service.ban(command.owner, command.reason, devices)
        except UsageError as error:
            self._note(f"a ban by the run's own rules was not carried out: {error}")

    async def _prune_checkpoints(self, newest: Version) -> None:
        try:
            await anyio.to_thread.run_sync(self._checkpoints.prune, newest)
        except StorageError as error:
            self._note(f"an old checkpoint could not be deleted: {error}")

    def _note(self, text: str, peer: PeerId | None = None) -> None:
        text = printable(text)
        log.info("%s%s", text, f" [{peer}]" if peer else "")
        self._context.report(text)
        self._context.store.post(Note(text, peer))

    async def _take_signals(self, signals: AsyncIterator[int]) -> None:
        """Stop in order at the first signal, at once at a second Ctrl-C."""
        asked = False
        async for number in signals:
            if asked:
                if asks_again(number):
                    raise KeyboardInterrupt
                continue
            asked = True
            if self._state.phase is not RunPhase.FINISHED:
                self._context.report(
                    "stopping: the step in progress and a last checkpoint are finished first; "
                    "press Ctrl-C again to stop at once"
                )
            await self._queue.put(StopRequested())
