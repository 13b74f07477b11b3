"""All checks, concurrently, in less than half a minute, before anything is downloaded.

Checks are independent: one that hangs is reported as not finished, one that fails by a fault of
this program is reported as that, and the remaining ones continue.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import trio

from swarm_client.connectivity.port_mapping import PortMapper
from swarm_client.doctor import coordinator, links, machine, reachability
from swarm_client.doctor.report import NETWORK_CHECKS, Report, Results, problem, warning
from swarm_client.governor.device_offer import permitted_memory
from swarm_client.governor.probes.idle import display_idle
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.preferences.layers import load, preferences_path
from swarm_shared.base.clock import Clock, wall
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.identity.invite import Invite
from swarm_shared.identity.keys import Identity
from swarm_shared.network import open_node
from swarm_shared.probe.client import Probe
from swarm_shared.protocol import DoctorWelcome

logger = logging.getLogger(__name__)

TOTAL_SECONDS = 25.0
"""Time limit since the start of the process; closing what is open takes some seconds more."""
MIN_SECONDS = 10.0
"""Time left for the checks even if the start of the process was slow."""


@dataclass(frozen=True, slots=True)
class DoctorOptions:
    invite: Invite | None = None
    home: Path | None = None
    device: str = "auto"
    wall_clock: Clock = wall
    total_seconds: float = TOTAL_SECONDS
    self_test_seconds: float = 0.0
    """Duration of the self-test, which is added to `total_seconds`; 0 for none."""


def seconds_left() -> float:
    """Seconds of TOTAL_SECONDS that are left: on a busy machine many pass before the first line of
    this program runs."""
    running = time.time() - psutil.Process().create_time()
    return min(TOTAL_SECONDS, max(MIN_SECONDS, TOTAL_SECONDS - running))


async def check_up(options: DoctorOptions) -> Report:
    """Carry out every check that the options allow. KeyboardInterrupt upon Ctrl-C.

    Interrupts arrive by a signal receiver: one raised at an arbitrary place could be taken for a
    network failure and reported as one.
    """
    checkup = Checkup(options)
    begun = time.monotonic()
    interrupted = False
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        async with trio.open_nursery() as nursery:

            async def watch_for_interrupt() -> None:
                nonlocal interrupted
                async for _ in signals:
                    interrupted = True
                    nursery.cancel_scope.cancel()

            nursery.start_soon(watch_for_interrupt)
            with trio.move_on_after(options.total_seconds + options.self_test_seconds):
                await checkup.run()
            nursery.cancel_scope.cancel()
    if interrupted:
        raise KeyboardInterrupt
    checkup.apply_run_needs()
    return Report.of(checkup.results.all(), options.wall_clock(), time.monotonic() - begun)


class Checkup:
    """The checks, each of which puts its result into `results`."""

    def __init__(self, options: DoctorOptions) -> None:
        self._options = options
        self._home = Home.locate(options.home)
        self._device: Device | None = None
        self._welcome: DoctorWelcome | None = None
        self.results = Results()

    async def run(self) -> None:
        results = self.results
        results.put(machine.check_python(), machine.check_disk(self._home.path))
        home, identity, in_use = machine.check_home(self._home)
        results.put(home)
        async with trio.open_nursery() as nursery:
            start = partial(nursery.start_soon, self._isolated)
            start(("torch", "gpu", "device", "self-test"), self.probe_torch)
            start(("p2pd",), self.check_p2pd)
            invite = self._options.invite
            if invite is None:
                results.skip(("invite", *NETWORK_CHECKS), "no invite was given")
                return
            results.put(coordinator.check_invite(invite))
            # Only a running client may use its own identity.
            speaker = None if in_use else identity
            start(NETWORK_CHECKS, partial(self.check_network, invite, speaker, in_use))

    def apply_run_needs(self) -> None:
        """Judge the device again by what the run needs, if the coordinator has sent that."""
        device = self.results.get("device")
        if self._welcome is None:
            return
        if device is not None and not device.exit_code:
            self.results.replace(
                machine.fit_device(device, self._device, self._welcome.smallest_stage)
            )

    async def _isolated(self, ids: tuple[str, ...], look: Callable[[], Awaitable[None]]) -> None:
        try:
            await look()
        except SwarmError as error:
            for id in ids:
                self.results.put(warning(id, str(error), "Run this again in a minute."))
        except Exception as error:  # a supervisor: one check's fault must not end the other checks
            logger.exception("a check failed: %s", ", ".join(ids))
            for id in ids:
                self.results.put(
                    warning(id, f"this check itself failed: {error!r}", "Please report this.")
                )

    async def probe_torch(self) -> None:
        found, seconds = await machine.probe_torch()
        try:
            device, self._device = await trio.to_thread.run_sync(
                machine.check_device, found, self._options.device, self._permitted
            )
        except SwarmError as error:
            device = problem("device", type(error), str(error), "Correct the preferences.")
        gpu = machine.check_gpu(found, self._options.device)
        self.results.put(machine.check_torch(found, seconds), gpu, device)
        if not self._options.self_test_seconds:
            self.results.skip(("self-test",), "not asked for; --self-test computes for a minute")
        elif self._device is None or "error" in found:
            self.results.skip(("self-test",), "there is no device to test")
        else:
            self.results.put(
                await machine.check_self_test(self._device, self._options.self_test_seconds)
            )

    def _permitted(self, device: Device) -> MemoryOffer:
        """The memory that the preferences leave a stage on the device."""
        layered = load(preferences_path(self._options.home))
        has_display = display_idle().idle_seconds() is not None
        return permitted_memory(device, layered.preferences, 1, 1, has_display=has_display)

    async def check_p2pd(self) -> None:
        self.results.put(await machine.check_p2pd())

    async def check_network(self, invite: Invite, identity: Identity | None, in_use: bool) -> None:
        async with open_node(identity or Identity.generate()) as node:
            check = await coordinator.connect(node, invite)
            self.results.put(check)
            if check.exit_code:
                self.results.skip(NETWORK_CHECKS, "the coordinator cannot be reached")
                return
            port = None if in_use else self._home.remembered_port()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(
                    self._isolated, ("reachability",),
                    partial(self.check_reachability, invite, port),
                )  # fmt: skip

                async def inside(probe: Probe) -> None:
                    self._welcome = probe.welcome
                    peer = identity.peer_id if identity is not None else None
                    self.results.put(
                        *coordinator.version_and_admission(probe.welcome, peer, in_use)
                    )
                    await links.measure_coordinator(
                        probe, self._options.wall_clock, self.results
                    )  # fmt: skip

                welcome = await coordinator.visit_coordinator(node, invite, inside, self.results)
                if welcome is not None:
                    self.results.put(
                        await links.check_peers(
                            node, coordinator.hello_of(invite), welcome, self._options.wall_clock
                        )
                    )

    async def check_reachability(self, invite: Invite, port: int | None) -> None:
        self.results.put(await reachability.check_reachability(invite, port, PortMapper()))
