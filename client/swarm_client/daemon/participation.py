"""One participation in one run: from the listening sockets to the end of the last session (trio).

Owns what lives as long as a participation: for each device a node, an averaging worker, a volunteer
and its background tasks, and one governor for all of them. Which run it is, and what follows, is
the daemon's part (`swarm_client.daemon.daemon`). Order of a start: the cheapest checks first
(devices), then the network, then the run.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, closing
from functools import partial

import trio

from swarm_client.averaging.handle.options import AveragingOptions
from swarm_client.averaging.handle.supervisor import AveragingWorker
from swarm_client.connectivity.listening import listen
from swarm_client.connectivity.port_mapping import PortMapper
from swarm_client.connectivity.reachability import PeerObserver, ReachabilityWatch, member_observers
from swarm_client.control.contribution_log import ContributionCounter
from swarm_client.control.messages import JoinArguments
from swarm_client.governor.device_offer import usable_devices
from swarm_client.governor.disk_space import DiskAllowance, data_budget_bytes
from swarm_client.governor.governor import P2PD_HELD_BACK, Governor
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.ipc import shared_memory
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.membership.membership import Membership
from swarm_client.preferences import PreferenceSource
from swarm_client.preferences.layers import preferences_path
from swarm_client.training_data.leaf_cache import LeafCache
from swarm_client.volunteer.context import VolunteerContext, VolunteerOptions
from swarm_client.volunteer.device_group import DeviceGroup
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared.base.error_groups import expected_error
from swarm_shared.base.errors import SwarmError, UsageError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.credit.credit import normalised_team
from swarm_shared.host.cores import usable_cores
from swarm_shared.identity.credentials import sign_owner_binding
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.network import Bandwidth, Node, open_node

AVERAGING_START_SECONDS = 30.0
"""Seconds to wait for the averaging worker; its imports take seconds on a busy machine."""

log = logging.getLogger(__name__)

Report = Callable[[str], None]


_DeviceResources = tuple[Identity, Home, str, VolunteerOptions, Report]
"""The key, home, listen address, options and report of one device's volunteer."""


async def participate(
    join: JoinArguments,
    invite: Invite,
    home: Home,
    identity: Identity,
    contribution: ContributionCounter,
    report: Report,
    begun: Callable[[Governor], None],
    admitted: Callable[[Membership], None],
) -> DeviceGroup:
    """Participate with every device until the run is finished or all have left; return the devices.

    A device that the run refuses stays out while others participate; the error of the last one is
    raised. `begun` is called before the volunteers attach, `admitted` for each admitted device.
    """
    source = PreferenceSource(preferences_path(home.path), flags=join.preferences)
    devices = await _offered_devices(join, source)
    bandwidth, probes = Bandwidth(), MachineProbes(home.path)
    disk = DiskAllowance(probes.disk, source, home, invite.run_id)
    budget_bytes = data_budget_bytes(source.current.preferences)
    data_cache = LeafCache(home.data_folder(invite.run_id), budget_bytes)
    made: dict[int, Volunteer] = {}
    all_made, may_attach = trio.Event(), trio.Event()

    async def run_device(place: int, resources: _DeviceResources) -> None:
        key, own_home, listen_on, options, report_own = resources
        async with (
            listening_node(key, listen_on, own_home, bandwidth) as node,
            trio.open_nursery() as nursery,
        ):
            worker = await start_averaging(own_home, options, report_own, nursery, source)
            context = VolunteerContext(
                key, invite, own_home, node, options, contribution,
                data_cache, disk.claim, report_own, nursery,
            )  # fmt: skip
            volunteer = made[place] = Volunteer(context, worker)
            if len(made) == len(devices):
                all_made.set()
            await may_attach.wait()
            nursery.start_soon(_report_admission, volunteer, admitted)
            await _take_part(volunteer, device_group, nursery)

    with closing(data_cache):
        async with trio.open_nursery() as nursery:
            async with trio.open_nursery() as device_tasks:
                for place, resources in enumerate(
                    _resources_per_device(join, home, identity, devices, source, report)
                ):
                    device_tasks.start_soon(run_device, place, resources)
                await all_made.wait()
                device_group = DeviceGroup([made[place] for place in range(len(devices))])
                governor = Governor(
                    source, home, device_group, bandwidth, invite.run_id, report, probes
                )
                begun(governor)
                await governor.tick()  # first: a Hello offers what the preferences leave
                nursery.start_soon(governor.run)
                may_attach.set()
            nursery.cancel_scope.cancel()
    return device_group


async def _offered_devices(join: JoinArguments, source: PreferenceSource) -> tuple[Device, ...]:
    """The devices that take part. UsageError when several are offered and one stage is named."""
    devices = await trio.to_thread.run_sync(
        usable_devices, join.device, join.memory_bytes, source.current.preferences
    )
    if join.stage is not None and len(devices) > 1:
        raise UsageError(
            f"--stage is for one device, and there are {len(devices)}; leave it out, or name one "
            "with --device"
        )
    return devices


def _resources_per_device(
    join: JoinArguments,
    home: Home,
    identity: Identity,
    devices: Sequence[Device],
    source: PreferenceSource,
    report: Report,
) -> Iterator[_DeviceResources]:
    """Yield the resources of each device, with its part of the machine's."""
    threads = join.threads or max(1, usable_cores() - 1)
    for number, device in enumerate(devices, start=1):
        own_home = home.of_device(number)
        # The first device uses the machine's own key: most machines have one device.
        key = identity if number == 1 else Identity.load_or_create(own_home.identity_path)
        prefix = f"{device.id}: " if len(devices) > 1 else ""
        report_own = partial(_report_with, prefix, report)
        report_own(f"peer {key.peer_id}")
        report_own(f"device: {device.label}, {device.memory} offered")
        shared_memory.unlink_stale(f"swarm-{key.peer_id[-8:]}-")
        options = VolunteerOptions(
            device,
            max(1, threads // len(devices)),
            StageIndex(join.stage) if join.stage is not None else None,
            join.name,
            join.may_relay,
            team=normalised_team(join.team) or None,
            owner=None if number == 1 else owner_binding(identity, key.peer_id),
            private_web_downloads=source.current.preferences.private_web_downloads,
        )
        yield key, own_home, listen_address(join.listen, number), options, report_own


def owner_binding(machine: Identity, device: PeerId) -> str:
    """The binding of a further device to the machine's key, in base64; sent with each of its
    hellos, so that one person has one row in all lists.

    Made at each start: signatures of one value by one key are identical.
    """
    return encode_envelope(sign_owner_binding(machine, device))


def _report_with(prefix: str, report: Report, text: str) -> None:
    report(f"{prefix}{text}")


def listen_address(listen: str, number: int) -> str:
    """The listen address of device `number`: further devices use the ports after the given one."""
    head, _, port = listen.rpartition("/")
    return f"{head}/{int(port) + number - 1}" if port.isdecimal() and int(port) else listen


async def _report_admission(volunteer: Volunteer, admitted: Callable[[Membership], None]) -> None:
    await volunteer.admitted.wait()
    if volunteer.membership is not None:
        admitted(volunteer.membership)


async def _take_part(
    volunteer: Volunteer, device_group: DeviceGroup, nursery: trio.Nursery
) -> None:
    """Run until the run is finished, this device has left, or the run refuses it.

    The error of a refused device is raised only if no other device is active.
    """
    nursery.start_soon(volunteer.use_directory)
    nursery.start_soon(volunteer.relay_policy.run)
    nursery.start_soon(volunteer.averager.run)
    nursery.start_soon(watch_reachability, volunteer.node, volunteer.context.invite, volunteer)
    try:
        await volunteer.run()
    except (SwarmError, BaseExceptionGroup) as error:
        expected = expected_error(error)
        others = [other for other in device_group.active if other is not volunteer]
        if expected is None or not others:
            raise
        device_group.failures[volunteer.node.peer_id] = expected
        volunteer.context.report(f"error: {expected}")
        volunteer.context.report("the other devices continue")
    finally:
        device_group.ended.add(volunteer.node.peer_id)
    nursery.cancel_scope.cancel()


@asynccontextmanager
async def listening_node(
    identity: Identity, listen_on: str, home: Home, bandwidth: Bandwidth
) -> AsyncIterator[Node]:
    """A node that listens where the user says, by default on one port that this home keeps."""
    async with open_node(identity, bandwidth=bandwidth) as node:
        remembered = home.remembered_port()
        await listen(node, listen_on, remembered)
        port = node.listening_port
        assert port is not None, "it listens on the given address"
        if listen_on.endswith("/tcp/0") and port != remembered:
            home.remember_port(port)
        yield node


async def watch_reachability(node: Node, invite: Invite, volunteer: Volunteer) -> None:
    """Keep track of whether other peers can dial in; ask the router for a mapping if they
    cannot."""
    port = node.listening_port
    assert port is not None, "open_node listens on the given address"
    await volunteer.admitted.wait()
    hello = volunteer.doctor_hello
    mapper = PortMapper(on_change=lambda mapping: watch.mapping_changed(mapping))
    watch = ReachabilityWatch(
        port,
        PeerObserver(node, invite.coordinator, invite.addresses, hello),
        lambda: member_observers(node, volunteer.roster.all(), hello),
        mapper,
        volunteer.relay_policy.reachability_changed,
    )
    node.on_network_change.append(watch.network_changed)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(mapper.run)
        await watch.run()


async def start_averaging(
    home: Home, options: VolunteerOptions, report: Report, nursery: trio.Nursery,
    source: PreferenceSource,
) -> AveragingWorker:  # fmt: skip
    """Start hivemind's process and wait for it, so that the first hello can name its p2pd."""
    device = options.device
    worker = AveragingWorker(
        AveragingOptions(
            home=home.path,
            memory_bytes=device.memory_bytes if device.host_bytes is None else device.host_bytes,
        )
    )
    worker.hold_back(P2PD_HELD_BACK if source.current.preferences.limits_transport else "")
    nursery.start_soon(worker.run)
    with trio.move_on_after(AVERAGING_START_SECONDS):
        await worker.settled()
    if not worker.available:
        report(f"all-reduce goes over libp2p: {worker.reason}")
    return worker
