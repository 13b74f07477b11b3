"""Faults on purpose: off unless asked for, loud when on, once at the exact peer, step and phase."""

from __future__ import annotations

import json
import math
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import PLAN_VARIABLE, FaultPoint, fired_path
from swarm_shared.base.errors import ConfigurationError


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "plan.json"
    write(path)
    monkeypatch.setenv(PLAN_VARIABLE, str(path))
    monkeypatch.setenv(faults.PEER_VARIABLE, "")
    monkeypatch.setattr(faults, "active", None)
    yield path
    faults.active = None


def write(path: Path, **fault: object) -> None:
    planned = [{"id": "it", "peer": "a", "phase": "norm", **fault}] if fault else []
    new = path.with_suffix(".new")
    new.write_text(json.dumps({"faults": planned}))
    new.replace(path)


def in_a_process(
    plan: Path, peer: str, phase: FaultPoint, step: int
) -> subprocess.CompletedProcess[str]:
    """What a worker of that peer does there; its parent, the daemon, is this process' shell."""
    program = (
        "import os\nfrom swarm_client.fault_injection import faults\n"
        f"faults.activate({peer!r}, os.getpid())\n"
        f"faults.inject(faults.FaultPoint({phase.value!r}), {step})\nprint('alive')"
    )
    environment = {**os.environ, PLAN_VARIABLE: str(plan)}
    return subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_plan_nothing_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PLAN_VARIABLE, raising=False)
    monkeypatch.setattr(faults, "active", None)
    assert faults.activate("a", os.getpid()) is None
    assert faults.active is None
    faults.inject(FaultPoint.NORM, 1)
    faults.inject_outage(FaultPoint.NORM, 1)
    faults.corrupt(FaultPoint.NORM, 1, memoryview(bytearray(4)))


def test_a_plan_that_is_none_stops_the_program(plan: Path) -> None:
    for content in ("", "{}", '{"faults": [{"id": "x"}]}'):
        plan.write_text(content)
        with pytest.raises(ConfigurationError, match=PLAN_VARIABLE):
            faults.activate("a", os.getpid())
    plan.unlink()
    with pytest.raises(ConfigurationError, match=PLAN_VARIABLE):
        faults.activate("a", os.getpid())


def test_it_logs_that_it_is_on_and_what_it_does(
    plan: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    faults.activate("a", os.getpid())
    assert "FAULT INJECTION is ON" in capfd.readouterr().err
    write(plan, step=3, action="delay")
    faults.inject(FaultPoint.NORM, 3)
    assert "FAULT INJECTION delay at norm of step 3" in capfd.readouterr().err


def test_a_process_dies_at_the_exact_peer_step_and_phase_and_nowhere_else(plan: Path) -> None:
    write(plan, step=3, action="kill")
    for peer, phase, step in (
        ("b", FaultPoint.NORM, 3),
        ("a", FaultPoint.APPLY, 3),
        ("a", FaultPoint.NORM, 4),
    ):
        assert in_a_process(plan, peer, phase, step).stdout == "alive\n"
    assert not fired_path(plan, "it").exists()
    assert in_a_process(plan, "a", FaultPoint.NORM, 3).returncode == -signal.SIGKILL
    record = json.loads(fired_path(plan, "it").read_text())
    assert (record["peer"], record["step"]) == ("a", 3)
    assert in_a_process(plan, "a", FaultPoint.NORM, 3).stdout == "alive\n"  # once


def test_a_frozen_process_stands_still_and_goes_on(plan: Path) -> None:
    write(plan, step=3, action="freeze", seconds=0.5)
    began = time.monotonic()
    assert in_a_process(plan, "a", FaultPoint.NORM, 3).stdout == "alive\n"
    assert time.monotonic() - began >= 0.5


def test_a_tensor_is_altered_as_planned(plan: Path) -> None:
    faults.activate("a", os.getpid())
    tensor = bytearray(struct.pack("<3f", 1.0, 2.0, 3.0))
    write(plan, step=2, action="corrupt")
    faults.corrupt(FaultPoint.NORM, 1, memoryview(tensor))
    assert struct.unpack("<3f", tensor) == (1.0, 2.0, 3.0)
    faults.corrupt(FaultPoint.NORM, 2, memoryview(tensor))
    assert struct.unpack("<3f", tensor) == (2.0, 2.0, 3.0)
    write(plan, id="other", step=2, action="nan")
    faults.corrupt(FaultPoint.NORM, 2, memoryview(tensor))
    assert math.isnan(struct.unpack("<3f", tensor)[0])


def test_counts_are_altered_by_as_much_of_a_gradient(plan: Path) -> None:
    faults.activate("a", os.getpid())
    counts = bytearray(struct.pack("<2d", 5.0, 7.0))
    write(plan, step=1, action="corrupt")
    faults.corrupt(FaultPoint.NORM, 1, memoryview(counts), as_float64=True)
    assert struct.unpack("<2d", counts) == (5.0 + 2.0**34, 7.0)
    write(plan, id="other", step=2, action="nan")
    faults.corrupt(FaultPoint.NORM, 2, memoryview(counts), as_float64=True)
    first, second = struct.unpack("<2d", counts)
    assert math.isnan(first)
    assert second == 7.0


def test_the_first_number_of_a_file_of_tensors_is_altered(plan: Path, tmp_path: Path) -> None:
    faults.activate("a", os.getpid())
    write(plan, phase=FaultPoint.CHECKPOINT, action="corrupt")
    path = tmp_path / "state"
    header = (2).to_bytes(8, "little") + b"{}"
    path.write_bytes(header + struct.pack("<2f", 1.0, 2.0))
    faults.corrupt_file(FaultPoint.CHECKPOINT, 7, path)
    assert path.read_bytes() == header + struct.pack("<2f", 2.0, 2.0)


def test_no_file_grows_while_the_disk_is_full(plan: Path, tmp_path: Path) -> None:
    faults.activate("a", os.getpid())
    write(plan, action="disk full", seconds=0.3)
    faults.inject(FaultPoint.NORM, 1)
    path = tmp_path / "file"
    with pytest.raises(OSError, match="too large"):
        path.write_bytes(b"more")
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            path.write_bytes(b"more")
            break
        except OSError:
            time.sleep(0.05)
    assert path.read_bytes() == b"more"


def test_the_wall_clock_jumps_and_time_itself_goes_on(
    plan: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "time", time.time)  # put back afterwards
    faults.activate("a", os.getpid())
    write(plan, action="clock jump", seconds=-1000.0)
    wall, monotonic = time.time(), time.monotonic()
    faults.inject(FaultPoint.NORM, 1)
    assert -1001.0 < time.time() - wall < -900.0
    assert 0.0 <= time.monotonic() - monotonic < 100.0


def test_only_the_daemon_loses_its_network(plan: Path) -> None:
    injector = faults.activate("a", os.getpid())
    assert injector is not None
    write(plan, action="partition", seconds=4.0)
    lost: list[float] = []
    faults.inject(FaultPoint.NORM, 1)
    faults.inject_outage(FaultPoint.NORM, 1)
    assert not fired_path(plan, "it").exists()
    injector.drop_network = lost.append
    faults.inject(FaultPoint.NORM, 1)
    assert lost == []
    faults.inject_outage(FaultPoint.NORM, 1)
    assert lost == [4.0]
