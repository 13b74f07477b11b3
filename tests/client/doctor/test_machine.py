"""The doctor's checks of the machine: every state, and the real child processes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from kits.attack.strangers import MODIFIED
from kits.memory import needs, takes
from kits.other_user import give_to_another_user
from shared.scheduling.placement.test_memory_need import honest_manifest
from swarm_client.doctor import machine
from swarm_client.doctor.report import Check, State, ok
from swarm_client.machine.devices import Device, DeviceRates
from swarm_client.machine.home import Home
from swarm_shared.base.errors import (
    CapacityError,
    ConfigurationError,
    MachineError,
    StorageError,
    SwarmError,
)
from swarm_shared.base.memory import MachineBalance, MemoryOffer, StageMemory
from swarm_shared.base.types import StageIndex
from swarm_shared.identity.keys import Identity
from swarm_shared.protocol import StageNeeds
from swarm_shared.run.model_config import PRESETS
from swarm_shared.scheduling.placement.memory_plan import stage_needs

GIB = 2**30
CPU: dict[str, Any] = {
    "torch": "2.13.0+cpu", "built_for": "CPU only", "driver": None,
    "nvidia_hardware": False, "devices": [],
}  # fmt: skip
H100 = {
    "name": "cuda:0", "label": "NVIDIA H100 80GB HBM3", "details": "compute capability 9.0",
    "free_bytes": 78 * GIB, "total_bytes": 79 * GIB, "has_own_memory": True,
    "rates": {
        "copied_bytes_per_second": 25e9, "float32_flops_per_second": 5e13,
        "bfloat16_flops_per_second": 6e14,
    },
}  # fmt: skip
CUDA = {
    **CPU, "torch": "2.13.0+cu128", "built_for": "CUDA 12.8",
    "driver": "570.86.15", "nvidia_hardware": True,
}  # fmt: skip


def test_an_old_python_is_a_problem() -> None:
    assert machine.check_python((3, 10, 4)).exit_code == SwarmError.exit_code
    assert machine.check_python((3, 11, 0)).state is State.OK
    assert machine.check_python().state is State.OK


# ---------------------------------------------------------------- torch


async def test_torch_is_looked_at_in_a_process_of_its_own() -> None:
    found, seconds = await machine.probe_torch()
    check = machine.check_torch(found, seconds)
    assert check.state is State.OK, check.seen
    assert str(found["torch"]).startswith("2.13.")


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("raise ImportError('libc10.so: cannot open shared object file')", "libc10.so"),
        ("import os; os.kill(os.getpid(), 11)", "ended with code -11"),
        ("import sys; sys.exit('no licence')", "no licence"),
    ],
)
async def test_a_broken_torch_is_a_problem_and_not_a_crash(
    code: str, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(code)
    paths = [str(tmp_path), *filter(None, sys.path)]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    found, seconds = await machine.probe_torch()
    check = machine.check_torch(found, seconds)
    assert check.state is State.PROBLEM
    assert seen in check.seen
    assert machine.check_gpu(found, "auto").state is State.SKIPPED
    assert device_of(found, "auto")[0].state is State.OK


def test_another_torch_than_the_tested_one_is_a_warning() -> None:
    check = machine.check_torch({**CPU, "torch": "2.14.0"}, 1.0)
    assert check.state is State.WARNING
    assert "2.13.0" in check.fix


def test_every_kind_of_missing_gpu_is_distinguished() -> None:
    assert machine.check_gpu({**CUDA, "devices": [H100]}, "cpu").state is State.SKIPPED
    assert machine.check_gpu(CPU, "auto").state is State.SKIPPED
    without_cuda = machine.check_gpu({**CPU, "nvidia_hardware": True}, "auto")
    assert "without CUDA" in without_cuda.seen
    unseen = machine.check_gpu(CUDA, "auto")
    assert "does not see it" in unseen.seen
    failing = machine.check_gpu({**CUDA, "device_error": "CUDA error: no kernel image"}, "auto")
    assert "no kernel image" in failing.seen
    for check in (without_cuda, unseen, failing):
        assert check.state is State.WARNING
        assert check.fix


def test_a_gpu_is_named_with_driver_capability_and_memory() -> None:
    check = machine.check_gpu({**CUDA, "devices": [H100, H100]}, "auto")
    assert check.state is State.OK
    for part in ("H100", "570.86.15", "9.0", "78.0 of 79.0 GiB", "and 1 more"):
        assert part in check.seen
    assert check.details["label"] == H100["label"]
    assert json.loads(json.dumps(check.details)).keys() == check.details.keys() >= {"total_bytes"}
    assert "rates" not in check.details


def device_of(found: Mapping[str, Any], wanted: str) -> tuple[Check, Device | None]:
    """The check where the preferences leave everything."""
    return machine.check_device(found, wanted, lambda device: device.memory)


def test_a_device_offers_what_the_preferences_leave() -> None:
    check, device = machine.check_device(CPU, "cpu", lambda one: one.memory.replaced(GIB))
    assert device is not None
    assert device.memory == MemoryOffer(device_bytes=GIB)
    assert check.seen.endswith("1 GiB of memory to offer, as the preferences leave no more")


def test_the_device_is_chosen_as_joining_does_it() -> None:
    check, device = device_of({**CUDA, "devices": [H100]}, "auto")
    assert check.state is State.OK
    assert device is not None
    assert device.name == "cuda:0"
    assert check.seen.endswith(
        "of the host's to offer; it copies 25 GB/s from and to the host's memory, and computes 50 "
        "TFLOP/s in float32 and 600 in bfloat16"
    )
    assert check.details.items() >= H100["rates"].items()  # type: ignore[attr-defined]
    assert device.memory.balance == MachineBalance(float32=2000.0, bfloat16=24000.0)
    unmeasured, device = device_of({**CUDA, "devices": [{**H100, "rates": None}]}, "auto")
    assert unmeasured.seen.endswith("; how fast it copies and computes could not be measured")
    assert device is not None
    assert device.memory.balance is None
    assert device_of(CPU, "auto")[1].name == "cpu"  # type: ignore[union-attr]
    assert device_of(CPU, "cuda:0")[0].exit_code == CapacityError.exit_code


def test_memory_below_the_smallest_stage_is_a_problem() -> None:
    check, _ = device_of(CPU, "cpu")
    small = Device("cpu", "CPU, 2 cores", GIB)
    assert machine.fit_device(check, small, None) == check
    assert machine.fit_device(check, small, needs(takes(GIB))).state is State.OK
    larger = machine.fit_device(check, small, needs(takes(GIB + 1)))
    assert larger.exit_code == CapacityError.exit_code
    assert larger.details["parameters"] == 1000
    # On a card the host's memory counts besides.
    card = Device("cuda:0", "card", GIB, host_bytes=GIB - 1)
    both = StageMemory(device_bytes=GIB // 2, comfortable_bytes=2 * GIB, host_bytes=GIB)
    assert machine.fit_device(check, card, needs(both)).exit_code == CapacityError.exit_code


def inner_stage_of_7b() -> StageNeeds:
    chosen = PRESETS["7b"]
    manifest = honest_manifest(
        chosen.model, chosen.sequences_per_microbatch, chosen.stages, "bfloat16"
    )
    return stage_needs(manifest, StageIndex(1))


def test_the_plan_for_a_card_of_8_gb_is_one_sentence_with_every_figure() -> None:
    card = Device("cuda:0", "a card", int(0.8 * 8e9), host_bytes=int(0.8 * 16e9))
    check = ok("device", f"cuda:0: a card, {card.memory} to offer")
    found = machine.fit_device(check, card, inner_stage_of_7b())
    assert found.state is State.OK
    assert found.seen == (
        "cuda:0: a card, 5.96 GiB of device memory and 11.9 GiB of the host's to offer; the run's "
        "smallest stage has 405 M parameters and takes 5.38 GiB of device memory and 10.6 GiB of "
        "the host's, where its optimizer is; with 2 of 2 layers recomputed in the backward pass, "
        "it is computed at 0.75 of full speed"
    )
    assert found.details.items() >= {
        "parameters": 404_766_720, "layers": 2, "recomputed_layers": 2.0, "streamed_bytes": 0,
        "speed": 0.75,
    }.items()  # fmt: skip


def test_a_card_that_lacks_memory_for_weights_is_told_how_much_is_copied() -> None:
    check, _ = device_of(CPU, "cpu")
    # A pass of copies takes as long as two of products.
    rates = DeviceRates(1e9, 2048e9, 2e15)
    card = Device("cuda:0", "card", GIB, host_bytes=2 * GIB, rates=rates)
    tight = StageMemory(
        device_bytes=GIB + GIB // 2, comfortable_bytes=2 * GIB, host_bytes=GIB,
        streamable_bytes=GIB,
    )  # fmt: skip
    found = machine.fit_device(check, card, needs(tight))
    assert found.state is State.OK
    assert found.seen.endswith(
        "; with 2 of 2 layers recomputed in the backward pass and 512 MiB of weights copied from "
        "the host's memory for each pass, it is computed at 0.64 of full speed"
    )
    assert found.details["streamed_bytes"] == GIB // 2


def test_a_processor_has_one_memory_for_the_stage_and_its_optimizer() -> None:
    check = ok("device", "cpu: CPU, 16 GiB of memory to offer")
    found = machine.fit_device(check, Device("cpu", "CPU", 16 * GIB), inner_stage_of_7b())
    assert found.seen == (
        "cpu: CPU, 16 GiB of memory to offer; the run's smallest stage has 405 M parameters and "
        "takes 15.9 GiB of memory with its optimizer; with 2 of 2 layers recomputed in the "
        "backward pass, it is computed at 0.75 of full speed"
    )
    comfortable = machine.fit_device(check, Device("cpu", "CPU", 32 * GIB), inner_stage_of_7b())
    assert comfortable.seen.endswith(
        "with 0 of 2 layers recomputed in the backward pass, it is computed at 1.00 of full speed"
    )


# ---------------------------------------------------------------- home and disk


def test_a_new_home_is_fine_and_is_not_made(tmp_path: Path) -> None:
    home = Home.locate(tmp_path / "a" / "b")
    check, identity, in_use = machine.check_home(home)
    assert (check.state, identity, in_use) == (State.OK, None, False)
    assert list(tmp_path.iterdir()) == []


def test_a_home_with_an_identity_names_its_peer(tmp_path: Path) -> None:
    made = Identity.load_or_create(Home.create(tmp_path).identity_path)
    check, identity, in_use = machine.check_home(Home.locate(tmp_path))
    assert check.state is State.OK
    assert made.peer_id in check.seen
    assert identity is not None
    assert identity.peer_id == made.peer_id
    assert not in_use


def test_a_running_client_is_noticed_and_not_disturbed(tmp_path: Path) -> None:
    home = Home.create(tmp_path)
    with home.locked():
        check, _, in_use = machine.check_home(home)
        assert (check.state, in_use) == (State.WARNING, True)
        assert machine.is_locked(tmp_path / "lock")
    assert not machine.is_locked(tmp_path / "lock")
    assert machine.check_home(home)[0].state is State.OK
    with home.locked():
        pass


def test_a_home_that_cannot_be_used_is_a_problem(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        assert machine.check_home(Home.locate(path))[0].exit_code == StorageError.exit_code


def test_a_home_of_another_user_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    give_to_another_user(tmp_path, monkeypatch)
    check, _, _ = machine.check_home(Home.locate(tmp_path))
    assert check.exit_code == StorageError.exit_code
    assert "belongs to another user" in check.seen


def test_a_key_that_others_can_read_is_a_problem_with_its_cure(tmp_path: Path) -> None:
    home = Home.create(tmp_path)
    Identity.load_or_create(home.identity_path)
    home.identity_path.chmod(0o644)
    check, _, _ = machine.check_home(home)
    assert check.exit_code == ConfigurationError.exit_code
    assert "chmod 600" in check.seen


def test_the_disk_of_a_new_home_is_that_of_its_parent(tmp_path: Path) -> None:
    assert machine.check_disk(tmp_path / "a" / "b").details["free_bytes"]
    assert machine.existing_parent(tmp_path / "a" / "b") == tmp_path
    # As in a folder that may not be searched, the system answers with an error.
    assert machine.existing_parent(tmp_path / ("too long " * 100)) == tmp_path


def test_a_full_disk_is_a_problem_and_a_small_one_a_warning(tmp_path: Path) -> None:
    def state(free_gib: float) -> State:
        return machine.check_disk(tmp_path, int(free_gib * GIB)).state

    assert state(100) is State.OK
    assert state(5) is State.WARNING
    assert state(0.5) is State.PROBLEM
    assert machine.check_disk(tmp_path, 0).exit_code == StorageError.exit_code


# ---------------------------------------------------------------- hivemind


async def test_p2pd_is_started_and_is_gone_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    check = await machine.check_p2pd()
    assert check.state is State.OK, check.seen
    assert list(tmp_path.iterdir()) == []
    running = [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    assert not [line for line in running if str(tmp_path) in line]


async def test_without_hivemind_there_is_a_warning_and_no_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hivemind's package is shadowed by one without a daemon, as where no wheel exists."""
    (tmp_path / "hivemind").mkdir()
    (tmp_path / "hivemind" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *filter(None, sys.path)]))
    monkeypatch.syspath_prepend(str(tmp_path))
    check = await machine.check_p2pd()
    assert check.state is State.WARNING
    assert "p2pd" in check.seen
    assert check.fix.startswith("Nothing to do")


# ---------------------------------------------------------------- the self-test

TESTED = Device("cpu", "CPU", 256 * 2**20)


async def test_a_device_in_order_passes_its_self_test() -> None:
    check = await machine.check_self_test(TESTED, 2.0)
    assert check.state is State.OK, check.seen
    assert int(check.details["rounds"] or 0) >= 2
    assert 0 < int(check.details["memory_bytes"] or 0) <= TESTED.memory_bytes // 2


async def test_a_wrong_bit_of_one_gradient_is_a_problem_that_names_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(MODIFIED))
    monkeypatch.setenv("SWARM_TEST_CHEAT", "wrong in self-tests")
    check = await machine.check_self_test(TESTED, 600.0)
    assert (check.state, check.exit_code) == (State.PROBLEM, MachineError.exit_code)
    assert check.seen.startswith("in round 2 the gradient of the input differed")
    assert " in 1 of " in check.seen
    assert "cooling" in check.fix


async def test_a_self_test_that_cannot_be_carried_out_is_not_taken_for_a_fault() -> None:
    with pytest.raises(SwarmError, match="cuda:7 is not there"):
        await machine.check_self_test(Device("cuda:7", "no GPU", 2**30), 600.0)
