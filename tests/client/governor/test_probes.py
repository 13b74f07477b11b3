"""Probes, on what this machine has and against small stand-ins for what it lacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from client.governor.conftest import started_copy_of_sleep
from kits.clock import Clock
from swarm_client.governor.probes.all import MachineProbes
from swarm_client.governor.probes.amd_gpus import AmdSmiGpus
from swarm_client.governor.probes.apps import AppProbe
from swarm_client.governor.probes.gpus import NvmlGpus
from swarm_client.governor.probes.idle import (
    FirstAvailable,
    MacIdle,
    TerminalIdle,
    run_command,
)
from swarm_client.governor.probes.machine import (
    PROCESS_TREE_SECONDS,
    CpuProbe,
    DiskProbe,
    ProcessTree,
    folder_bytes,
)
from swarm_client.governor.probes.readings import GpuReading
from swarm_client.governor.probes.x11 import (
    ANSWER_SECONDS,
    X11Idle,
    display_number,
    find_cookie,
)
from swarm_client.preferences import Preferences
from swarm_shared.base.clock import monotonic
from swarm_shared.host.memory import host_memory

# ---------------------------------------------------------------- programs


def test_a_program_is_seen_from_its_start_to_its_end(game: subprocess.Popen[bytes]) -> None:
    time = Clock()
    probe = AppProbe(time)
    wanted = ["swarm-game.EXE", "no such program"]
    assert probe.running(wanted) == {"swarm-game.EXE"}
    game.kill()
    game.wait()
    time.now += 1
    assert probe.running(wanted) == frozenset()
    assert probe.running([]) == frozenset()


def test_a_long_name_is_known_in_full(tmp_path: Path) -> None:
    program = tmp_path / "a-name-that-is-longer-than-linux-keeps"
    with started_copy_of_sleep(program):
        found = AppProbe(Clock()).running([program.name, program.name[:15]])
    assert found == {program.name}


def test_a_process_that_becomes_another_program_is_seen(tmp_path: Path) -> None:
    program = tmp_path / "becomes-it"
    shutil.copy(shutil.which("sleep") or "/bin/sleep", program)
    time = Clock()
    probe = AppProbe(time)
    probe.running(["becomes-it"])
    time.now += 1
    shell = ["/bin/sh", "-c", f'echo ready; read line; exec "{program}" 600']
    with subprocess.Popen(shell, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert probe.running(["becomes-it"]) == frozenset()
        process.stdin.write(b"\n")
        process.stdin.flush()
        while psutil.Process(process.pid).name() != "becomes-it":
            os.sched_yield()
        time.now += 1
        assert probe.running(["becomes-it"]) == {"becomes-it"}
        process.kill()


# ---------------------------------------------------------------- what is used


def test_what_children_compute_counts_as_this_programs_own() -> None:
    time = Clock()
    probe = CpuProbe(ProcessTree(clock=time))
    assert probe.shares() == (None, None)
    busy = [sys.executable, "-c", "print(1, flush=True)\nwhile True: pass"]
    with subprocess.Popen(busy, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.now += PROCESS_TREE_SECONDS
        before, began = psutil.Process(child.pid).cpu_times().user, monotonic()
        probe.shares()
        while psutil.Process(child.pid).cpu_times().user < before + 0.3:
            pass
        share, own = probe.shares()
        seconds = monotonic() - began
        child.kill()
    assert share is not None
    assert own is not None
    # The child's three tenths of a second, and this process's waiting, of all cores' seconds.
    assert own >= 0.3 / seconds / (psutil.cpu_count() or 1) * 0.9
    assert 0 < share <= 1


def test_memory_is_that_of_all_own_processes_and_shared_memory_counts_once() -> None:
    time = Clock()
    tree = ProcessTree(clock=time)
    before = tree.memory_bytes()
    hold = [sys.executable, "-c", "x = bytearray(10**8); print(1, flush=True); input()"]
    with subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        time.now += 10
        after = tree.memory_bytes()
        child.kill()
    assert 10**8 <= after - before <= 2 * 10**8


def test_a_folder_counts_with_all_that_lies_in_it(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(100_000))
    (tmp_path / "another").write_bytes(bytes(50))
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "file")
    assert 100_050 <= folder_bytes(tmp_path) < 101_000
    time = Clock()
    probe = DiskProbe(tmp_path, time)
    assert probe.used() == folder_bytes(tmp_path)
    free = probe.free_bytes()
    assert free is not None
    assert free > 0
    assert DiskProbe(tmp_path / "none", time).free_bytes() is None


def test_everything_is_read_together_and_what_is_not_there_is_unknown(tmp_path: Path) -> None:
    time = Clock()
    probes = MachineProbes(tmp_path, clock=time)
    readings = probes.read(Preferences(), ("cpu",), {})
    assert readings.cpu_share is None
    while readings.cpu_share is None:  # the kernel counts in hundredths of a second
        time.now += 1
        readings = probes.read(Preferences(), ("cpu",), {date(2026, 11, 20): 4})
    assert readings.memory_total_bytes == host_memory().total_bytes
    assert readings.disk_free_bytes
    assert readings.transferred_bytes_by_day == {date(2026, 11, 20): 4}


class Counted:
    def __init__(self) -> None:
        self.asked = 0

    def idle_seconds(self) -> float | None:
        self.asked += 1
        return 5.0


def test_nobody_is_asked_for_the_display_each_second_when_nothing_hangs_on_it(
    tmp_path: Path,
) -> None:
    time, display = Clock(), Counted()
    probes = MachineProbes(tmp_path, display=display, clock=time)
    for _ in range(10):
        probes.read(Preferences(), ("cpu",), {})
        time.now += 1
    assert display.asked == 1
    yields = Preferences(run_if_user_active=False)
    for _ in range(10):
        assert probes.read(yields, ("cpu",), {}).display_idle_seconds == 5.0
        time.now += 1
    assert display.asked == 11


# ---------------------------------------------------------------- presence


DIGITS = re.compile(r"\d+")


def test_a_terminal_was_used_when_it_was_last_read_to_the_grain_of_that(tmp_path: Path) -> None:
    for name, read_at in (("0", 900.0), ("3", 962.0), ("ptmx", 999.0)):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (read_at, 999.0))
    places = [(tmp_path, DIGITS), (tmp_path / "none", DIGITS)]
    assert TerminalIdle(places, lambda: 1000.0, 0).idle_seconds() == 38.0
    # The time stands for all keys from 960 to 968.
    assert TerminalIdle(places, lambda: 1000.0, 8).idle_seconds() == pytest.approx(31.9)
    assert TerminalIdle(places, lambda: 965.0, 8).idle_seconds() == 0.0
    assert TerminalIdle(places[1:], lambda: 1000.0).idle_seconds() is None


@pytest.mark.skipif(sys.platform != "linux", reason="Linux' grain")
def test_a_key_in_a_real_terminal_is_seen_at_once_even_by_a_probe_that_took_it_for_idle() -> None:
    screen, shell = os.openpty()
    name = Path(os.ttyname(shell)).name
    try:
        probe = TerminalIdle([(Path("/dev/pts"), re.compile(name))])
        os.write(screen, b"x\n")
        os.read(shell, 2)
        assert probe.idle_seconds() == 0.0
        while probe.idle_seconds() == 0.0:
            time.sleep(0.05)
        os.write(screen, b"x\n")
        os.read(shell, 2)
        assert probe.idle_seconds() == 0.0
    finally:
        os.close(screen)
        os.close(shell)


def test_a_command_that_is_not_there_or_fails_or_hangs_gives_nothing() -> None:
    assert run_command(["no-such-command"]) is None
    assert run_command(["false"]) is None
    assert run_command(["sleep", "5"]) is None
    assert MacIdle(lambda words: None).idle_seconds() is None


def test_macos_counts_nanoseconds() -> None:
    shown = '    | |   "HIDIdleTime" = 2500000000\n    | |   "HIDServiceSupport" = Yes\n'
    assert MacIdle(lambda words: shown).idle_seconds() == 2.5


def test_of_several_probes_the_first_that_knows_is_believed_and_the_others_rest() -> None:
    class Unknown(Counted):
        def idle_seconds(self) -> float | None:
            super().idle_seconds()
            return None

    time, unknown, known = Clock(), Unknown(), Counted()
    first = FirstAvailable([unknown, known], time)
    for _ in range(5):
        assert first.idle_seconds() == 5.0
    assert (unknown.asked, known.asked) == (1, 5)
    time.now += 60
    first.idle_seconds()
    assert unknown.asked == 2


# ---------------------------------------------------------------- X11


COOKIE = bytes(range(16))
IDLE_MILLISECONDS = 4321


class Display:
    """As much of an X server as the probe talks to, byte by byte from the protocol's text."""

    def __init__(self, folder: Path, number: int, cookie: bytes = COOKIE) -> None:
        self.cookie = cookie
        self.connections = 0
        self.hang_up = False
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(str(folder / f"X{number}"))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        order, major, _, name_bytes, data_bytes = struct.unpack("<cxHHHHxx", connection.recv(12))
        assert (order, major) == (b"l", 11)
        padded = [size + -size % 4 for size in (name_bytes, data_bytes)]
        said = connection.recv(sum(padded)) if sum(padded) else b""
        if said[padded[0] : padded[0] + data_bytes] != self.cookie:
            connection.sendall(struct.pack("<BBHHH", 0, 4, 11, 0, 1) + b"No!!")
            return
        vendor, formats = b"Someone ", 2
        setup = struct.pack("<IIIIHHBBBBBBBB4x", 0, 0, 0, 0, len(vendor), 65535, 1, formats,
                            0, 0, 32, 32, 8, 255)  # fmt: skip
        setup += vendor + bytes(8 * formats) + struct.pack("<I", 0x1A5) + bytes(36)
        connection.sendall(struct.pack("<BBHHH", 1, 0, 11, 0, len(setup) // 4) + setup)
        while request := connection.recv(4):
            opcode, minor, units = struct.unpack("<BBH", request)
            body = connection.recv(4 * (units - 1))
            if opcode == 98:
                assert body[4:20] == b"MIT-SCREEN-SAVER"
                connection.sendall(struct.pack("<BBHIBBBB20x", 1, 0, 1, 0, 1, 144, 0, 0))
                continue
            assert (opcode, minor, struct.unpack("<I", body)[0]) == (144, 1, 0x1A5)
            if self.hang_up:
                return
            event = bytes([28]) + bytes(31)  # something that nobody has asked for
            reply = struct.pack("<BBHIIIII8x", 1, 0, 2, 0, 0, 0, IDLE_MILLISECONDS, 0)
            connection.sendall(event + reply)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def display(tmp_path: Path) -> Iterator[Display]:
    made = Display(tmp_path, 7)
    yield made
    made.close()


def authority(cookie: bytes, number: bytes = b"7") -> bytes:
    def entry(*fields: bytes) -> bytes:
        parts = [struct.pack(">H", len(field)) + field for field in fields]
        return struct.pack(">H", 256) + b"".join(parts)

    other = entry(b"host", b"1", b"MIT-MAGIC-COOKIE-1", bytes(16))
    return other + entry(b"host", number, b"MIT-MAGIC-COOKIE-1", cookie)


def test_an_x_display_tells_its_idle_time_over_one_connection(
    tmp_path: Path, display: Display
) -> None:
    (tmp_path / "authority").write_bytes(authority(COOKIE))
    environment = {"DISPLAY": ":7.0", "XAUTHORITY": str(tmp_path / "authority")}
    probe = X11Idle(environment, tmp_path)
    assert [probe.idle_seconds() for _ in range(3)] == [4.321] * 3
    assert display.connections == 1
    display.hang_up = True
    assert probe.idle_seconds() is None
    display.hang_up = False
    assert probe.idle_seconds() == 4.321
    probe.close()


def test_a_display_that_sends_events_without_end_gives_nothing_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def send_events(self: Display, connection: socket.socket) -> None:
        connection.recv(12)
        connection.sendall(struct.pack("<BBHHH", 1, 0, 11, 0, 11) + bytes(44))
        with contextlib.suppress(OSError):
            while True:
                connection.sendall(bytes([28]) + bytes(31))

    monkeypatch.setattr(Display, "_answer", send_events)
    display = Display(tmp_path, 9)
    begun = time.monotonic()
    assert X11Idle({"DISPLAY": ":9", "HOME": str(tmp_path)}, tmp_path).idle_seconds() is None
    assert time.monotonic() - begun < 2 * ANSWER_SECONDS + 1
    display.close()


def test_a_display_that_refuses_or_is_not_there_or_is_another_machines_gives_nothing(
    tmp_path: Path, display: Display
) -> None:
    (tmp_path / ".Xauthority").write_bytes(authority(bytes(16)))
    home = {"HOME": str(tmp_path)}
    assert X11Idle({**home, "DISPLAY": ":7"}, tmp_path).idle_seconds() is None
    assert X11Idle({**home, "DISPLAY": ":8"}, tmp_path).idle_seconds() is None
    assert X11Idle({**home, "DISPLAY": "localhost:10.0"}, tmp_path).idle_seconds() is None
    assert X11Idle({}, tmp_path).idle_seconds() is None


def test_display_names_and_cookies() -> None:
    numbers = [display_number(text) for text in (":0", "unix:1.0", ":3.2", "host:0", "", ":x")]
    assert numbers == [0, 1, 3, None, None, None]
    assert find_cookie(authority(COOKIE), 7) == COOKIE
    assert find_cookie(authority(COOKIE, b""), 9) == COOKIE
    assert find_cookie(authority(COOKIE), 9) == b""
    for cut in range(len(authority(COOKIE))):
        find_cookie(authority(COOKIE)[:cut], 7)


# ---------------------------------------------------------------- GPUs


class Driver:
    """NVML's functions over two GPUs, the second of which tells next to nothing."""

    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    def __init__(self) -> None:
        self.broken = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.NVMLError("no driver")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return 2

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return f"GPU-{handle}abc"

    def __getattr__(self, name: str) -> object:
        values = {
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=8 * 2**30, used=2**30),
            "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=40),
            "nvmlDeviceGetTemperature": 66,
            "nvmlDeviceGetPowerUsage": 120_000,
            "nvmlDeviceGetEnforcedPowerLimit": 300_000,
        }

        def answer(handle: int, *_: object) -> object:
            if handle == 1:
                raise self.NVMLError("not supported")
            return values[name]

        return answer


def test_a_gpu_tells_what_it_can_and_nothing_else_breaks() -> None:
    first, second = NvmlGpus(Driver(), {}).read()
    assert (first.temperature_celsius, first.utilization) == (66, 0.4)
    assert (first.power_limit_watts, first.memory_used_bytes) == (300, 2**30)
    assert (second.index, second.temperature_celsius, second.memory_used_bytes) == (1, None, None)


class Rocm:
    """AMD SMI, as its Python interface has it: two GPUs, of which the second has no sensors."""

    class AmdSmiLibraryException(Exception):
        """AMD's name."""

    AmdSmiTemperatureType = SimpleNamespace(EDGE="edge", HOTSPOT="hotspot")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")

    def __init__(self, *, broken: bool = False, has_edge: bool = True) -> None:
        self._broken, self._has_edge = broken, has_edge

    def amdsmi_init(self) -> None:
        if self._broken:
            raise self.AmdSmiLibraryException("no driver")

    def amdsmi_get_processor_handles(self) -> list[int]:
        return [0, 1]

    def _known(self, handle: int) -> None:
        if handle == 1:
            raise self.AmdSmiLibraryException("not supported")

    def amdsmi_get_gpu_vram_usage(self, handle: int) -> dict[str, int]:
        self._known(handle)
        return {"vram_total": 16368, "vram_used": 1024}

    def amdsmi_get_gpu_activity(self, handle: int) -> dict[str, object]:
        return {"gfx_activity": "N/A" if handle == 1 else 40}

    def amdsmi_get_temp_metric(self, handle: int, kind: str, _: str) -> int:
        self._known(handle)
        if kind == "edge" and not self._has_edge:
            raise self.AmdSmiLibraryException("not supported")
        return 66 if kind == "edge" else 80


def test_a_gpu_of_amds_tells_what_it_can() -> None:
    first, second = AmdSmiGpus(Rocm, {}).read()
    assert (first.temperature_celsius, first.utilization) == (66, 0.4)
    assert first.memory_used_bytes == 2**30
    assert second == GpuReading(index=1)
    hot, _ = AmdSmiGpus(lambda: Rocm(has_edge=False), {}).read()
    assert hot.temperature_celsius == 80


def test_gpus_of_amds_are_numbered_as_rocm_shows_them() -> None:
    def temperatures(**environment: str) -> list[float | None]:
        return [gpu.temperature_celsius for gpu in AmdSmiGpus(Rocm, environment).read()]

    assert temperatures(HIP_VISIBLE_DEVICES="1,0") == [None, 66]
    assert temperatures(CUDA_VISIBLE_DEVICES="1", HIP_VISIBLE_DEVICES="0") == [66]
    assert temperatures(ROCR_VISIBLE_DEVICES="1,0", HIP_VISIBLE_DEVICES="1") == [66]
    assert temperatures(ROCR_VISIBLE_DEVICES="0,7,1") == [66]


def test_without_amds_library_or_driver_there_are_no_gpus() -> None:
    assert AmdSmiGpus(lambda: None, {}).read() == ()
    assert AmdSmiGpus(lambda: Rocm(broken=True), {}).read() == ()


@pytest.mark.parametrize(
    "code", ["raise OSError('libamd_smi.so')", "print('Unable to find it'); {}['libamd_smi.so']"]
)
def test_an_amdsmi_without_its_library_is_as_none(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "amdsmi.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "amdsmi", raising=False)
    assert AmdSmiGpus(environment={}).read() == ()
    assert capsys.readouterr().out == ""


def test_gpus_are_numbered_as_cuda_shows_them() -> None:
    def temperatures(visible: str) -> list[float | None]:
        gpus = NvmlGpus(Driver(), {"CUDA_VISIBLE_DEVICES": visible}).read()
        return [gpu.temperature_celsius for gpu in gpus]

    assert temperatures("1,0") == [None, 66]
    assert temperatures("GPU-0a") == [66]
    assert temperatures("") == []
    assert temperatures("0,7,1") == [66]


def test_without_a_driver_there_are_no_gpus() -> None:
    driver = Driver()
    driver.broken = True
    assert NvmlGpus(driver, {}).read() == ()
    # nvidia-ml-py itself, where there is no GPU.
    if not Path("/dev/nvidiactl").exists():
        assert NvmlGpus(environment={}).read() == ()
