"""One stay in one run: from the listening socket to the goodbye (trio).

Owns what lives as long as a stay does: the node, the averaging worker, the volunteer and what
looks after them. Which run it is, and what becomes of the program afterwards, is the daemon's part.
Order of a start: the cheapest checks first (device), then the network, then the run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import trio

from swarm_client import shared_memory
from swarm_client.averager import GroupAverager
from swarm_client.averaging.options import AveragingOptions
from swarm_client.averaging.supervisor import AveragingWorker
from swarm_client.contribution import Contribution
from swarm_client.control.messages import JoinArguments
from swarm_client.device import Device
from swarm_client.governor.governor import P2PD_HELD_BACK, Governor, Subject
from swarm_client.governor.offer import usable_device
from swarm_client.home import Home
from swarm_client.port_mapping import PortMapper
from swarm_client.preferences import PreferenceSource
from swarm_client.preferences.layers import preferences_path
from swarm_client.reachability import PeerObserver, ReachabilityWatch, member_observers
from swarm_client.volunteer import Volunteer
from swarm_client.volunteer_options import VolunteerOptions
from swarm_shared.credit import cleaned_team
from swarm_shared.errors import NetworkError
from swarm_shared.identity import Identity
from swarm_shared.invite import Invite
from swarm_shared.network import Node, open_node
from swarm_shared.types import StageIndex

AVERAGING_START_SECONDS = 30.0
"""Its imports take seconds on a machine whose cores are busy."""

log = logging.getLogger(__name__)

Report = Callable[[str], None]


async def stay(
    join: JoinArguments,
    invite: Invite,
    home: Home,
    identity: Identity,
    contribution: Contribution,
    report: Report,
    begun: Callable[[Volunteer, Governor], None],
) -> Volunteer:
    """Take part until the run is finished or the volunteer has left; who that was.

    `begun` is told of the volunteer before it attaches for the first time.
    """
    source = PreferenceSource(preferences_path(home.path), flags=join.preferences)
    device = await trio.to_thread.run_sync(
        usable_device, join.device, join.memory_bytes, source.current.preferences
    )
    report(f"peer {identity.peer_id}")
    report(f"device: {device.label}, {device.memory_bytes / 2**30:.1f} GiB offered")
    shared_memory.unlink_stale(f"swarm-{identity.peer_id[-8:]}-")
    options = VolunteerOptions(
        device,
        join.threads or max(1, (os.cpu_count() or 2) - 1),
        StageIndex(join.stage) if join.stage is not None else None,
        join.name,
        join.may_relay,
        team=cleaned_team(join.team) or None,
    )
    async with (
        listening_node(identity, join.listen, home) as node,
        trio.open_nursery() as nursery,
    ):
        held_back = P2PD_HELD_BACK if source.current.preferences.limits_transport else ""
        averager = GroupAverager(await start_averaging(home, nursery, report, held_back))
        volunteer = Volunteer(identity, invite, home, node, averager, options, report, nursery)
        volunteer.contribution = contribution
        governor = Governor(source, home, governed(volunteer, device), report)
        begun(volunteer, governor)
        await governor.look()
        nursery.start_soon(governor.run)
        nursery.start_soon(volunteer.use_directory)
        nursery.start_soon(volunteer.traversal.run)
        nursery.start_soon(averager.run)
        nursery.start_soon(watch_reachability, node, invite, volunteer)
        await volunteer.attachment.stay()
        nursery.cancel_scope.cancel()
    return volunteer


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


def governed(volunteer: Volunteer, device: Device) -> Subject:
    """The volunteer as the governor sees it."""
    averager = volunteer.averager
    return Subject(
        volunteer,
        averager.worker,
        volunteer.node.bandwidth,
        lambda: sum(link.sent + link.received for link in averager.links()),
        device.name,
        device.memory_bytes,
        volunteer.options.threads,
        volunteer.invite.run_id,
    )


async def start_averaging(
    home: Home, nursery: trio.Nursery, report: Report, held_back: str = ""
) -> AveragingWorker:
    """Start hivemind's process and wait a moment for it, so that the first hello can name it."""
    worker = AveragingWorker(AveragingOptions(home=home.path))
    worker.hold_back(held_back)
    nursery.start_soon(worker.run)
    with trio.move_on_after(AVERAGING_START_SECONDS):
        await worker.settled()
    if not worker.available:
        report(f"all-reduce goes over libp2p: {worker.reason}")
    return worker
