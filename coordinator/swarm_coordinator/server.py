"""The coordinator's shell: opens the network, feeds the pure core, carries out its commands.

Owns the one channel of events and the one task that takes them off it: the core is never
re-entered, and commands are carried out strictly in order, a `Persist` durable before the next.
Nothing here decides anything about the run (`transition` does).
"""

from __future__ import annotations

import base64
import dataclasses
import logging
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

import anyio.to_thread
import trio

from swarm_coordinator.addresses import (
    dialable_addresses,
    dual_stack,
    invite_for,
    listen_address,
)
from swarm_coordinator.admission import RENEW_AFTER_SECONDS, Admission
from swarm_coordinator.admission_desk import AdmissionDesk
from swarm_coordinator.checkpoints import CheckpointFolder
from swarm_coordinator.control import Control, control_limits
from swarm_coordinator.events import (
    AppliedStep,
    Broadcast,
    CheckpointRecord,
    CheckpointStored,
    CloseSession,
    Command,
    Event,
    FetchSnapshot,
    HeartbeatsHeard,
    Note,
    PeerAttached,
    PeersRevoked,
    Persist,
    Restored,
    RolledBack,
    Send,
    SessionLost,
    Stopped,
    StopRequested,
    Tick,
)
from swarm_coordinator.generations import generation_floor
from swarm_coordinator.moving import RebalancingRule, RebalancingSettings
from swarm_coordinator.news import Leaderboard, NewsDesk
from swarm_coordinator.records import LinksSeen, PeerSeen
from swarm_coordinator.reports import Reports
from swarm_coordinator.responsiveness import collect_garbage, responsive
from swarm_coordinator.run_folder import RunFolder, read_bytes
from swarm_coordinator.sessions import Sessions
from swarm_coordinator.settings import RebalancingSection, RunSettings
from swarm_coordinator.status import Seen, StatusFile, printable
from swarm_coordinator.store import Store
from swarm_coordinator.transfer_server import CheckpointFetcher, catalogue
from swarm_coordinator.transition import begin, transition
from swarm_coordinator.visitors import visitor_judge
from swarm_shared.clock import Clock, monotonic, wall
from swarm_shared.errors import NetworkError, SwarmError
from swarm_shared.identity import Identity
from swarm_shared.invite import Invite
from swarm_shared.manifest import Manifest
from swarm_shared.messages import CONTROL_PROTOCOL, PeerRecord
from swarm_shared.network import Node, RelayLimits, open_node
from swarm_shared.placement import MovePolicy
from swarm_shared.probe import serve_probe
from swarm_shared.signed_manifest import MAX_MANIFEST_BYTES, run_id_of
from swarm_shared.transfer import serve_transfers
from swarm_shared.types import Generation, PeerId, StageIndex

log = logging.getLogger(__name__)

MAX_STREAMS = 128
"""Of one client: the circuits that it may have through this relay, and everything else."""
MAX_CONTROL_STREAMS = 4
"""Of one client: it attaches anew before the old stream is known to be dead."""

TICK_SECONDS = 0.25
EVENTS_AT_ONCE = 16
"""About two milliseconds of work."""
EVENT_BUFFER = 4096
"""Events that wait for the core. When it is full, clients are not read from: they slow down."""
STATUS_SECONDS = 1.0
STATUS_SHARE = 30.0
"""The pause after writing the status, over the time that it took: some percent of a core."""
LINKS_SECONDS = 10.0
"""Between two writes of the link table; it is not needed to the second, and n² long."""
FLUSH_SECONDS = 5.0
"""At the end, for words that are still in outboxes."""
PARTING_SECONDS = 2.0
"""A peer that was revoked may read for so long why, before its connection is closed."""

Report = Callable[[str], None]
"""Takes one line for the organiser's eyes."""


@dataclass(frozen=True, slots=True)
class Service:
    """What one start of the coordinator works with."""

    folder: RunFolder
    settings: RunSettings
    manifest: Manifest
    identity: Identity
    store: Store
    report: Report
    port: int | None = None
    clock: Clock = monotonic
    wall_clock: Clock = wall
    renew_after_seconds: float = RENEW_AFTER_SECONDS
    verified: CheckpointRecord | None = None
    """The newest checkpoint, where it has been read and hashed already."""
    on_serving: Callable[[Invite], None] = field(default=lambda invite: None)


async def serve(service: Service) -> None:
    """Run until the run is finished or the organiser stops it. SwarmError when it cannot go on."""
    coordinator = Coordinator(service)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_keep_leading, service.store)
            await coordinator.run()
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # Tasks run side by side, and the first error ends them all: that one is the cause.
        raise first_cause(group) from group


async def _keep_leading(store: Store) -> None:
    """From before the first word to anybody until after the last."""
    while store.renew_seconds is not None:
        await trio.sleep(store.renew_seconds)
        await store.renew()


def moves_of(section: RebalancingSection) -> RebalancingSettings:
    policy = MovePolicy(
        period_seconds=section.period_seconds, minimum_replicas=section.minimum_replicas
    )
    return RebalancingSettings(RebalancingRule(section.rule), policy)


def first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one that a person should hear of: an expected error before an unexpected one."""
    leaves: list[BaseException] = []

    def collect(error: BaseException) -> None:
        if isinstance(error, BaseExceptionGroup):
            for part in error.exceptions:
                collect(part)
        else:
            leaves.append(error)

    collect(group)
    for kind in (KeyboardInterrupt, SwarmError):
        for leaf in leaves:
            if isinstance(leaf, kind):
                return leaf
    return leaves[0]


@dataclass(slots=True, eq=False)
class CarriedOut:
    """Somebody waits for an event to have had its effect."""

    done: trio.Event = field(default_factory=trio.Event)
    commands: list[Command] = field(default_factory=list)


class Coordinator:
    """One start. `run` does everything; the other methods are its parts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._run_id = run_id_of(service.manifest)
        self._put, self._events = trio.open_memory_channel[Event](EVENT_BUFFER)
        self._sessions = Sessions()
        self._awaited: dict[int, CarriedOut] = {}
        self._news = NewsDesk(Leaderboard(service.manifest))
        self._checkpoints = CheckpointFolder(
            service.folder.checkpoints, self._run_id, service.manifest.stage_count,
            service.settings.checkpoint.keep,
        )  # fmt: skip

    async def run(self) -> None:
        service = self._service
        restored = await self._restore()
        await self._count_contributions()
        self._admission = admission = Admission(
            service.identity, self._run_id, Generation(restored.generation),
            service.settings.admission.mode, service.store.admission(), service.store.write,
            service.wall_clock,
        )  # fmt: skip
        self._desk = desk = AdmissionDesk(
            service.folder, admission, service.store, self._sessions, self._put_and_wait,
            service.clock, service.renew_after_seconds,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            stack.enter_context(responsive())
            node, addresses = await self._open_node(stack)
            self._node = node
            self._reports = Reports(node)
            invite = invite_for(service.manifest, addresses, await desk.standing_token())
            state = begin(
                service.manifest,
                base64.b64encode(
                    read_bytes(service.folder.manifest, MAX_MANIFEST_BYTES)
                ).decode("ascii"),
                PeerRecord(
                    peer=service.identity.peer_id, stage=StageIndex(0), addresses=addresses,
                    certificate=admission.certificate(service.identity.peer_id, "coordinator"),
                    microbatches_per_second=0.0, accepts_work=False,
                ),
                restored,
                service.clock(),
                desk.revoked_at_start(),
                moves_of(service.settings.rebalancing),
            )  # fmt: skip
            self._state = state
            if service.settings.network.relay:
                node.serve_relay(RelayLimits(), self._may_use_relay)
            self.control = control = Control(
                admission, self._sessions, self._put_event, self._reports.heard
            )
            self._fetcher = CheckpointFetcher(
                node, self._checkpoints, self._run_id, service.manifest.stage_count,
                lambda: admission.certificate(service.identity.peer_id, "coordinator"),
                self._put.send,
            )  # fmt: skip
            self._status = StatusFile(service.folder.status, state, addresses, service.wall_clock)
            serve_transfers(
                node,
                catalogue(service.folder, service.manifest, self._checkpoints),
                desk.transfer_check(),
            )
            node.admit_only(
                lambda peer, _: admission.refusal(peer) is None, knows=self._may_use_relay
            )
            serve_probe(
                node, visitor_judge(admission, lambda: self._state, service.manifest),
                wall_clock=service.wall_clock,
            )  # fmt: skip
            node.serve(
                CONTROL_PROTOCOL, control.handle, control_limits(service.manifest), public=True,
                max_streams_per_peer=MAX_CONTROL_STREAMS,
            )  # fmt: skip
            await self._status.write(self._seen(control))
            # Before anybody is told that it runs: from now on a Ctrl-C stops it in order.
            signals = stack.enter_context(trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM))
            service.on_serving(invite)
            try:
                await self._run_tasks(control, signals)
            finally:
                self._save_links(everything=True)
                with trio.CancelScope(shield=True):
                    await self._status.write(self._seen(control), running=False)

    @property
    def attached(self) -> int:
        """Volunteers that somebody speaks for."""
        return self._sessions.attached

    async def _run_tasks(self, control: Control, signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._take_signals, signals)
            nursery.start_soon(self._tick)
            nursery.start_soon(collect_garbage)
            nursery.start_soon(self._sessions.wake_writers)
            nursery.start_soon(self._write_status, control)
            nursery.start_soon(self._write_links)
            nursery.start_soon(self._desk.serve_commands, self._note)
            nursery.start_soon(self._desk.renew_certificates)
            await self._consume()
            nursery.cancel_scope.cancel()

    # ------------------------------------------------------------ the start

    async def _restore(self) -> Restored:
        """What the store remembers, with a checkpoint whose every byte is there."""
        service = self._service
        before = service.store.restore()
        known = {record.version: record for record in service.store.checkpoints()}
        lost = before.generation == 0 and bool(self._checkpoints.versions())
        service.store.next_generation(generation_floor(service.wall_clock()) if lost else 0)
        restored = service.store.restore()
        await anyio.to_thread.run_sync(self._checkpoints.give_up_all)
        found = service.verified
        if found is None or found.version not in known:
            found = await anyio.to_thread.run_sync(
                lambda: self._checkpoints.latest_valid(self._note, None if lost else known)
            )
        if lost and found is not None:
            # The database was moved away or lost: the checkpoint is a new base for the run.
            reason = f"the database is new, the run goes on from its checkpoint of {found.version}"
            self._note(reason)
            await service.store.write(found)
            await service.store.write(RolledBack(found.version, reason))
            restored = service.store.restore()
        if found is None and known:
            self._note("no checkpoint of this run is usable any more")
        at_end = restored.version >= service.manifest.training.steps
        return dataclasses.replace(
            restored, checkpoint=found, finished=restored.finished and at_end
        )

    async def _open_node(self, stack: AsyncExitStack) -> tuple[Node, tuple[str, ...]]:
        """Listen on the port asked for, or on the one that invites name since the first start."""
        service = self._service
        network = service.settings.network
        wanted = service.port or network.listen_port
        remembered = None if wanted else service.folder.remembered_port()
        listen = listen_address(network.listen_host, wanted or remembered or 0)
        try:
            node = await stack.enter_async_context(
                open_node(service.identity, [listen], max_inbound_streams_per_peer=MAX_STREAMS)
            )
        except NetworkError as error:
            hint = (
                " Invites name this port since the first start; "
                "--port chooses another one, and then new invites are needed."
            )
            raise NetworkError(f"{error}{hint if remembered else ''}") from error
        port = int(node.addresses[0].split("/tcp/")[1].split("/")[0])
        if service.folder.remembered_port() != port:
            service.folder.remember_port(port)
        addresses = dialable_addresses(network.listen_host, port, network.announce)
        if network.listen_host == "0.0.0.0":
            try:
                await node.listen([f"/ip6/::/tcp/{port}"])
            except NetworkError as error:
                log.info("no IPv6 here: %s", error)
            else:
                addresses = dual_stack(addresses, port)
        node.announce(addresses)
        node.admit_only(lambda peer, protocol: False)
        return node, addresses

    def _may_use_relay(self, peer: PeerId) -> bool:
        """Members, by their own peer ID or by that of their p2pd."""
        return peer in self._state.peers or any(
            member.carrier is not None and member.carrier.peer == peer
            for member in self._state.peers.values()
        )

    async def _count_contributions(self) -> None:
        """In a thread: a long run has many steps to sum up."""
        self._news.leaderboard.begin(
            await anyio.to_thread.run_sync(self._service.store.contributions)
        )

    # ------------------------------------------------------------ events and commands

    async def _consume(self) -> None:
        """Take events in order until the core says Stopped."""
        while True:
            event = await self._events.receive()
            # Everybody who waits gets a turn between two events that are waited for; a few that
            # lie ready are taken together, or ten thousand clients wait for ten thousand turns.
            for _ in range(EVENTS_AT_ONCE):
                if await self._act_on(event):
                    return
                try:
                    event = self._events.receive_nowait()
                except trio.WouldBlock:
                    break
            else:
                if await self._act_on(event):
                    return

    async def _act_on(self, event: Event) -> bool:
        """True when the core says that this is the end."""
        # Who was frozen and has lost the run meanwhile must not say another word.
        await self._service.store.hold()
        if isinstance(event, HeartbeatsHeard):
            event = self.control.take_beats()
        elif isinstance(event, PeerAttached):
            refusal = self._admission.refusal(event.peer)
            if refusal is not None:  # since its hello was answered
                self._sessions.refuse(event.session, refusal)
                return False
            self._sessions.make_current(event.session, event.peer)
            self._service.store.post(PeerSeen(event.peer, event.hello.name))
            self._news.leaderboard.name(event.peer, event.hello.name)
        elif isinstance(event, PeersRevoked):
            for peer in event.peers:
                self._nursery.start_soon(self._part_from, peer)
        elif isinstance(event, SessionLost):
            self._service.store.post(PeerSeen(event.peer))
        elif isinstance(event, CheckpointStored) and not self._fetcher.wanted(event.version):
            log.info("the checkpoint of step %d is not wanted any more", event.version)
            return False
        commands = transition(self._state, event, self._service.clock())
        for command in commands:
            if isinstance(command, Stopped):
                await self._sessions.finish_all(FLUSH_SECONDS)
                return True
            await self._carry_out(command)
        self._tell_news(event)
        awaited = self._awaited.pop(id(event), None)
        if awaited is not None:
            awaited.commands = commands
            awaited.done.set()
        return False

    def _tell_news(self, event: Event) -> None:
        """After what the event commanded: a newcomer has its Welcome by then."""
        news = self._news.due(self._state, self._service.clock())
        if news is not None:
            self._sessions.broadcast(self._state.peers, news)
        elif isinstance(event, PeerAttached) and self._news.latest is not None:
            self._sessions.send(event.peer, self._news.latest)

    async def _put_event(self, event: Event) -> None:
        """Waits for room only when there is none: its callers have just given others a turn."""
        try:
            self._put.send_nowait(event)
        except trio.WouldBlock:
            await self._put.send(event)

    async def _put_and_wait(self, event: Event) -> list[Command]:
        """Hand the core an event; what it commanded, when all of that has been carried out."""
        awaited = self._awaited[id(event)] = CarriedOut()
        await self._put.send(event)
        await awaited.done.wait()
        return awaited.commands

    async def _part_from(self, peer: PeerId) -> None:
        """A peer that was revoked: when it has been told, it has nothing more to do here."""
        await trio.sleep(PARTING_SECONDS)
        if self._admission.refusal(peer) is not None:
            try:
                await self._node.disconnect(peer)
            except NetworkError as error:
                log.info("the connection to %s did not close in order: %s", peer, error)

    async def _carry_out(self, command: Command) -> None:
        if isinstance(command, Send):
            self._sessions.send(command.peer, command.message)
        elif isinstance(command, Broadcast):
            self._sessions.broadcast(command.peers, command.message)
        elif isinstance(command, Persist):
            if isinstance(command.record, RolledBack):
                self._fetcher.give_up()
            await self._service.store.write(command.record)
            if isinstance(command.record, AppliedStep):
                self._news.leaderboard.add(command.record)
            elif isinstance(command.record, RolledBack):
                await self._count_contributions()
        elif isinstance(command, Note):
            self._note(command.text, command.peer)
        elif isinstance(command, FetchSnapshot):
            checkpoint = self._fetcher.begin(command)
            self._nursery.start_soon(self._fetcher.fetch_stage, command, checkpoint)
        elif isinstance(command, CloseSession):
            self._sessions.finish(command.peer)

    def _note(self, text: str, peer: PeerId | None = None) -> None:
        text = printable(text)
        log.info("%s%s", text, f" [{peer}]" if peer else "")
        self._service.report(text)
        self._service.store.post(Note(text, peer))

    async def _tick(self) -> None:
        while True:
            await trio.sleep(TICK_SECONDS)
            # When the core is behind, a waiting tick more would only put it further behind.
            if not self._events.statistics().current_buffer_used:
                await self._put.send(Tick())

    async def _take_signals(self, signals: AsyncIterator[int]) -> None:
        """The first Ctrl-C ends in order; the second one at once."""
        asked = False
        async for _ in signals:
            if asked:
                raise KeyboardInterrupt
            asked = True
            self._service.report(
                "stopping: the step under way and a last checkpoint are finished first; "
                "press Ctrl-C again to stop at once"
            )
            await self._put.send(StopRequested())

    # ------------------------------------------------------------ status and links

    def _seen(self, control: Control) -> Seen:
        """What the core does not know and `status` shows."""
        return Seen(
            now=self._service.clock(),
            links=self._reports.links(),
            paths=self._reports.paths(self._state.peers),
            admission=self._desk.document(),
            sessions=len(self._sessions),
            sessions_ended=dict(control.ended),
        )

    async def _write_status(self, control: Control) -> None:
        while True:
            began = self._service.clock()
            await self._status.write(self._seen(control))
            # Ten thousand volunteers take a third of a second to describe.
            took = self._service.clock() - began
            await trio.sleep(max(STATUS_SECONDS, STATUS_SHARE * took))

    async def _write_links(self) -> None:
        while True:
            await trio.sleep(LINKS_SECONDS)
            self._save_links()

    def _save_links(self, everything: bool = False) -> None:
        for reporter, links in self._reports.unsaved_links(everything).items():
            self._service.store.post(LinksSeen(reporter, links))
