"""Limits that bind: cores and priority of real processes, rests, the ledger, the disk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import date, timedelta
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.clock import Clock
from kits.memory import offers
from swarm_client.governor import device_offer
from swarm_client.governor.device_offer import permitted_memory, usable_devices
from swarm_client.governor.disk_space import data_budget_bytes, make_room, missing_disk_bytes
from swarm_client.governor.policy import GIB
from swarm_client.governor.probes.machine import PROCESS_TREE_SECONDS, ProcessTree
from swarm_client.governor.process_limits import ProcessBinding, chosen_cores, threads
from swarm_client.governor.transfer_quota import SAVE_SECONDS, TransferCounts
from swarm_client.machine.devices import (
    Device,
    ListedAccelerator,
    choose_device,
    choose_devices,
)
from swarm_client.machine.home import Home
from swarm_client.preferences import Preferences
from swarm_client.stage.worker.duty_cycle import MAX_REST_FACTOR, DutyCycle
from swarm_shared.base.errors import CapacityError, SwarmError, UsageError
from swarm_shared.base.types import RunId
from swarm_shared.host.memory import HostMemory

TODAY = date(2026, 11, 21)


def prefer(**said: object) -> Preferences:
    return Preferences.model_validate(said)


# ---------------------------------------------------------------- cores and priority

PROGRAM = """
import subprocess, sys, threading
from swarm_client.governor.process_limits import ProcessBinding
from swarm_client.governor.probes.machine import ProcessTree
process_tree = ProcessTree()
binding = ProcessBinding(process_tree)
stop = threading.Event()
threading.Thread(target=stop.wait).start()
waits = "import threading as t; e = t.Event(); t.Thread(target=e.wait).start();"
waits += "print(1, flush=True); input(); e.set()"
def start():
    child = subprocess.Popen([sys.executable, "-c", waits], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE)
    child.stdout.readline()
    return child
children = [start()]
for line in sys.stdin:
    words = line.split()
    if words[0] == "start":
        children.append(start())
    if words[0] == "apply":
        process_tree.refresh()
        binding.apply(int(words[1]) or None, int(words[2]))
    if words[0] == "release":
        binding.release()
    print(*[child.pid for child in children], flush=True)
stop.set()
for child in children:
    child.communicate(b"\\n")
"""


class Program:
    """A process with a thread and children that have one, which binds itself and them."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def say(self, line: str) -> list[int]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        return [int(word) for word in self.process.stdout.readline().split()]


@pytest.fixture
def program() -> Iterator[Program]:
    made = Program()
    yield made
    assert made.process.stdin is not None
    made.process.stdin.close()
    made.process.wait(20)


def cores_of(pid: int) -> set[frozenset[int]]:
    """Of each of its threads."""
    return {frozenset(os.sched_getaffinity(thread)) for thread in threads(pid)}


def nice_of(pid: int) -> set[int]:
    return {os.getpriority(os.PRIO_PROCESS, thread) for thread in threads(pid)}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no processes")
@pytest.mark.skipif((psutil.cpu_count() or 1) < 2, reason="one core leaves no choice")
def test_every_thread_of_every_process_is_bound_and_those_started_later_too(
    program: Program,
) -> None:
    free = frozenset(os.sched_getaffinity(0))
    one = frozenset({max(free)})
    (child,) = program.say("apply 1 0")
    assert len(threads(child)) > 1
    assert cores_of(child) == cores_of(program.process.pid) == {one}
    _, later = program.say("start")
    assert cores_of(later) == {one}
    program.say("apply 0 0")
    for pid in (child, later, program.process.pid):
        assert cores_of(pid) == {free}


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system binds no processes")
@pytest.mark.skipif((psutil.cpu_count() or 1) < 2, reason="one core leaves no choice")
def test_the_daemon_has_its_cores_back_when_a_participation_has_ended(program: Program) -> None:
    free = frozenset(os.sched_getaffinity(0))
    program.say("apply 1 0")
    assert cores_of(program.process.pid) != {free}
    program.say("release")
    assert cores_of(program.process.pid) == {free}


def test_children_give_way_and_the_daemon_itself_does_not(program: Program) -> None:
    before = nice_of(program.process.pid)
    (child,) = program.say("apply 0 12")
    assert nice_of(child) == {12}
    assert nice_of(program.process.pid) == before
    program.say("apply 0 15")
    assert nice_of(child) == {15}


def test_without_a_preference_nothing_is_bound() -> None:
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else None
    binding = ProcessBinding(ProcessTree())
    binding.apply(None, 0)
    if cores is not None:
        assert os.sched_getaffinity(0) == cores
    assert binding.available_cores >= 1


def test_the_last_cores_are_chosen_and_never_none() -> None:
    free = frozenset({2, 4, 6, 8})
    assert chosen_cores(free, 2) == {6, 8}
    assert chosen_cores(free, 9) == chosen_cores(free, None) == free
    assert chosen_cores(None, 2) is None
    assert PROCESS_TREE_SECONDS > 0


# ---------------------------------------------------------------- rests


@given(
    st.lists(st.tuples(st.floats(0.001, 2), st.booleans()), min_size=1, max_size=60),
    st.floats(0.05, 1),
)  # fmt: skip
def test_a_duty_cycle_rests_its_share_and_never_long_at_once(
    work: list[tuple[float, bool]], share: float
) -> None:
    time = Clock()
    duty = DutyCycle(time)
    duty.change(share)
    begun, busy = time.now, 0.0
    for seconds, is_computation in work:
        busy += seconds
        time.now += seconds
        if not is_computation:
            duty.add_work(seconds)
            continue
        duty.computed(seconds)
        rest = duty.rest_seconds()
        assert rest <= MAX_REST_FACTOR * seconds * (1 / share - 1) + 1e-9
        time.now += rest
    # What other work owes is paid as computations follow: nothing more than its due is rested.
    assert busy <= (time.now - begun) * 1.000001
    assert time.now - begun <= busy / share + 1e-6
    for _ in range(2000):
        time.now += 1.0
        duty.computed(1.0)
        time.now += duty.rest_seconds()
        busy += 1.0
    assert busy / (time.now - begun) == pytest.approx(share, rel=0.02)


def test_another_share_holds_at_once_and_forgives_the_rest() -> None:
    time = Clock()
    duty = DutyCycle(time)
    duty.change(0.1)
    duty.computed(1.0)
    assert duty.rest_seconds() == pytest.approx(9.0)
    assert duty.effective_seconds(1.0) == pytest.approx(10.0)
    duty.change(1.0)
    assert duty.rest_seconds() == 0.0
    duty.computed(1.0)
    assert duty.rest_seconds() == 0.0


# ---------------------------------------------------------------- the ledger


def test_what_was_transferred_outlives_the_program(tmp_path: Path) -> None:
    time = Clock()
    ledger = TransferCounts(tmp_path, time)
    ledger.add(TODAY, 100)
    ledger.add(TODAY, 50)
    assert not ledger.path.exists()
    time.now += SAVE_SECONDS
    ledger.add(date(2026, 11, 22), 7)
    again = TransferCounts(tmp_path, time)
    assert again.bytes_by_day == {TODAY: 150, TODAY + timedelta(days=1): 7}
    again.add(TODAY, 1)
    again.save()
    assert TransferCounts(tmp_path, time).bytes_by_day[TODAY] == 151


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"version": 2, "days": {}}', '{"version": 1, "days": {"today": 3}}',
     '{"version": 1, "days": {"2026-11-21": -3}}', '{"version": 1, "days": {"2026-11-21": "x"}}'],
)  # fmt: skip
def test_a_damaged_ledger_is_begun_anew(tmp_path: Path, content: str) -> None:
    (tmp_path / "transfer.json").write_text(content)
    ledger = TransferCounts(tmp_path)
    assert ledger.bytes_by_day == {}
    ledger.add(TODAY, 5)
    ledger.save()
    assert json.loads(ledger.path.read_text())["days"] == {"2026-11-21": 5}


def test_a_full_disk_stops_no_counting(tmp_path: Path, files_no_larger_than) -> None:
    ledger = TransferCounts(tmp_path)
    ledger.add(TODAY, 5)
    with files_no_larger_than(3):
        ledger.save()
    ledger.add(TODAY, 5)
    ledger.save()
    assert TransferCounts(tmp_path).bytes_by_day == {TODAY: 10}


# ---------------------------------------------------------------- the disk


def cache(home: Home, run: str, size: int, used_at: float) -> None:
    folder = home.data_folder(RunId(run))
    folder.mkdir(parents=True)
    (folder / "train.tokens").write_bytes(bytes(size))
    os.utime(folder, (used_at, used_at))


def test_caches_of_other_runs_go_first_the_longest_unused_first(tmp_path: Path) -> None:
    home = Home.create(tmp_path)
    for run, used_at in (("aaaa", 300.0), ("bbbb", 100.0), ("cccc", 200.0)):
        cache(home, run, 1000, used_at)
    (tmp_path / "identity.key").write_bytes(b"secret")
    assert make_room(home, RunId("aaaa"), 500) == 1000
    left = sorted(path.parent.parent.name for path in tmp_path.rglob("*.tokens"))
    assert left == ["aaaa", "cccc"]
    assert make_room(home, RunId("aaaa"), 10**6) == 1000
    assert make_room(home, RunId("aaaa"), 10**6) == 0
    assert home.data_folder(RunId("aaaa")).exists()
    assert (tmp_path / "identity.key").exists()


def test_tensors_of_audits_that_a_crash_left_in_another_run_make_room(tmp_path: Path) -> None:
    home = Home.create(tmp_path)
    folder = home.audit_folder(RunId("bbbb"))
    folder.mkdir(parents=True)
    (folder / "audit-1-inputs").write_bytes(bytes(1000))
    assert make_room(home, RunId("aaaa"), 500) == 1000


def test_what_may_be_written_is_what_both_preferences_leave() -> None:
    said = prefer(disk_gib=10, disk_leave_free_gib=2)
    assert missing_disk_bytes(said, 50 * GIB, 4 * GIB, 6 * GIB) <= 0
    assert missing_disk_bytes(said, 50 * GIB, 4 * GIB, 7 * GIB) == GIB
    assert missing_disk_bytes(said, 5 * GIB, 0, 4 * GIB) == GIB
    assert missing_disk_bytes(prefer(disk_leave_free_gib=0), 0, 10**15, 10**15) <= 0
    assert missing_disk_bytes(said, None, None, 10**15) <= 0


def test_training_data_takes_no_more_than_its_limit_and_half_of_the_disk_that_is_allowed() -> None:
    assert data_budget_bytes(prefer()) == 2 * GIB
    assert data_budget_bytes(prefer(data_gib=0)) == 0
    assert data_budget_bytes(prefer(data_gib=3, disk_gib=10)) == 3 * GIB
    assert data_budget_bytes(prefer(data_gib=8, disk_gib=10)) == 5 * GIB
    assert data_budget_bytes(prefer(data_gib=0, disk_gib=10)) == 0


# ---------------------------------------------------------------- what is offered

GPUS = [
    ListedAccelerator("cuda:0", "first", 10 * GIB),
    ListedAccelerator("cuda:1", "second", 20 * GIB),
]


def names(wanted: str, preferences: Preferences) -> list[str]:
    return [device.name for device in usable_devices(wanted, None, preferences, GPUS)]


def test_all_gpus_are_taken_and_those_that_are_not_to_be_used_passed_over() -> None:
    said = prefer(gpu={"0": {"use": False}})
    assert names("auto", said) == ["cuda:1"]
    assert names("auto", Preferences()) == ["cuda:0", "cuda:1"]
    assert names("auto", prefer(gpu={"all": {"use": False}})) == ["cpu"]
    assert names("cuda:0", said) == ["cuda:0"]
    assert names("cuda:1, cpu", said) == ["cuda:1", "cpu"]


def test_a_device_that_is_named_twice_is_shared_with_its_memory() -> None:
    first, alone, second = choose_devices("cuda:0,cuda:1,cuda:0", None, GPUS)
    whole = choose_device("cuda:0", None, GPUS).memory_bytes
    assert (first.id, second.id, alone.id) == ("cuda:0", "cuda:0#2", "cuda:1")
    assert first.memory_bytes == second.memory_bytes == whole // 2
    assert alone.memory_bytes == choose_device("cuda:1", None, GPUS).memory_bytes
    assert first.host_bytes == second.host_bytes == alone.host_bytes
    in_host = choose_device("cuda:1", None, GPUS).host_bytes
    # What is free in the host may change between the two calls.
    assert in_host is not None
    assert in_host // 6 < (alone.host_bytes or 0) < in_host // 2
    assert second.label == "first (2 of 2)"
    assert [d.memory_bytes for d in choose_devices("cpu,cpu", 100, [])] == [50, 50]


def test_the_host_s_memory_is_shared_evenly_although_what_is_free_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    free = iter((900, 600, 700))
    monkeypatch.setattr("swarm_client.machine.devices._host_bytes", lambda: next(free))
    shared = choose_devices("cuda:0,cuda:1,cuda:0", None, GPUS)
    assert [device.host_bytes for device in shared] == [200, 200, 200]


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        ("auto,cpu", UsageError),
        ("cpu,", UsageError),
        ("cpu,tpu", UsageError),
        ("cuda:0,cuda:2", CapacityError),
        (",".join(["cpu"] * 65), UsageError),
    ],
)
def test_devices_that_cannot_be_are_refused(wanted: str, error: type[SwarmError]) -> None:
    with pytest.raises(error):
        choose_devices(wanted, None, GPUS)


def test_a_device_in_the_hosts_memory_shares_it_with_the_processor() -> None:
    apple = [ListedAccelerator("mps:0", "Apple GPU", 10 * GIB, has_own_memory=False)]
    (alone,) = choose_devices("mps", None, apple)
    assert (alone.name, alone.host_bytes) == ("mps:0", None)
    beside, processor = choose_devices("mps:0,cpu", 4 * GIB, apple)
    assert (beside.memory_bytes, processor.memory_bytes) == (2 * GIB, 2 * GIB)
    assert (beside.id, processor.id) == ("mps:0", "cpu")


def test_a_stage_must_fit_what_is_allowed_while_the_machine_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    total = 24 * GIB
    monkeypatch.setattr(device_offer, "host_memory", lambda: HostMemory(total, total))
    said = prefer(memory_percent_busy=20, memory_percent_idle=60, gpu={"1": {"vram_gib": 6}})
    cpu = Device("cpu", "CPU", 10 * total)

    def stage(share: float, sharers: int = 1) -> int:
        return int(total * share) // sharers - device_offer.PROGRAM_BYTES

    assert permitted_memory(cpu, said, 1, 1, has_display=True) == offers(stage(0.2))
    assert permitted_memory(cpu, said, 2, 2, has_display=False) == offers(stage(0.6, 2))
    yields = said.model_copy(update={"run_if_user_active": False})
    assert permitted_memory(cpu, yields, 1, 1, has_display=True) == offers(stage(0.6))
    none = prefer(memory_percent_idle=1)
    assert permitted_memory(cpu, none, 1, 1, has_display=False) == offers(0)
    first, second = (Device(f"cuda:{i}", "GPU", 8 * GIB, host_bytes=10 * total) for i in range(2))
    limited = permitted_memory(second, said, 1, 2, has_display=True)
    assert (limited.device_bytes, limited.host_bytes) == (6 * GIB, stage(0.2, 2))
    assert permitted_memory(first, said, 1, 2, has_display=True).device_bytes == 8 * GIB
