"""What a worker does otherwise on another device or compiled, and that the values stay the same."""

from __future__ import annotations

import pytest
import torch

from benchmarks.stage.middle_stage import stage_manifest
from swarm_client.stage.worker.accelerator import accelerators, processor
from swarm_client.stage.worker.compiling import COMPILE_VARIABLE, backend_from_environment
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.transfer.device_copier import device_copier
from swarm_shared.base.errors import ConfigurationError
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.run.model_config import PRESETS

CPU = processor()


def test_on_a_processor_nothing_is_copied() -> None:
    copier, tensor = device_copier(CPU, 100), torch.randn(3, requires_grad=True)
    assert copier.to_device(tensor) is tensor
    there = copier.to_host(tensor)
    assert there.data_ptr() == tensor.data_ptr()
    assert not there.requires_grad


@pytest.mark.skipif(not accelerators(), reason="needs a GPU")
def test_copies_to_a_gpu_and_back_change_nothing_and_wait_for_what_computes() -> None:
    copier = device_copier(accelerators()[0], 4 * 10**6)
    for number in range(20):
        host = torch.full((10**6,), float(number))
        there = copier.to_device(host)
        host.zero_()
        back = copier.to_host(there * 2 + 1)
        assert torch.equal(back, torch.full((10**6,), 2.0 * number + 1))
    large = torch.randn(2 * 10**6)
    assert torch.equal(copier.to_host(copier.to_device(large)), large)


def computed(backend: str | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, input gradient, parameter gradients of one microbatch; layers told of meanwhile."""
    manifest = stage_manifest(PRESETS["tiny"], 2, "float32")
    runner = StageRunner(manifest, StageIndex(1), CPU, 2**40, 0, backend)
    told: list[int] = []
    runner.between_layers = lambda: told.append(1)
    drawn = torch.randn(runner.sizes.input_bytes // 4, generator=torch.Generator().manual_seed(3))
    payload = memoryview(bytearray(drawn.numpy().tobytes()))
    forward = runner.forward(1, Step(1), MicrobatchIndex(0), True, payload)
    assert isinstance(forward, ForwardResult)
    backward = runner.backward(1, payload)
    assert isinstance(backward, BackwardResult)
    assert backward.input_gradient is not None
    # Each of two layers, both ways; in the first microbatch one is computed again to measure the
    # other.
    assert len(told) == 5
    return forward.output, backward.input_gradient, runner.accumulator.totals()


@pytest.mark.process
def test_compiled_layers_compute_the_same_and_still_let_the_worker_in_between() -> None:
    for plain, compiled in zip(computed(None), computed("aot_eager"), strict=True):
        torch.testing.assert_close(compiled, plain, rtol=1e-4, atol=1e-5)


def test_what_was_fetched_ahead_is_computed_with_and_forgotten_with_its_request() -> None:
    manifest = stage_manifest(PRESETS["tiny"], 1, "float32")
    runner = StageRunner(manifest, StageIndex(1), CPU, 2**40, 0)
    size = runner.sizes.input_bytes
    payload, zeros = memoryview(bytearray(torch.ones(size // 4).numpy().tobytes())), bytearray(size)
    expected = runner.forward(3, Step(1), MicrobatchIndex(0), True, payload)
    assert isinstance(expected, ForwardResult)
    runner.discard(3)
    for request, discarded in ((1, False), (2, True)):
        runner.prefetch(request, payload)
        if discarded:
            runner.discard(request)
        found = runner.forward(request, Step(1), MicrobatchIndex(0), True, memoryview(zeros))
        assert isinstance(found, ForwardResult)
        assert torch.equal(found.output, expected.output) is not discarded


@pytest.mark.parametrize(
    ("value", "backend"),
    [("", None), ("0", None), ("1", "inductor"), ("aot_eager", "aot_eager")],
)
def test_compiling_is_off_unless_the_environment_asks(
    value: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(COMPILE_VARIABLE, value)
    assert backend_from_environment() == backend
    monkeypatch.delenv(COMPILE_VARIABLE)
    assert backend_from_environment() is None


def test_an_unknown_way_of_compiling_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(COMPILE_VARIABLE, "yes")
    with pytest.raises(ConfigurationError, match="give 1, 0"):
        backend_from_environment()


def test_a_stage_that_has_warmed_up_compiles_nothing_more() -> None:
    torch._dynamo.reset()
    manifest = stage_manifest(PRESETS["tiny"], 2, "float32")
    runner = StageRunner(manifest, StageIndex(1), CPU, 2**40, 0, "aot_eager")
    runner.warm_up()
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert compiled
    payload = memoryview(bytearray(runner.sizes.input_bytes))
    for number in range(2):
        runner.forward(number, Step(1), MicrobatchIndex(number), True, payload)
        runner.backward(number, payload)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled
