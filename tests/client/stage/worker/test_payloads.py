"""Stages whose tensors cross in a lossy codec: they compute what the reference computes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from kits.client.stage_runners import (
    CPU,
    PLENTY,
    STEP,
    accumulated_gradients,
    failure,
    make_manifest,
    runners_of,
    through,
    tokens_of,
    wire,
    with_codecs,
)
from swarm_client.pipeline.stage_server import stage_limits
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_coordinator.offline.reference import insert_boundary_codecs
from swarm_shared.base.types import MicrobatchIndex, StageIndex
from swarm_shared.model import build_whole
from swarm_shared.run.codec_sizes import ACTIVATION_CODECS, GRADIENT_CODECS
from swarm_shared.run.manifest import Manifest, StageRange

PAIRS = [
    *((codec, codec) for codec in ACTIVATION_CODECS if codec != "none"),
    ("int8", "none"),
    ("none", "int4"),
    ("bfloat16", "topk"),
]


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
    losses = [through(runners, microbatch).loss_sum for microbatch in range(2)]
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
    loss = through(runners_of(manifest), 0).loss_sum
    assert loss == pytest.approx(of_the_reference(manifest, [0])[0], rel=1e-6)


@pytest.mark.parametrize("activation", ACTIVATION_CODECS)
@pytest.mark.parametrize("gradient", GRADIENT_CODECS)
def test_what_crosses_has_the_bytes_that_were_promised(activation: str, gradient: str) -> None:
    manifest = with_codecs(make_manifest(3), activation, gradient)
    runners = runners_of(manifest)
    passed = through(runners, 0)
    for border, (there, back) in enumerate(zip(passed.activations, passed.gradients, strict=True)):
        assert len(there) == manifest.activation_bytes == runners[border].sizes.output_bytes
        assert len(there) == runners[border + 1].sizes.input_bytes
        assert len(back) == manifest.gradient_bytes
        assert len(back) == runners[border].sizes.output_gradient_bytes
        assert len(back) == runners[border + 1].sizes.input_gradient_bytes
        assert max(len(there), len(back)) <= stage_limits(manifest).max_payload_bytes
    request = runners[-1].sizes.request_bytes
    assert request <= stage_limits(manifest).max_payload_bytes


def test_a_replica_answers_with_the_same_bytes() -> None:
    """A hedge, or a peer that takes over: the next stage cannot detect which peer computed it."""
    manifest = with_codecs(make_manifest(3), "int8", "int4")
    first, second = runners_of(manifest), runners_of(manifest, graph_budget=0)
    through(first, 7)
    one, other = through(first, 0), through(second, 0)
    assert (one.activations, one.gradients) == (other.activations, other.gradients)
    assert one.loss_sum == other.loss_sum


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
    passed = through([runner], 0)
    assert (passed.activations, passed.gradients) == ([], [])
    assert passed.loss_sum == pytest.approx(of_the_reference(make_manifest(1), [0])[0], rel=1e-6)
