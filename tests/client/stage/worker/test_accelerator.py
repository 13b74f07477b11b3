"""Stages on fake accelerators: they compute what the processor computes, to the bit, and ask
nothing of a device that it would refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from client.stage.worker.test_stage_runner import CPU, PLENTY, make_manifest, tokens_of
from kits.client.fake_accelerator import KINDS, FakeAccelerator
from swarm_client.stage.worker import accelerator as door
from swarm_client.stage.worker.accelerator import (
    Accelerator,
    AppleAccelerator,
    DeviceMemory,
    StreamAccelerator,
)
from swarm_client.stage.worker.self_test import run_self_test
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_client.stage.worker.transfer.device_copier import (
    BUFFERS,
    DeviceCopier,
    StreamCopier,
    WaitingCopier,
    device_copier,
)
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.model import global_norm
from swarm_shared.run.manifest import CodecsConfig, Manifest
from swarm_shared.run.schedule import learning_rate

pytestmark = pytest.mark.usefixtures("splits")
STEPS = 2
MICROBATCHES = 2


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=KINDS)
def fake(request: pytest.FixtureRequest) -> Iterator[FakeAccelerator]:
    accelerator = FakeAccelerator(request.param)
    with accelerator.at_work():
        yield accelerator


# ---------------------------------------------------------------- training


def sent(write: Any, tensor: torch.Tensor) -> memoryview:
    slot = memoryview(bytearray(tensor.nbytes + 4096))
    return slot[: write(tensor, slot)]


class Pipeline:
    """All stages of a run on one kind of device, and what they have computed."""

    def __init__(
        self, manifest: Manifest, accelerator: Accelerator, graph_budget: int,
        streamed_bytes: int = 0, host_graph_bytes: int = 0,
    ) -> None:  # fmt: skip
        self._manifest = manifest
        self.runners = [
            StageRunner(
                manifest,
                StageIndex(i),
                accelerator,
                graph_budget,
                PLENTY,
                streamed_bytes=streamed_bytes,
                host_graph_bytes=host_graph_bytes,
            )
            for i in range(manifest.stage_count)
        ]
        self.steps = [StepRunner(runner) for runner in self.runners]
        self.losses: list[float] = []
        self._requests = 0

    def step(self, step: Step) -> list[str]:
        """Train one step, with one microbatch taken out and computed again; the digests of the
        parameters, and the transcripts of all that was counted."""
        for number in range(MICROBATCHES):
            self.microbatch(step, MicrobatchIndex(number))
        middle = self.runners[0]
        assert middle.uncommit(step, (MicrobatchIndex(0),))
        self.microbatch(step, MicrobatchIndex(0))
        return [*self._transcripts(), *self._close(step)]

    def _transcripts(self) -> list[str]:
        found: list[str] = []
        for runner in self.runners:
            runner.finish_hashing()
            in_sums = runner.accumulator.transcripts
            found += [in_sums[MicrobatchIndex(i)].model_dump_json() for i in range(MICROBATCHES)]
        return found

    def microbatch(self, step: Step, index: MicrobatchIndex) -> None:
        inputs, targets = tokens_of(self._manifest, index)
        self._requests += 1
        payload = memoryview(bytearray(inputs.tobytes()))
        results: list[tuple[StageRunner, BackwardResult]] = []
        for runner in self.runners:
            if runner.stage.is_last:
                payload = memoryview(bytearray(bytes(payload) + targets.tobytes()))
            if runner.copies_aside:
                runner.prefetch(self._requests, payload)
            result = runner.forward(self._requests, step, index, True, payload)
            if isinstance(result, ForwardResult):
                host = runner.copier.to_host(result.output)
                payload = sent(runner.codec.write_output, host)
                runner.output_sent(self._requests, payload)
            else:
                assert result.loss_sum is not None
                self.losses.append(result.loss_sum)
                results.append((runner, result))
        for runner in (None, *reversed(self.runners[:-1])):
            if runner is not None:
                result = runner.backward(self._requests, payload)
                results.append((runner, result))
            owner, result = results[-1]
            wire = None
            if result.input_gradient is not None:
                host = owner.copier.to_host(result.input_gradient)
                payload = wire = sent(owner.codec.write_input_gradient, host)
            owner.transcribe(self._requests, result, wire)
            if result.owed is not None:
                owner.weights(self._requests)

    def _close(self, step: Step) -> list[str]:
        tokens = MICROBATCHES * self._manifest.tokens_per_microbatch
        flats = [runner.accumulator.totals() for runner in self.runners]
        norms = [s.norm(step, tokens, flat) for s, flat in zip(self.steps, flats, strict=True)]
        norm = global_norm([one.own_squared for one in norms])
        rate = learning_rate(self._manifest.optimizer, self._manifest.training.steps, step)
        return [
            steps.apply(step, tokens, norm, rate, flat).digest
            for steps, flat in zip(self.steps, flats, strict=True)
        ]


def comparable(manifest: Manifest) -> Manifest:
    """A run whose attention is computed by one kernel on all devices: of grouped heads, whose
    gradients a fused kernel of the processor's adds in an order of its own, there is none."""
    model = manifest.model.model_copy(update={"key_value_heads": manifest.model.heads})
    codecs = CodecsConfig(average="exact")
    return manifest.model_copy(update={"model": model, "codecs": codecs})


MANIFEST = comparable(make_manifest(3))


def trained(accelerator: Accelerator, graph_budget: int) -> tuple[list[float], list[list[str]]]:
    pipeline = Pipeline(MANIFEST, accelerator, graph_budget)
    digests = [pipeline.step(Step(step)) for step in range(1, STEPS + 1)]
    return pipeline.losses, digests


@pytest.mark.parametrize("graph_budget", [PLENTY, 0], ids=["kept and split", "computed again"])
def test_stages_on_an_accelerator_train_to_the_bits_of_the_processor(
    fake: FakeAccelerator, graph_budget: int
) -> None:
    found = trained(fake, graph_budget)
    assert fake.calls["aten::mm"] > 50, "it was computed on the device"
    assert found == trained(CPU, graph_budget)


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
    (found,) = door.found()
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
