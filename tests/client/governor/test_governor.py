"""The governor's shell: what it applies to the volunteer, with real probes and real files."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

from kits.waiting import until
from swarm_client.control.status_document import DaemonState, DeviceView, SuspendReason
from swarm_client.control.status_sentence import Suspension
from swarm_client.daemon.status_builder import governed_device_view, machine_view
from swarm_client.governor import device_offer
from swarm_client.governor.device_offer import PROGRAM_BYTES
from swarm_client.governor.disk_space import DiskAllowance
from swarm_client.governor.governor import P2PD_HELD_BACK, Governor
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.machine.devices import Device
from swarm_client.machine.home import Home
from swarm_client.preferences import PreferenceSource
from swarm_client.preferences.file import set_preference
from swarm_client.volunteer.context import WorkerLimits
from swarm_client.volunteer.device_group import DeviceGroup
from swarm_shared.base.errors import StorageError
from swarm_shared.base.memory import MemoryOffer
from swarm_shared.base.types import PeerId, RunId
from swarm_shared.host.memory import HostMemory
from swarm_shared.network import Bandwidth

OWN_RUN = RunId("f" * 32)
PAUSED = DeviceView(
    id="cpu",
    label="CPU",
    state=DaemonState.PAUSED,
    reason=SuspendReason.USER_ACTIVE,
    sentence="short",
)


class RecordedVolunteer:
    """In the volunteer's and the averaging worker's place: records what it is called with."""

    def __init__(self, number: int, rig: Rig) -> None:
        device = Device("cpu", "CPU", 10**9, number)
        self.context = SimpleNamespace(options=SimpleNamespace(device=device, threads=4))
        self.node = SimpleNamespace(peer_id=PeerId(f"peer{number}"))
        traffic = lambda: (SimpleNamespace(sent=rig.others, received=0),)  # noqa: E731
        self.averager = SimpleNamespace(averaging_worker=self, links=traffic)
        self.suspended: Suspension | None = None
        self.limits = WorkerLimits()
        self.network: dict[str, bool] = {}
        self.held_back = ""

    def suspend(self, reason: SuspendReason, until: float | None = None) -> None:
        self.suspended = Suspension(reason, until)

    def resume(self) -> None:
        self.suspended = None

    def limit(self, limits: WorkerLimits) -> None:
        self.limits = limits

    def limit_network(self, **said: bool) -> None:
        self.network = said

    def offer_memory(self, memory: MemoryOffer) -> None:
        self.context.options.device = self.context.options.device.offering(memory)

    @property
    def memory_bytes(self) -> int:
        return int(self.context.options.device.memory_bytes)

    def hold_back(self, reason: str) -> None:
        self.held_back = reason


class Somebody:
    """At the display, or not."""

    def __init__(self) -> None:
        self.idle: float | None = None

    def idle_seconds(self) -> float | None:
        return self.idle


class Rig:
    def __init__(self, folder: Path, text: str = "", devices: int = 1) -> None:
        self.home = Home.create(folder / "a home")
        self.path = self.home.path / "preferences.toml"
        self.path.write_text(text)
        self.volunteer, self.somebody = RecordedVolunteer(1, self), Somebody()
        self.bandwidth, self.lines = Bandwidth(), []
        self.others = 0
        self.wall = 1_795_000_000.0
        self.other_volunteers = tuple(RecordedVolunteer(n, self) for n in range(2, devices + 1))
        devices_here = DeviceGroup((self.volunteer, *self.other_volunteers))
        probes = MachineProbes(self.home.path, self.somebody, self.somebody)
        self.source = PreferenceSource(self.path, {})
        self.disk = DiskAllowance(probes.disk, self.source, self.home, OWN_RUN)
        self.governor = Governor(
            self.source, self.home, devices_here, self.bandwidth, OWN_RUN, self.lines.append,
            probes, lambda: self.wall,
        )  # fmt: skip

    async def look(self) -> SuspendReason | None:
        await self.governor.tick()
        return None if self.volunteer.suspended is None else self.volunteer.suspended.reason


async def test_without_preferences_nothing_is_held_back(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    assert await rig.look() is None
    assert rig.volunteer.limits == WorkerLimits(1.0, min(4, rig.governor._binding.available_cores))
    assert rig.volunteer.memory_bytes == 10**9
    assert rig.volunteer.network == {"own_transport_only": False, "for_others": True}
    assert rig.volunteer.held_back == ""
    assert rig.bandwidth.up.bytes_per_second is None
    assert rig.lines == []


async def test_a_program_pauses_the_volunteer_and_its_end_lets_it_continue(
    tmp_path: Path, game: subprocess.Popen[bytes]
) -> None:
    rig = Rig(tmp_path, 'exclusive_apps = ["swarm-game"]')
    assert await rig.look() is SuspendReason.EXCLUSIVE_APP
    assert await rig.look() is SuspendReason.EXCLUSIVE_APP
    game.kill()
    game.wait()
    assert await rig.look() is None
    assert rig.lines == [
        "paused (exclusive_app): swarm-game is running, and nothing may be computed beside it",
        "resumed: the preferences allow computing again",
    ]


async def test_a_change_of_the_file_holds_at_the_next_look_and_a_mistake_changes_nothing(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path)
    await rig.look()
    set_preference(rig.path, "cpu_percent", "25")
    set_preference(rig.path, "max_cores", "1")
    set_preference(rig.path, "upload_bytes_per_second", "100000")
    await rig.look()
    assert rig.volunteer.limits == WorkerLimits(0.25, 1)
    assert rig.bandwidth.up.bytes_per_second == 100_000
    assert rig.bandwidth.down.bytes_per_second is None
    assert rig.volunteer.held_back == P2PD_HELD_BACK
    assert rig.volunteer.network == {"own_transport_only": True, "for_others": True}
    assert rig.lines == [
        "preferences: max_cores = 1, cpu_percent = 25, upload_bytes_per_second = 100000"
    ]
    rig.path.write_text("cpu_percent = 1")
    await rig.look()
    assert rig.volunteer.limits.duty_cycle == 0.25
    assert "the preferences stay as they were" in rig.lines[-1]
    rig.path.unlink()
    await rig.look()
    assert rig.volunteer.limits.duty_cycle == 1.0
    assert rig.bandwidth.up.bytes_per_second is None
    assert rig.volunteer.held_back == ""


async def test_the_users_own_pause_is_theirs_to_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "run_if_user_active = false\nidle_minutes = 1")
    rig.volunteer.suspend(SuspendReason.PAUSED_BY_USER)
    assert await rig.look() is SuspendReason.PAUSED_BY_USER
    rig.somebody.idle = 0.0
    assert await rig.look() is SuspendReason.PAUSED_BY_USER
    rig.volunteer.resume()
    assert await rig.look() is SuspendReason.USER_ACTIVE
    rig.volunteer.suspend(SuspendReason.PAUSED_BY_USER, 5.0)
    assert await rig.look() is SuspendReason.PAUSED_BY_USER


async def test_a_returning_user_has_the_machine_at_the_next_look(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "run_if_user_active = false")
    rig.somebody.idle = 3600.0
    assert await rig.look() is None
    rig.somebody.idle = 0.2
    assert await rig.look() is SuspendReason.USER_ACTIVE
    assert "this machine is in use" in rig.lines[-1]


async def test_bytes_of_all_transports_count_against_the_quota_and_outlive_the_program(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, "transfer_gib = 0.01\ntransfer_days = 2")
    rig.bandwidth.up.bytes, rig.bandwidth.down.bytes, rig.others = 10**6, 2 * 10**6, 3 * 10**6
    assert await rig.look() is None
    rig.bandwidth.down.bytes += 10**7
    assert await rig.look() is SuspendReason.QUOTA_USED
    assert rig.volunteer.network["for_others"] is False
    rig.governor._transfer_counts.save()
    decision = rig.governor.decision
    assert decision.limits.quota_bytes == int(0.01 * 2**30)
    assert decision.quota_used_bytes == 16 * 10**6

    again = Rig(tmp_path, "transfer_gib = 0.01\ntransfer_days = 2")
    assert await again.look() is SuspendReason.QUOTA_USED
    again.wall += 2 * 86_400
    assert await again.look() is None


async def test_a_download_that_does_not_fit_is_refused_after_other_caches_are_gone(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, "disk_gib = 0.01")
    other = rig.home.data_folder(RunId("0" * 32))
    other.mkdir(parents=True)
    (other / "train.tokens").write_bytes(bytes(5 * 10**6))
    await rig.look()
    rig.disk.claim(4 * 10**6)
    assert (other / "train.tokens").exists()
    rig.disk.claim(8 * 10**6)
    assert not other.exists()
    with pytest.raises(StorageError, match="disk_gib"):
        rig.disk.claim(2 * 10**7)


async def test_a_disk_that_is_used_up_pauses_only_when_no_cache_is_left(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "disk_gib = 0.01")
    other, own = (rig.home.data_folder(run) for run in (RunId("0" * 32), OWN_RUN))
    for folder, size in ((other, 8 * 10**6), (own, 5 * 10**6)):
        folder.mkdir(parents=True)
        (folder / "train.tokens").write_bytes(bytes(size))
    assert await rig.look() is None
    assert not other.exists()
    assert "removed 8.0 MB" in rig.lines[-1]
    (own / "more.tokens").write_bytes(bytes(10**7))
    rig.governor._probes.disk.used.forget()
    assert await rig.look() is SuspendReason.DISK_FULL


async def test_the_status_tells_what_the_probes_read_and_why_nothing_is_computed(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, "run_if_user_active = false\ncpu_percent = 50")
    rig.somebody.idle = 12.0
    assert await rig.look() is SuspendReason.USER_ACTIVE
    view = governed_device_view(PAUSED, rig.governor)
    assert view.sentence.startswith("paused: this machine is in use; continues after")
    assert view.until == pytest.approx(rig.wall + 168, abs=2)
    assert view.duty_cycle == 0.5
    machine = machine_view(rig.governor.readings, rig.governor.user_idle_seconds())
    assert machine.memory_total_bytes > 0
    assert machine.user_idle_seconds == pytest.approx(12, abs=5)
    rig.volunteer.suspend(SuspendReason.PAUSED_BY_USER)
    assert governed_device_view(PAUSED, rig.governor).sentence == "short"


async def test_what_is_the_machines_is_shared_by_its_devices(tmp_path: Path) -> None:
    text = "max_cores = 2\nupload_bytes_per_second = 100000\nmemory_percent_idle = 12"
    rig = Rig(tmp_path, text, devices=2)
    assert await rig.look() is None
    one, other = rig.volunteer, rig.other_volunteers[0]
    cores = min(2, rig.governor._binding.available_cores)
    assert one.limits == other.limits == WorkerLimits(1.0, max(1, cores // 2))
    total = rig.governor.readings.memory_total_bytes
    permitted = int(total * 12 / 100) // 2 - PROGRAM_BYTES
    assert one.memory_bytes == other.memory_bytes == min(10**9, max(0, permitted))
    assert rig.bandwidth.up.bytes_per_second == 100_000


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no processes")
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one core leaves no choice")
async def test_the_process_has_its_cores_back_when_the_governor_ends(tmp_path: Path) -> None:
    free = os.sched_getaffinity(0)
    rig = Rig(tmp_path, "max_cores = 1")
    await rig.look()
    assert len(os.sched_getaffinity(0)) == 1
    with trio.CancelScope() as scope:
        scope.cancel()
        await rig.governor.run()
    assert os.sched_getaffinity(0) == free


async def test_what_the_preferences_leave_a_stage_is_said_once_and_when_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HostMemory(2**31, 2**31)
    monkeypatch.setattr(device_offer, "host_memory", lambda: memory)
    rig = Rig(tmp_path, "memory_percent_idle = 50\nmemory_percent_busy = 45")
    rig.somebody.idle = 10_000.0  # a display is there
    for _ in range(2):
        await rig.look()
    memory = HostMemory(2**40, 2**40)
    await rig.look()
    assert [line for line in rig.lines if "a stage may take" in line] == [
        "a stage may take 25.6 MiB of memory: the preferences leave no more",
        "a stage may take 954 MiB of memory",
    ]


async def test_both_devices_are_paused_and_a_users_own_pause_of_one_is_left_alone(
    tmp_path: Path,
) -> None:
    rig = Rig(tmp_path, "run_if_user_active = false", devices=2)
    other = rig.other_volunteers[0]
    other.suspend(SuspendReason.PAUSED_BY_USER)
    rig.somebody.idle = 1.0
    assert await rig.look() is SuspendReason.USER_ACTIVE
    assert other.suspended == Suspension(SuspendReason.PAUSED_BY_USER)
    assert [line.partition(":")[0] for line in rig.lines] == ["cpu"]
    other.resume()
    await rig.look()
    assert other.suspended is not None
    assert other.suspended.reason is SuspendReason.USER_ACTIVE
    views = (PAUSED, PAUSED.model_copy(update={"id": "cpu#2"}))
    sentences = {governed_device_view(view, rig.governor).sentence for view in views}
    [sentence] = sentences
    assert sentence.startswith("paused: this machine is in use")


async def test_a_device_that_takes_part_no_more_is_left_alone(tmp_path: Path) -> None:
    rig = Rig(tmp_path, "run_if_user_active = false", devices=2)
    rig.governor.device_group.ended.add(rig.other_volunteers[0].node.peer_id)
    rig.somebody.idle = 1.0
    assert await rig.look() is SuspendReason.USER_ACTIVE
    assert rig.other_volunteers[0].suspended is None


async def test_the_loop_ends_with_the_ledger_on_the_disk(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(rig.governor.run)
        await until(lambda: rig.volunteer.network)
        rig.bandwidth.up.bytes += 1234
        nursery.cancel_scope.cancel()
    assert "1234" in (rig.home.path / "transfer.json").read_text()
