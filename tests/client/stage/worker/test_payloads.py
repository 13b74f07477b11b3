"""Stages whose tensors cross in a lossy codec: they compute what the reference computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from client.stage.worker.test_stage_runner import (
    CPU,
    PLENTY,
    STEP,
    accumulated_gradients,
    failure,
    make_manifest,
    runners_of,
    tokens_of,
    wire,
)
from swarm_client.pipeline.stage_server import stage_limits
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_coordinator.offline.reference import insert_boundary_codecs
from swarm_shared.base.types import MicrobatchIndex, StageIndex
from swarm_shared.model import build_whole
from swarm_shared.run.codec_sizes import ACTIVATION_CODECS, GRADIENT_CODECS
from swarm_shared.run.manifest import CodecsConfig, Manifest, StageRange

PAIRS = [
    *((codec, codec) for codec in ACTIVATION_CODECS if codec != "none"),
    ("int8", "none"),
    ("none", "int4"),
    ("bfloat16", "topk"),
]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def with_codecs(manifest: Manifest, activation: str, gradient: str) -> Manifest:
    codecs = CodecsConfig.model_validate({"activation": activation, "gradient": gradient})
    return manifest.model_copy(update={"codecs": codecs})


def in_slot(runner: StageRunner, tensor: torch.Tensor, write) -> memoryview:
    """As the loop does it: into a slot of the worker's own size."""
    slot = memoryview(bytearray(runner.sizes.slot_bytes))
    return slot[: write(tensor, slot)]


def through(
    runners: Sequence[StageRunner], microbatch: int
) -> tuple[float, list[memoryview], list[memoryview]]:
    """The loss, and what crossed each border: activations and gradients, in the borders' order."""
    index = MicrobatchIndex(microbatch)
    number = microbatch + 1
    inputs, targets = tokens_of(runners[0].manifest, microbatch)
    activations: list[memoryview] = []
    payload = wire(inputs)
    for runner in runners[:-1]:
        result = runner.forward(number, STEP, index, True, payload)
        assert isinstance(result, ForwardResult)
        payload = in_slot(runner, result.output, runner.codec.write_output)
        activations.append(payload)
    payload = memoryview(bytearray(payload.tobytes() + targets.tobytes()))
    last = runners[-1].forward(number, STEP, index, True, payload)
    assert isinstance(last, BackwardResult)
    assert last.loss_sum is not None
    gradients: list[memoryview] = []
    answer, sender = last.input_gradient, runners[-1]
    for runner in reversed(runners[:-1]):
        assert answer is not None
        gradients.insert(0, in_slot(sender, answer, sender.codec.write_input_gradient))
        answer, sender = runner.backward(number, gradients[0]).input_gradient, runner
    return last.loss_sum, activations, gradients


def of_the_reference(
    manifest: Manifest, microbatches: Sequence[int]
) -> tuple[float, dict[str, torch.Tensor | None]]:
    whole = build_whole(manifest)
    insert_boundary_codecs(whole, manifest)
    loss_sum = 0.0
    for microbatch in microbatches:
        inputs, targets = (
            torch.from_numpy(part.astype(np.int64)) for part in tokens_of(manifest, microbatch)
        )
        loss = whole(inputs, targets)
        loss.backward()
        loss_sum += float(loss.detach())
    return loss_sum, {name: parameter.grad for name, parameter in whole.named_parameters()}


@pytest.mark.parametrize(("activation", "gradient"), PAIRS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stages_compute_what_the_reference_computes_with_the_same_codecs(
    activation: str, gradient: str, dtype: str
) -> None:
    manifest = with_codecs(make_manifest(3, dtype=dtype), activation, gradient)
    runners = runners_of(manifest)
    losses = [through(runners, microbatch)[0] for microbatch in range(2)]
    loss, expected = of_the_reference(manifest, range(2))
    assert sum(losses) == pytest.approx(loss, rel=1e-6)
    for runner in runners:
        for name, seen in accumulated_gradients(runner).items():
            grad = expected[name]
            assert grad is not None
            assert (seen - grad).norm() <= 1e-5 * grad.norm(), name


def test_a_lossy_codec_does_lose_something() -> None:
    """Else the test above would compare nothing."""
    plain, _ = of_the_reference(make_manifest(3), [0])
    lossy, _ = of_the_reference(with_codecs(make_manifest(3), "int4", "int4"), [0])
    assert lossy != pytest.approx(plain, rel=1e-5)


@pytest.mark.parametrize("ends", [(0, 3), (3, 3), (0, 0, 3), (1, 1, 3, 3)])
def test_borders_of_stages_without_layers_are_borders_too(ends: tuple[int, ...]) -> None:
    cuts = tuple(
        StageRange(first_layer=first, end_layer=end)
        for first, end in zip((0, *ends), ends, strict=False)
    )
    manifest = with_codecs(make_manifest(1).model_copy(update={"stages": cuts}), "int4", "int8")
    loss, _, _ = through(runners_of(manifest), 0)
    assert loss == pytest.approx(of_the_reference(manifest, [0])[0], rel=1e-6)


@pytest.mark.parametrize("activation", ACTIVATION_CODECS)
@pytest.mark.parametrize("gradient", GRADIENT_CODECS)
def test_what_crosses_has_the_bytes_that_were_promised(activation: str, gradient: str) -> None:
    manifest = with_codecs(make_manifest(3), activation, gradient)
    runners = runners_of(manifest)
    _, activations, gradients = through(runners, 0)
    for border, (there, back) in enumerate(zip(activations, gradients, strict=True)):
        assert there.nbytes == manifest.activation_bytes == runners[border].sizes.output_bytes
        assert there.nbytes == runners[border + 1].sizes.input_bytes
        assert back.nbytes == manifest.gradient_bytes
        assert back.nbytes == runners[border].sizes.output_gradient_bytes
        assert back.nbytes == runners[border + 1].sizes.input_gradient_bytes
        assert max(there.nbytes, back.nbytes) <= stage_limits(manifest).max_payload_bytes
    request = runners[-1].sizes.request_bytes
    assert request <= stage_limits(manifest).max_payload_bytes


def test_a_replica_answers_with_the_same_bytes() -> None:
    """A hedge, or a peer that takes over: the next stage cannot detect which peer computed it."""
    manifest = with_codecs(make_manifest(3), "int8", "int4")
    first, second = runners_of(manifest), runners_of(manifest, graph_budget=0)
    through(first, 7)
    assert through(first, 0) == through(second, 0)


def test_what_is_taken_out_again_is_what_was_decoded() -> None:
    manifest = with_codecs(make_manifest(3), "int4", "topk")
    runners = runners_of(manifest)
    through(runners, 0)
    before = [runner.accumulator.totals() for runner in runners]
    through(runners, 1)
    for runner, flat in zip(runners, before, strict=True):
        assert runner.uncommit(STEP, (MicrobatchIndex(1),))
        torch.testing.assert_close(runner.accumulator.totals(), flat, rtol=1e-5, atol=1e-6)


def test_payloads_of_another_codec_or_without_meaning_are_refused() -> None:
    manifest = with_codecs(make_manifest(2), "int8", "int4")
    first, last = runners_of(manifest)
    inputs, targets = tokens_of(manifest, 0)
    plain = torch.ones(2, 16, 32)
    assert failure(last.forward, 1, STEP, 0, True, wire(plain, targets)) == "bad_input"
    first.forward(1, STEP, MicrobatchIndex(0), True, wire(inputs))
    assert failure(first.backward, 1, wire(plain)) == "bad_input"
    no_scale = memoryview(bytearray(b"\xff" * first.sizes.output_gradient_bytes))
    assert failure(first.backward, 1, no_scale) == "bad_input"
    # It is still in flight: a right gradient may come.
    right = memoryview(bytearray(first.sizes.output_gradient_bytes))
    assert first.backward(1, right).added


def test_a_tensor_that_is_not_encoded_fits_what_copies_it_to_a_device() -> None:
    manifest = with_codecs(make_manifest(3), "int8", "int4")
    sizes = runners_of(manifest)[1].sizes
    assert sizes.tensor_bytes == 2 * 16 * 32 * 4 > sizes.input_bytes


def test_a_single_stage_has_no_border() -> None:
    manifest = with_codecs(make_manifest(1), "int4", "topk")
    runner = StageRunner(manifest, StageIndex(0), CPU, PLENTY, PLENTY)
    loss, activations, gradients = through([runner], 0)
    assert (activations, gradients) == ([], [])
    assert loss == pytest.approx(of_the_reference(make_manifest(1), [0])[0], rel=1e-6)
