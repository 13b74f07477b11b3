"""The governor's shell: read, decide for each device, apply, twice a second.

Owns the loop, the memory between two ticks, and the reports. Whether to compute and how much is
`swarm_client.governor.policy`'s; what is read is `swarm_client.governor.probes`'. A suspension that
was not ordered here (the user's pause) is never ended here. What belongs to the machine (cores,
memory, bandwidth, quota, disk) is shared by its devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import date

import trio

from swarm_client.control.status_document import SuspendReason
from swarm_client.control.status_sentence import Suspension
from swarm_client.governor.device_offer import permitted_memory
from swarm_client.governor.disk_space import make_room, missing_disk_bytes
from swarm_client.governor.policy import (
    ClockReading,
    GovernorDecision,
    Limits,
    PolicyMemory,
    decide,
)
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.governor.probes.readings import Readings
from swarm_client.governor.process_limits import ProcessBinding
from swarm_client.governor.transfer_quota import TransferCounts
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.preferences import PreferenceSource
from swarm_client.volunteer.context import WorkerLimits
from swarm_client.volunteer.device_group import DeviceGroup
from swarm_client.volunteer.volunteer import Volunteer
from swarm_shared.base.errors import SwarmError
from swarm_shared.base.types import RunId
from swarm_shared.network import Bandwidth
from swarm_shared.settings.commented_toml import toml_value

TICK_SECONDS = 0.5
"""Seconds between two ticks. A returning user has the machine again within two seconds: this, and
the grace period of what is being computed (`swarm_client.volunteer.pause`)."""
MAKE_ROOM_INTERVAL_SECONDS = 30.0
"""Seconds between two attempts to make room on the disk."""

P2PD_HELD_BACK = "the preferences limit the network, and p2pd cannot be held back"

_NETWORK_REASONS = frozenset({SuspendReason.NETWORK_HOURS, SuspendReason.QUOTA_USED})
"""Reasons for which nothing is relayed for other peers either."""

log = logging.getLogger(__name__)

Report = Callable[[str], None]


@dataclass(slots=True)
class _DeviceRecord:
    """A volunteer on its device, with the governor's memory of it."""

    volunteer: Volunteer
    device: Device
    """The device as it was offered at the start, without the preferences."""
    memory: PolicyMemory = field(default_factory=PolicyMemory)
    decision: GovernorDecision = field(default_factory=lambda: GovernorDecision((), Limits()))
    own_suspension: Suspension | None = None
    """The suspension that the governor ordered."""
    reported_reasons: tuple[object, ...] = ()


class Governor:
    """Run `run` beside the volunteers."""

    def __init__(
        self,
        source: PreferenceSource,
        home: Home,
        device_group: DeviceGroup,
        bandwidth: Bandwidth,
        run: RunId,
        report: Report,
        probes: MachineProbes,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.source = source
        self._home = home
        self.device_group = device_group
        self._records = tuple(
            _DeviceRecord(volunteer, volunteer.context.options.device)
            for volunteer in device_group.volunteers
        )
        self._bandwidth = bandwidth
        self._run = run
        self._report = report
        self._probes = probes
        self._wall = wall
        self._binding = ProcessBinding(self._probes.process_tree)
        self._transfer_counts = TransferCounts(home.path)
        self._counted = self._transferred()
        self._room_made_at = -MAKE_ROOM_INTERVAL_SECONDS
        self.readings = Readings()

    # ---- queries

    @property
    def decision(self) -> GovernorDecision:
        """The first device's decision. The machine's limits are the same in all."""
        return self._records[0].decision

    def user_idle_seconds(self) -> float | None:
        """Seconds since the last input of a user, at the display or in a terminal."""
        last_seen = self._records[0].memory.at_any.last_seen
        return None if last_seen is None else max(0.0, trio.current_time() - last_seen)

    def device_decision(self, device_id: str) -> tuple[GovernorDecision, bool]:
        """The device's decision, and whether its present suspension is the governor's."""
        record = next(record for record in self._records if record.device.id == device_id)
        own_suspension = record.own_suspension
        ordered = own_suspension is not None and record.volunteer.suspended is own_suspension
        return record.decision, ordered

    # ---- the loop

    async def run(self) -> None:
        """Read the machine and apply the limits, every TICK_SECONDS, until cancelled; then give the
        cores back."""
        self._report_preferences()
        try:
            while True:
                await self.tick()
                await trio.sleep(TICK_SECONDS)
        finally:
            self._binding.release()
            self._count()
            self._transfer_counts.save()

    async def tick(self) -> None:
        """Once: load a changed file, read, decide, apply."""
        if self.source.changed():
            try:
                self.source.reload()
                self._report_preferences()
            except SwarmError as error:
                self._report(f"the preferences stay as they were: {error}")
        self._count()
        self.readings = await trio.to_thread.run_sync(self._read)
        await self._make_room()
        now = ClockReading(self._wall(), trio.current_time())
        preferences = self.source.current.preferences
        for record in self._records:
            record.decision, record.memory = decide(
                preferences, self.readings, record.memory, now, record.device.name
            )
        self._apply_machine_limits()
        active = tuple(self.device_group.active)
        for record in self._records:
            if record.volunteer in active:
                self._apply_device_limits(record)
        await trio.to_thread.run_sync(
            self._binding.apply, self.decision.limits.cores, self.decision.limits.nice
        )

    def _read(self) -> Readings:
        devices = [record.device.name for record in self._records]
        return self._probes.read(
            self.source.current.preferences, devices, dict(self._transfer_counts.bytes_by_day)
        )

    def _report_preferences(self) -> None:
        values = [
            f"{name} = {toml_value(value)}"
            for name, value, origin in self.source.current.values()
            if origin.layer != "default"
        ]
        if values:
            self._report(f"preferences: {', '.join(values)}")

    # ---- applying

    def _apply_machine_limits(self) -> None:
        limits = self.decision.limits
        self._bandwidth.up.limit(limits.upload_bytes_per_second)
        self._bandwidth.down.limit(limits.download_bytes_per_second)

    def _apply_device_limits(self, record: _DeviceRecord) -> None:
        decision, volunteer, device = record.decision, record.volunteer, record.device
        limits = decision.limits
        network_is_free = not _NETWORK_REASONS.intersection(decision.reasons)
        volunteer.limit_network(
            own_transport_only=limits.own_transport_only, for_others=network_is_free
        )
        volunteer.averager.averaging_worker.hold_back(
            P2PD_HELD_BACK if limits.own_transport_only else ""
        )
        cores = min(limits.cores or self._binding.available_cores, self._binding.available_cores)
        own_cores = max(1, cores // len(self._records))
        sharers = sum(record.device.name == device.name for record in self._records)
        vram = None if limits.vram_bytes is None else limits.vram_bytes // sharers
        threads = min(volunteer.context.options.threads, own_cores)
        volunteer.limit(WorkerLimits(limits.duty_cycle, threads, vram))
        offered = permitted_memory(
            device, self.source.current.preferences, sharers, len(self._records),
            has_display=record.memory.at_display.last_seen is not None,
        )  # fmt: skip
        if offered != volunteer.context.options.device.memory:
            volunteer.offer_memory(offered)
            why = "" if offered == device.memory else ": the preferences leave no more"
            self._report_for(record, f"a stage may take {offered}{why}")
        self._suspend_or_resume(record)

    def _suspend_or_resume(self, record: _DeviceRecord) -> None:
        volunteer, decision = record.volunteer, record.decision
        ordered = volunteer.suspended
        if ordered is not None and ordered is not record.own_suspension:
            return  # not the governor's suspension: not ended here
        reasons = decision.reasons
        if decision.reason is not None:
            if ordered is None or ordered.reason is not decision.reason:
                volunteer.suspend(decision.reason, decision.until)
                record.own_suspension = volunteer.suspended
            if reasons != record.reported_reasons:
                self._report_for(record, f"paused ({decision.reason}): {decision.sentence}")
        elif ordered is not None:
            volunteer.resume()
            record.own_suspension = None
        if not reasons and record.reported_reasons:
            self._report_for(record, "resumed: the preferences allow computing again")
        record.reported_reasons = reasons

    def _report_for(self, record: _DeviceRecord, text: str) -> None:
        several = len(self._records) > 1
        self._report(f"{record.device.id}: {text}" if several else text)

    async def _make_room(self) -> None:
        """Remove caches that can be fetched again, before the disk becomes a reason to pause."""
        preferences, readings = self.source.current.preferences, self.readings
        missing = missing_disk_bytes(
            preferences, readings.disk_free_bytes, readings.disk_used_bytes
        )
        now = trio.current_time()
        if missing <= 0 or now - self._room_made_at < MAKE_ROOM_INTERVAL_SECONDS:
            return
        self._room_made_at = now
        freed = await trio.to_thread.run_sync(make_room, self._home, self._run, missing)
        if freed:
            self._report(f"removed {freed / 1e6:.1f} MB of other runs' caches to make room")
            disk = self._probes.disk
            disk.used.forget()
            self.readings = replace(
                readings, disk_free_bytes=disk.free_bytes(), disk_used_bytes=disk.used()
            )

    # ---- bytes

    def _transferred(self) -> int:
        of_p2pd = sum(
            link.sent + link.received
            for record in self._records
            for link in record.volunteer.averager.links()
        )
        return self._bandwidth.up.bytes + self._bandwidth.down.bytes + of_p2pd

    def _count(self) -> None:
        total = self._transferred()
        # p2pd's own count restarts with each p2pd.
        self._transfer_counts.add(date.fromtimestamp(self._wall()), max(0, total - self._counted))
        self._counted = total
