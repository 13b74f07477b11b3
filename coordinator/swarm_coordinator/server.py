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

from swarm_coordinator.addresses import dialable_addresses, invite_for, listen_address
from swarm_coordinator.admission import RENEW_AFTER_SECONDS, Admission
from swarm_coordinator.checkpoints import CheckpointFolder
from swarm_coordinator.control import Control, control_limits
from swarm_coordinator.events import (
    CheckpointStored,
    CloseSession,
    Command,
    Event,
    FetchSnapshot,
    Note,
    PeerAttached,
    Persist,
    Restored,
    RolledBack,
    Send,
    SessionLost,
    Stopped,
    StopRequested,
    Tick,
)
from swarm_coordinator.records import LinksSeen, PeerSeen
from swarm_coordinator.run_folder import RunFolder, read_bytes
from swarm_coordinator.sessions import Sessions
from swarm_coordinator.settings import RunSettings
from swarm_coordinator.status import StatusFile, printable
from swarm_coordinator.store import Store
from swarm_coordinator.transfer_server import CheckpointFetcher, catalogue
from swarm_coordinator.transition import begin, transition
from swarm_shared.clock import Clock, monotonic, wall
from swarm_shared.errors import NetworkError, SwarmError
from swarm_shared.identity import Identity
from swarm_shared.invite import Invite
from swarm_shared.manifest import Manifest
from swarm_shared.messages import CONTROL_PROTOCOL, LinkBytes, PeerRecord
from swarm_shared.network import Node, open_node
from swarm_shared.signed_manifest import MAX_MANIFEST_BYTES, run_id_of
from swarm_shared.transfer import certificate_check, serve_transfers
from swarm_shared.types import Generation, PeerId, StageIndex

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
EVENT_BUFFER = 4096
"""Events that wait for the core. When it is full, clients are not read from: they slow down."""
LINKS_SECONDS = 10.0
"""Between two writes of the link table; it is not needed to the second, and n² long."""
FLUSH_SECONDS = 5.0
"""At the end, for words that are still in outboxes."""

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
    on_serving: Callable[[Invite], None] = field(default=lambda invite: None)


async def serve(service: Service) -> None:
    """Run until the run is finished or the organiser stops it. SwarmError when it cannot go on."""
    coordinator = Coordinator(service)
    try:
        await coordinator.run()
    except BaseExceptionGroup as group:
        # Tasks run side by side, and the first error ends them all: that one is the cause.
        raise first_cause(group) from group


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


class Coordinator:
    """One start. `run` does everything; the other methods are its parts."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._run_id = run_id_of(service.manifest)
        self._put, self._events = trio.open_memory_channel[Event](EVENT_BUFFER)
        self._sessions = Sessions()
        self._links: dict[PeerId, tuple[LinkBytes, ...]] = {}
        self._unsaved_links: set[PeerId] = set()
        self._checkpoints = CheckpointFolder(
            service.folder.checkpoints, self._run_id, service.manifest.stage_count,
            service.settings.checkpoint.keep,
        )  # fmt: skip

    async def run(self) -> None:
        service = self._service
        restored = await self._restore()
        admission = Admission(
            service.identity, self._run_id, Generation(restored.generation),
            service.folder.admission_token()
            if service.settings.admission.mode == "token" else None,
            service.wall_clock,
        )  # fmt: skip
        async with AsyncExitStack() as stack:
            node, addresses = await self._open_node(stack)
            invite = invite_for(service.manifest, addresses, admission.token)
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
            )  # fmt: skip
            self._state = state
            control = Control(
                admission, self._sessions, self._put.send, self._links_seen,
                service.renew_after_seconds,
            )  # fmt: skip
            self._fetcher = CheckpointFetcher(
                node, self._checkpoints, self._run_id, service.manifest.stage_count,
                lambda: admission.certificate(service.identity.peer_id, "coordinator"),
                self._put.send,
            )  # fmt: skip
            self._status = StatusFile(service.folder.status, state, addresses, service.wall_clock)
            serve_transfers(
                node,
                catalogue(service.folder, service.manifest, self._checkpoints),
                certificate_check(self._run_id, service.identity.peer_id, service.wall_clock),
            )
            node.serve(CONTROL_PROTOCOL, control.handle, control_limits(service.manifest))
            await self._status.write(service.clock(), self._all_links(node), control.ended)
            # Before anybody is told that it runs: from now on a Ctrl-C stops it in order.
            signals = stack.enter_context(trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM))
            service.on_serving(invite)
            try:
                await self._run_tasks(node, control, signals)
            finally:
                self._save_links(node, everything=True)
                with trio.CancelScope(shield=True):
                    await self._status.write(
                        service.clock(), self._all_links(node), control.ended, running=False
                    )

    async def _run_tasks(self, node: Node, control: Control, signals: AsyncIterator[int]) -> None:
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            nursery.start_soon(self._take_signals, signals)
            nursery.start_soon(self._tick)
            nursery.start_soon(self._write_status, node, control)
            nursery.start_soon(self._write_links, node)
            await self._consume()
            nursery.cancel_scope.cancel()

    # ------------------------------------------------------------ the start

    async def _restore(self) -> Restored:
        """What the store remembers, with a checkpoint whose every byte is there."""
        service = self._service
        generation = service.store.next_generation()
        restored = service.store.restore()
        known = {record.version: record for record in service.store.checkpoints()}
        lost = generation == 1 and restored.version == 0 and not known
        await anyio.to_thread.run_sync(self._checkpoints.give_up_all)
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
                open_node(service.identity, [listen], max_inbound_streams_per_peer=64)
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
        return node, dialable_addresses(network.listen_host, port, network.announce)

    # ------------------------------------------------------------ events and commands

    async def _consume(self) -> None:
        """Take events in order until the core says Stopped."""
        async for event in self._events:
            if isinstance(event, PeerAttached):
                self._sessions.make_current(event.session, event.peer)
                self._service.store.post(PeerSeen(event.peer, event.hello.name))
            elif isinstance(event, SessionLost):
                self._service.store.post(PeerSeen(event.peer))
            elif isinstance(event, CheckpointStored) and not self._fetcher.wanted(event.version):
                log.info("the checkpoint of step %d is not wanted any more", event.version)
                continue
            for command in transition(self._state, event, self._service.clock()):
                if isinstance(command, Stopped):
                    await self._sessions.finish_all(FLUSH_SECONDS)
                    return
                await self._carry_out(command)

    async def _carry_out(self, command: Command) -> None:
        if isinstance(command, Send):
            self._sessions.send(command.peer, command.message)
        elif isinstance(command, Persist):
            if isinstance(command.record, RolledBack):
                self._fetcher.give_up()
            await self._service.store.write(command.record)
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

    def _links_seen(self, reporter: PeerId, links: tuple[LinkBytes, ...]) -> None:
        self._links[reporter] = links
        self._unsaved_links.add(reporter)

    def _all_links(self, node: Node) -> dict[PeerId, tuple[LinkBytes, ...]]:
        return {**self._links, self._service.identity.peer_id: own_links(node)}

    async def _write_status(self, node: Node, control: Control) -> None:
        while True:
            await self._status.write(
                self._service.clock(), self._all_links(node), control.ended, len(self._sessions)
            )
            await trio.sleep(1.0)

    async def _write_links(self, node: Node) -> None:
        while True:
            await trio.sleep(LINKS_SECONDS)
            self._save_links(node)

    def _save_links(self, node: Node, everything: bool = False) -> None:
        self._links_seen(self._service.identity.peer_id, own_links(node))
        for reporter in self._links if everything else self._unsaved_links:
            self._service.store.post(LinksSeen(reporter, self._links[reporter]))
        self._unsaved_links.clear()


def own_links(node: Node) -> tuple[LinkBytes, ...]:
    """The coordinator's own counts, in the form in which clients report theirs."""
    totals: dict[tuple[PeerId, str], dict[str, int]] = {}
    for link in node.traffic():
        totals.setdefault((link.remote, link.protocol), {})[link.direction] = link.bytes
    return tuple(
        LinkBytes(
            remote=remote, protocol=protocol, sent=counts.get("sent", 0),
            received=counts.get("received", 0),
        )
        for (remote, protocol), counts in totals.items()
    )  # fmt: skip
