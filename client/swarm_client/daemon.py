"""`swarm-client join`: one volunteer from start to finish, in the foreground (trio).

Order of a start: the cheapest checks first (invite, folder, device), then the network, then the
run. Ctrl-C once leaves cleanly, twice at once.
"""

from __future__ import annotations

import logging
import logging.handlers
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import trio

from swarm_client import shared_memory
from swarm_client.averager import GroupAverager
from swarm_client.averaging.supervisor import AveragingOptions, AveragingWorker
from swarm_client.device import choose_device
from swarm_client.home import Home
from swarm_client.port_mapping import PortMapper
from swarm_client.reachability import PeerObserver, ReachabilityWatch, member_observers
from swarm_client.volunteer import Volunteer, VolunteerOptions
from swarm_shared.credit import cleaned_team
from swarm_shared.errors import NetworkError
from swarm_shared.identity import Identity
from swarm_shared.invite import Invite
from swarm_shared.network import Node, open_node
from swarm_shared.types import StageIndex

LEAVE_SECONDS = 60.0
"""How long a clean leave may take; a step of a large model can be longer, then it is cut off."""

AVERAGING_START_SECONDS = 30.0
"""Its imports take seconds on a machine whose cores are busy."""

log = logging.getLogger(__name__)

LOG_BYTES = 5 * 2**20

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class JoinOptions:
    invite: str
    home: Path | None
    device: str
    stage: int | None
    threads: int
    name: str | None
    listen: str
    memory_bytes: int | None
    may_relay: bool = True
    team: str | None = None


async def join(options: JoinOptions, report: Report) -> None:
    """Take part in the run that the invite names until it is finished or the user leaves."""
    invite = Invite.decode(options.invite)
    home = Home.at(options.home)
    with home.locked():
        write_log(home)
        identity = Identity.load_or_create(home.identity_path)
        device = await trio.to_thread.run_sync(choose_device, options.device, options.memory_bytes)
        report(f"peer {identity.peer_id}")
        report(f"device: {device.label}, {device.memory_bytes / 2**30:.1f} GiB offered")
        shared_memory.unlink_stale(f"swarm-{identity.peer_id[-8:]}-")
        volunteer_options = VolunteerOptions(
            device,
            options.threads,
            StageIndex(options.stage) if options.stage is not None else None,
            options.name,
            options.may_relay,
            cleaned_team(options.team) or None,
        )
        async with (
            listening_node(identity, options.listen, home) as node,
            trio.open_nursery() as nursery,
        ):
            averager = GroupAverager(await start_averaging(home, nursery, report))
            volunteer = Volunteer(
                identity, invite, home, node, averager, volunteer_options, report, nursery
            )
            nursery.start_soon(_leave_on_signal, volunteer, nursery.cancel_scope, report)
            nursery.start_soon(volunteer.use_directory)
            nursery.start_soon(volunteer.traversal.run)
            nursery.start_soon(averager.run)
            nursery.start_soon(watch_reachability, node, invite, volunteer)
            try:
                await volunteer.stay_attached()
            finally:
                report(str(volunteer.contribution))
            nursery.cancel_scope.cancel()


@asynccontextmanager
async def listening_node(identity: Identity, listen: str, home: Home) -> AsyncIterator[Node]:
    """Listen where the user says, by default on one port of this home for good.

    Routers keep what they learnt of a port, and a hole is punched to the port that listens. When
    another program has taken it meanwhile, any other one does.
    """
    ask_any = listen.endswith("/tcp/0")
    remembered = home.remembered_port() if ask_any else None
    wanted = listen if remembered is None else f"{listen.removesuffix('0')}{remembered}"
    async with AsyncExitStack() as stack:
        try:
            node = await stack.enter_async_context(open_node(identity, [wanted]))
        except NetworkError:
            if remembered is None:
                raise
            node = await stack.enter_async_context(open_node(identity, [listen]))
        port = node.listening_port
        assert port is not None, "a node that was told to listen does"
        if ask_any and port != remembered:
            home.remember_port(port)
        if listen.startswith("/ip4/0.0.0.0/"):
            try:
                await node.listen([f"/ip6/::/tcp/{port}"])
            except NetworkError as error:
                log.info("no IPv6 here: %s", error)
        yield node


async def watch_reachability(node: Node, invite: Invite, volunteer: Volunteer) -> None:
    """Find out whether others can dial in, asking the router for a way where there is none."""
    port = node.listening_port
    assert port is not None, "a node that was told to listen does"
    await volunteer.traversal.wait_admitted()
    hello = volunteer.doctor_hello
    mapper = PortMapper(on_change=lambda mapping: watch.mapping_changed(mapping))
    watch = ReachabilityWatch(
        port,
        PeerObserver(node, invite.coordinator, invite.addresses, hello),
        lambda: member_observers(node, volunteer.roster.all(), hello),
        mapper,
        volunteer.traversal.found,
    )
    node.on_network_change(watch.network_changed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapper.run)
        await watch.run()


async def start_averaging(home: Home, nursery: trio.Nursery, report: Report) -> AveragingWorker:
    """Start hivemind's process and wait a moment for it, so that the first hello can name it."""
    worker = AveragingWorker(AveragingOptions(home=home.path))
    nursery.start_soon(worker.run)
    with trio.move_on_after(AVERAGING_START_SECONDS):
        await worker.settled()
    if not worker.available:
        report(f"all-reduce goes over libp2p: {worker.reason}")
    return worker


async def _leave_on_signal(volunteer: Volunteer, scope: trio.CancelScope, report: Report) -> None:
    with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
        async for _ in signals:
            if volunteer.leaving or volunteer.session is None:
                report("leaving at once")
                scope.cancel()
                return
            report("leaving: finishing what is in flight (once more to leave at once)")
            volunteer.leave()
            scope.deadline = trio.current_time() + LEAVE_SECONDS


def write_log(home: Home) -> None:
    """Details for a bug report go to the volunteer's own folder, never to the terminal."""
    handler = logging.handlers.RotatingFileHandler(
        home.log_folder / "client.log", maxBytes=LOG_BYTES, backupCount=2
    )
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    for name in ("swarm_client", "swarm_shared"):
        logger = logging.getLogger(name)
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
