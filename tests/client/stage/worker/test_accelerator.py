"""Stages on fake accelerators: they compute what the processor computes, to the bit, and ask
nothing of a device that it would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kits.client.device_pipeline import MANIFEST, Pipeline
from kits.client.fake_accelerator import KINDS, FakeAccelerator
from kits.client.stage_runners import CPU, PLENTY
from swarm_client.stage.worker import accelerator as door
from swarm_client.stage.worker.accelerator import (
    Accelerator,
    AppleAccelerator,
    DeviceMemory,
    StreamAccelerator,
)
from swarm_client.stage.worker.self_test import run_self_test
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_client.stage.worker.transfer.device_copier import (
    BUFFERS,
    DeviceCopier,
    StreamCopier,
    WaitingCopier,
    device_copier,
)
from swarm_shared.base.types import StageIndex, Step

pytestmark = pytest.mark.usefixtures("splits")
STEPS = 2


@pytest.fixture(params=KINDS)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeAccelerator]:
    accelerator = FakeAccelerator(request.param)
    with accelerator.at_work():
        yield accelerator


# ---------------------------------------------------------------- training


@pytest.mark.parametrize("graph_budget", [PLENTY, 0], ids=["kept and split", "computed again"])
def test_stages_on_an_accelerator_train_to_the_bits_of_the_processor(
    fake: FakeAccelerator, graph_budget: int
) -> None:
    found = Pipeline(MANIFEST, fake, graph_budget).train(STEPS)
    assert fake.calls["aten::mm"] > 50, "it was computed on the device"
    assert found == Pipeline(MANIFEST, CPU, graph_budget).train(STEPS)


def test_a_state_saved_on_one_kind_of_device_goes_on_on_another(
    fake: FakeAccelerator, tmp_path: Path
) -> None:
    there, here = (Pipeline(MANIFEST, one, PLENTY) for one in (fake, CPU))
    there.step(Step(1))
    for one, other in zip(there.steps, here.steps, strict=True):
        path = tmp_path / "state"
        one.save(path, there.runners[0].version)
        assert other.load(path, there.runners[0].version) == one.fingerprint()
    assert here.step(Step(2)) == there.step(Step(2))
    assert {str(one.stage.device) for one in there.runners} == {str(fake.device)}


def test_a_device_tests_itself(fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm_client.stage.worker.self_test.ACCELERATOR_HIDDEN_SIZE", 32)
    monkeypatch.setattr("swarm_client.stage.worker.self_test.CHUNK_WORDS", 1024)
    found = run_self_test(fake, 1e-9, 4 * 8 * 1024)
    assert (found.rounds, found.fault) == (2, "")


def test_a_limit_of_memory_and_its_end_reach_the_device(fake: FakeAccelerator) -> None:
    runner = StageRunner(MANIFEST, StageIndex(0), fake, PLENTY, PLENTY)
    runner.limit_memory(2**30, PLENTY, 0)
    assert fake.limit_bytes == 2**30
    runner.limit_memory(None, PLENTY, 0)
    assert fake.limit_bytes is None


# ---------------------------------------------------------------- copies


def test_copies_wait_for_what_they_need_and_change_nothing(fake: FakeAccelerator) -> None:
    copier = device_copier(fake, 400)
    assert isinstance(copier, WaitingCopier if fake.device.type == "mps" else StreamCopier)
    for number in range(6):
        host = torch.full((100,), float(number))
        there = copier.to_device(host)
        host.zero_()
        back = copier.to_host(there * 2 + 1)
        assert torch.equal(back, torch.full((100,), 2.0 * number + 1))
    large = torch.randn(200)
    assert torch.equal(copier.to_host(copier.to_device(large)), large)


def there_and_back(copier: DeviceCopier, times: int) -> None:
    for _ in range(times):
        copier.to_host(copier.to_device(torch.ones(100)) + 1)


@pytest.mark.parametrize(
    "forgotten", ["FakeStream.wait_event", "FakeStream.wait_stream", "FakeEvent.synchronize"]
)
def test_a_wait_that_is_forgotten_is_found(forgotten: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any one of the copier's waits the fake refuses the order of its work."""
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        copier = device_copier(fake, 400)
        there_and_back(copier, BUFFERS + 1)
        monkeypatch.setattr(f"kits.client.fake_accelerator.{forgotten}", lambda *_: None)
        with pytest.raises(RuntimeError, match="without waiting"):
            there_and_back(copier, BUFFERS + 1)


# ---------------------------------------------------------------- what is refused


def test_the_fake_refuses_what_a_real_device_refuses(fake: FakeAccelerator) -> None:
    there = torch.ones(3, device=fake.device)
    with pytest.raises(RuntimeError, match="same device"):
        there + torch.ones(3)
    with pytest.raises(TypeError, match="float64"):
        there.double()
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(3, dtype=torch.float64, device=fake.device)
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()
    assert (there + 1.0).device == fake.device
    assert (there + 1.0).cpu().tolist() == [2.0] * 3


def test_without_pinned_memory_or_a_kernel_it_is_refused() -> None:
    apple = FakeAccelerator("mps")
    with apple.at_work():
        with pytest.raises(RuntimeError, match="pinned"):
            torch.empty(3, pin_memory=True)
        with pytest.raises(NotImplementedError, match="not currently implemented"):
            torch.linalg.eigvals(torch.eye(2, device="mps"))


# ---------------------------------------------------------------- the door


def test_the_door_finds_devices_by_name_and_describes_them(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "accelerators", lambda: [fake])
    monkeypatch.setattr(door, "PRODUCT_SIZE", 32)
    kind = fake.device.type
    assert door.accelerator_named(f"{kind}:0") is fake
    assert door.accelerator_named(f"{kind}:1") is None
    assert door.accelerator_named("cpu") is not None
    (found,) = door.describe_all()
    assert (found.name, found.label) == (f"{kind}:0", f"fake {kind}")
    assert found.has_own_memory is (kind != "mps")
    assert (found.rates is None) is (kind == "mps")


@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_devices_with_streams_are_limited_by_a_share_of_their_memory(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device(kind, 1)
    shares: list[tuple[float, torch.device]] = []
    module = torch.get_device_module(kind)
    monkeypatch.setattr(module, "set_per_process_memory_fraction", lambda *two: shares.append(two))
    monkeypatch.setattr(module, "get_device_name", lambda asked: f"card {asked}")
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda asked: (3, 8))
    accelerator = StreamAccelerator(device)
    assert accelerator.memory() == DeviceMemory(free_bytes=3, total_bytes=8)
    for limit in (2, None, 100):
        accelerator.limit_memory(limit)
    assert shares == [(0.25, device), (1.0, device), (1.0, device)]
    assert accelerator.label == f"card {kind}:1"
    assert accelerator.streams is not None


def test_apples_gpu_offers_what_metal_recommends_and_the_host_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shares: list[float] = []
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 800)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 300)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", shares.append)
    monkeypatch.setattr(Accelerator, "memory", lambda _: DeviceMemory(400, 1000))
    accelerator = AppleAccelerator(torch.device("mps", 0))
    assert accelerator.memory() == DeviceMemory(free_bytes=400, total_bytes=800)
    monkeypatch.setattr(Accelerator, "memory", lambda _: DeviceMemory(600, 1000))
    assert accelerator.memory().free_bytes == 500
    for limit in (200, None):
        accelerator.limit_memory(limit)
    assert shares == [0.25, 1.0]
    assert accelerator.streams is None
    assert not accelerator.has_own_memory


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), True),
        (MemoryError(), True),
        (RuntimeError("shapes do not match"), False),
    ],
)
def test_lack_of_memory_is_known_on_every_kind(error: BaseException, is_memory: bool) -> None:
    assert door.is_out_of_memory(error) is is_memory
