"""The governor's shell: read, decide for each device, carry out, twice a second.

Owns the loop, what was remembered between two looks, and the telling. Whether to compute and how
much is `policy`'s; what is read is `probes`'. The volunteers are told to suspend and to resume; a
pause that somebody else has ordered (their user) is never ended here. What is the machine's (cores,
memory, bandwidth, quota, disk) is shared by its devices.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Protocol

import trio

from swarm_client.control.status_document import (
    DeviceView,
    MachineView,
    Status,
    SuspendReason,
    TrafficView,
)
from swarm_client.control.status_sentence import together
from swarm_client.control.suspension import Suspendable, Suspension
from swarm_client.governor.device_offer import most_memory
from swarm_client.governor.disk_space import make_room, missing_bytes
from swarm_client.governor.policy import GIB, Limits, Memory, Moment, Verdict, decide, gpu_index
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.governor.probes.readings import Readings
from swarm_client.governor.process_limits import ProcessBinding
from swarm_client.governor.transfer_quota import TransferLedger
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.preferences import PreferenceSource
from swarm_client.preferences.file import spell
from swarm_client.volunteer.stage_manager import WorkerLimits
from swarm_shared.base.errors import StorageError, SwarmError
from swarm_shared.base.types import RunId
from swarm_shared.network import Bandwidth

LOOK_SECONDS = 0.5
"""Somebody who comes back to the machine has it again within two seconds: this, and the grace that
is given to what is being computed (`suspension`)."""
ROOM_SECONDS = 30.0
"""Between two attempts to make room on the disk."""

P2PD_HELD_BACK = "the preferences limit the network, and p2pd cannot be held back"

_NETWORK_REASONS = frozenset({SuspendReason.NETWORK_HOURS, SuspendReason.QUOTA_USED})
"""With these, nothing is carried for others either."""

log = logging.getLogger(__name__)

Report = Callable[[str], None]


class Governed(Suspendable, Protocol):
    """The volunteer."""

    disk_guard: Callable[[int], None]

    def limit(self, limits: WorkerLimits) -> None: ...

    def limit_network(self, *, own_transport_only: bool, for_others: bool) -> None: ...

    def offer_memory(self, memory_bytes: int) -> None: ...


class HoldsBack(Protocol):
    """The averaging worker, with its p2pd."""

    def hold_back(self, reason: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Subject:
    """A volunteer on its device."""

    volunteer: Governed
    averaging: HoldsBack
    other_bytes: Callable[[], int]
    """Carried since the start by others than the machine's `Bandwidth` (p2pd)."""
    device: Device
    """As it was offered at the start, without the preferences."""
    threads: int
    works: Callable[[], bool] = lambda: True
    """Whether it still takes part: one that does not is told nothing."""


@dataclass(slots=True)
class _Charge:
    """A subject, and what there is to remember of it."""

    subject: Subject
    memory: Memory = field(default_factory=Memory)
    verdict: Verdict = field(default_factory=lambda: Verdict((), Limits()))
    mine: Suspension | None = None
    """The pause that was ordered here."""
    told: tuple[object, ...] = ()


class Governor:
    """Run `run` beside the volunteers, of which there is at least one."""

    def __init__(
        self,
        source: PreferenceSource,
        home: Home,
        subjects: Sequence[Subject],
        bandwidth: Bandwidth,
        run: RunId | None,
        report: Report,
        probes: MachineProbes | None = None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.source = source
        self._home = home
        self._charges = tuple(_Charge(subject) for subject in subjects)
        self._bandwidth = bandwidth
        self._run = run
        self._report = report
        self._probes = probes or MachineProbes(home.path)
        self._wall = wall
        self._binding = ProcessBinding(self._probes.family)
        self._ledger = TransferLedger(home.path)
        self._counted = self._transferred()
        self._room_made_at = -ROOM_SECONDS
        self.readings = Readings()
        for subject in subjects:
            subject.volunteer.disk_guard = self.claim_disk

    # ---- what others ask

    @property
    def verdict(self) -> Verdict:
        """Of the first device. Those of the machine's limits are the same for all."""
        return self._charges[0].verdict

    def machine(self) -> MachineView:
        readings = self.readings
        seen = self._charges[0].memory.at_any.last_seen
        return MachineView(
            cpu_share=readings.cpu_share,
            own_cpu_share=readings.own_cpu_share,
            memory_total_bytes=readings.memory_total_bytes or 0,
            memory_available_bytes=readings.memory_available_bytes or 0,
            own_memory_bytes=readings.own_memory_bytes or 0,
            on_batteries=readings.on_batteries,
            user_idle_seconds=None if seen is None else max(0.0, trio.current_time() - seen),
            disk_free_bytes=readings.disk_free_bytes or 0,
            disk_used_bytes=readings.disk_used_bytes or 0,
        )

    def device(self, view: DeviceView) -> DeviceView:
        """The view with what the probes know of the device, and our words for our own pause."""
        charge = next((one for one in self._charges if one.subject.device.id == view.id), None)
        if charge is None:
            return view
        verdict = charge.verdict
        index = gpu_index(charge.subject.device.name)
        known: dict[str, object] = {"duty_cycle": verdict.limits.duty_cycle}
        mine = charge.mine is not None and charge.subject.volunteer.suspended is charge.mine
        if mine and view.reason is verdict.reason:
            known |= {"sentence": f"paused: {verdict.sentence}", "until": verdict.until}
        if index is None:
            known |= {
                "utilization": self.readings.own_cpu_share,
                "memory_used_bytes": self.readings.own_memory_bytes,
            }
        elif (gpu := self.readings.gpu(index)) is not None:
            known |= {
                "utilization": gpu.utilization,
                "memory_used_bytes": gpu.memory_used_bytes,
                "temperature_celsius": gpu.temperature_celsius,
            }
        return view.model_copy(update=known)

    def traffic(self, view: TrafficView) -> TrafficView:
        limits, used = self.verdict.limits, self.verdict.quota_used_bytes
        known = {"quota_bytes": limits.quota_bytes, "quota_used_bytes": used}
        return view.model_copy(update=known)

    def completed(self, status: Status) -> Status:
        """The status with what the probes know, and with our words for our own pauses."""
        devices = tuple(self.device(view) for view in status.devices)
        known: dict[str, object] = {
            "machine": self.machine(),
            "devices": devices,
            "traffic": self.traffic(status.traffic),
        }
        if devices:
            saying = together(devices)
            known |= {"sentence": saying.sentence, "until": saying.until}
        return status.model_copy(update=known)

    def claim_disk(self, size_bytes: int) -> None:
        """StorageError when so much more would pass what the preferences allow."""
        disk, preferences = self._probes.disk, self.source.current.preferences
        disk.used.forget()
        free, used = disk.free_bytes(), disk.used()
        missing = missing_bytes(preferences, free, used, size_bytes)
        if missing > 0:
            missing -= make_room(self._home, self._run, missing)
        if missing > 0:
            raise StorageError(
                f"{size_bytes / GIB:.2f} GiB are to be downloaded, {missing / GIB:.2f} GiB more "
                "than disk_gib and disk_leave_free_gib leave for it; make room, or change one of "
                "them with `swarm-client config set`"
            )

    def reload(self) -> None:
        """Take the file up now. ConfigurationError and the like when it cannot be."""
        self.source.reload()

    # ---- the loop

    async def run(self) -> None:
        self._report_preferences()
        try:
            while True:
                await self.look()
                await trio.sleep(LOOK_SECONDS)
        finally:
            self._count()
            self._ledger.save()

    async def look(self) -> None:
        """Once: take up a changed file, read, decide, carry out."""
        if self.source.changed():
            try:
                self.source.reload()
                self._report_preferences()
            except SwarmError as error:
                self._report(f"the preferences are kept as they were: {error}")
        self._count()
        self.readings = await trio.to_thread.run_sync(self._read)
        await self._make_room()
        now = Moment(self._wall(), trio.current_time())
        preferences = self.source.current.preferences
        for charge in self._charges:
            charge.verdict, charge.memory = decide(
                preferences, self.readings, charge.memory, now, charge.subject.device.name
            )
        self._carry_out_together()
        for charge in self._charges:
            if charge.subject.works():
                self._carry_out(charge)
        await trio.to_thread.run_sync(
            self._binding.apply, self.verdict.limits.cores, self.verdict.limits.nice
        )

    def _read(self) -> Readings:
        devices = [charge.subject.device.name for charge in self._charges]
        return self._probes.read(
            self.source.current.preferences, devices, self._ledger.bytes_by_day
        )

    def _report_preferences(self) -> None:
        said = [
            f"{name} = {spell(value)}"
            for name, value, origin in self.source.current.values()
            if origin.layer != "default"
        ]
        if said:
            self._report(f"preferences: {', '.join(said)}")

    # ---- carrying out

    def _carry_out_together(self) -> None:
        limits = self.verdict.limits
        self._bandwidth.up.limit(limits.upload_bytes_per_second)
        self._bandwidth.down.limit(limits.download_bytes_per_second)

    def _carry_out(self, charge: _Charge) -> None:
        verdict, subject = charge.verdict, charge.subject
        limits = verdict.limits
        network_is_free = not _NETWORK_REASONS.intersection(verdict.reasons)
        subject.volunteer.limit_network(
            own_transport_only=limits.own_transport_only, for_others=network_is_free
        )
        subject.averaging.hold_back(P2PD_HELD_BACK if limits.own_transport_only else "")
        cores = min(limits.cores or self._binding.available_cores, self._binding.available_cores)
        own_cores = max(1, cores // len(self._charges))
        sharers = sum(one.subject.device.name == subject.device.name for one in self._charges)
        vram = None if limits.vram_bytes is None else limits.vram_bytes // sharers
        subject.volunteer.limit(
            WorkerLimits(limits.duty_cycle, min(subject.threads, own_cores), vram)
        )
        most = most_memory(
            subject.device.name, self.source.current.preferences,
            has_display=charge.memory.at_display.last_seen is not None,
        )  # fmt: skip
        memory_bytes = subject.device.memory_bytes
        offered = memory_bytes if most is None else min(most // sharers, memory_bytes)
        subject.volunteer.offer_memory(offered)
        self._suspend_or_resume(charge)

    def _suspend_or_resume(self, charge: _Charge) -> None:
        volunteer, verdict = charge.subject.volunteer, charge.verdict
        ordered = volunteer.suspended
        if ordered is not None and ordered is not charge.mine:
            return  # somebody else's pause: theirs to end
        told = verdict.reasons
        if verdict.reason is not None:
            if ordered is None or ordered.reason is not verdict.reason:
                volunteer.suspend(verdict.reason, verdict.until)
                charge.mine = volunteer.suspended
            if told != charge.told:
                self._tell(charge, f"paused ({verdict.reason}): {verdict.sentence}")
        elif ordered is not None:
            volunteer.resume()
            charge.mine = None
        if not told and charge.told:
            self._tell(charge, "going on: nothing in the preferences stands against it any more")
        charge.told = told

    def _tell(self, charge: _Charge, text: str) -> None:
        several = len(self._charges) > 1
        self._report(f"{charge.subject.device.id}: {text}" if several else text)

    async def _make_room(self) -> None:
        """Before the disk is a reason to pause: what can be fetched again goes."""
        preferences, readings = self.source.current.preferences, self.readings
        missing = missing_bytes(preferences, readings.disk_free_bytes, readings.disk_used_bytes)
        now = trio.current_time()
        if missing <= 0 or now - self._room_made_at < ROOM_SECONDS:
            return
        self._room_made_at = now
        freed = await trio.to_thread.run_sync(make_room, self._home, self._run, missing)
        if freed:
            self._report(f"removed {freed / 1e6:.1f} MB of caches of other runs to make room")
            disk = self._probes.disk
            disk.used.forget()
            self.readings = replace(
                readings, disk_free_bytes=disk.free_bytes(), disk_used_bytes=disk.used()
            )

    # ---- bytes

    def _transferred(self) -> int:
        others = sum(charge.subject.other_bytes() for charge in self._charges)
        return self._bandwidth.up.bytes + self._bandwidth.down.bytes + others

    def _count(self) -> None:
        total = self._transferred()
        # p2pd's own count begins anew with each p2pd.
        self._ledger.add(date.fromtimestamp(self._wall()), max(0, total - self._counted))
        self._counted = total
