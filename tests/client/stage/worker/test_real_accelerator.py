"""Stages on this machine's accelerator: however memory is used, the bits are the same.

What the fake ones cannot show: that real kernels give the same bits each time and for each plan,
and that copies beside computations are awaited. Skipped on machines without an accelerator.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from client.stage.worker.test_graph_offload import LAYERS, WORTH_IT, deep_manifest
from kits.client.device_pipeline import Pipeline
from kits.client.stage_runners import CPU, PLENTY
from swarm_client.stage.worker.accelerator import (
    Accelerator,
    accelerators,
    describe,
    is_out_of_memory,
)
from swarm_client.stage.worker.self_test import arithmetic_class, run_self_test
from swarm_shared.base.types import Step, Version
from swarm_shared.run.graph_sizes import GraphSizes
from swarm_shared.run.manifest import CodecsConfig, Manifest
from swarm_shared.run.model_config import ComputeDtype
from swarm_shared.run.stage_cut import LayerMatrices

pytestmark = pytest.mark.usefixtures("splits")
STEPS = 3
CLOSE = 1e-3
"""Relative distance of a loss from the processor's, after few steps in float32."""


@pytest.fixture
def accelerator() -> Accelerator:
    found = accelerators()
    if not found:
        pytest.skip("needs a GPU")
    found[0].select()
    return found[0]


def manifest_of(dtype: ComputeDtype, key_value_heads: int, staleness: int = 0) -> Manifest:
    """A run of two stages with layers large enough that kernels of GPUs split their sums."""
    base = deep_manifest()
    model = base.model.model_copy(
        update={
            "hidden_size": 512, "intermediate_size": 1024, "sequence_length": 256,
            "key_value_heads": key_value_heads,
        }
    )  # fmt: skip
    training = base.training.model_copy(update={"dtype": dtype, "staleness": staleness})
    codecs = CodecsConfig(average="exact")
    return base.model_copy(update={"model": model, "training": training, "codecs": codecs})


def kept(manifest: Manifest, accelerator: Accelerator) -> tuple[Pipeline, GraphSizes]:
    """A pipeline that keeps all graphs on the device, and the sizes of its first stage's."""
    pipeline = Pipeline(manifest, accelerator, PLENTY)
    pipeline.runners[0].warm_up()
    return pipeline, pipeline.runners[0].graphs.sizes


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("key_value_heads", [4, 2], ids=["a head each", "grouped heads"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_plan_of_memory_gives_the_same_bits(
    accelerator: Accelerator, dtype: ComputeDtype, key_value_heads: int, staleness: int
) -> None:
    manifest = manifest_of(dtype, key_value_heads, staleness)
    matrices = LayerMatrices.of(manifest.model)
    streamed = matrices.streamable_bytes(1, staleness)  # the last stage has one layer
    pipeline, sizes = kept(manifest, accelerator)
    expected = pipeline.train(STEPS)
    assert kept(manifest, accelerator)[0].train(STEPS) == expected, "the same plan"
    assert Pipeline(manifest, accelerator, 0).train(STEPS) == expected, "computed again"
    found = Pipeline(manifest, accelerator, PLENTY, streamed).train(STEPS)
    assert found == expected, "weights in host memory"
    assert Pipeline(manifest, accelerator, 0, streamed).train(STEPS) == expected, "both"
    budget = sizes.working_bytes(0, LAYERS - 2) + LAYERS * sizes.input_bytes
    offloading = Pipeline(manifest, accelerator, budget, host_graph_bytes=PLENTY)
    offloading.runners[0].graphs.seconds = WORTH_IT
    assert offloading.train(STEPS) == expected, "graphs in host memory"


def test_losses_are_those_of_the_processor_within_rounding(accelerator: Accelerator) -> None:
    manifest = manifest_of("float32", 2)
    losses, _ = Pipeline(manifest, accelerator, PLENTY).train(STEPS)
    expected, _ = Pipeline(manifest, CPU, PLENTY).train(STEPS)
    assert losses == pytest.approx(expected, rel=CLOSE)


def test_a_state_leaves_and_enters_the_device(accelerator: Accelerator, tmp_path: Path) -> None:
    pipeline, _ = kept(manifest_of("float32", 2), accelerator)
    pipeline.step(Step(1))
    first = pipeline.steps[0].fingerprint()
    pipeline.steps[0].save(tmp_path / "state", pipeline.runners[0].version)
    pipeline.step(Step(2))
    assert pipeline.steps[0].load(tmp_path / "state", Version(1)) == first


def test_it_passes_the_self_test_and_has_one_class(accelerator: Accelerator) -> None:
    found = run_self_test(accelerator, 3.0, 2**28)
    assert found.fault == ""
    assert found.memory_bytes > 0
    assert found.arithmetic == arithmetic_class(accelerator) == arithmetic_class(accelerator)


def test_it_is_described(accelerator: Accelerator) -> None:
    found = describe(accelerator)
    assert found.label
    assert 0 < found.free_bytes <= found.total_bytes
    if accelerator.streams is not None:
        assert found.rates is not None
        assert found.rates.copied_bytes_per_second > 1e8


def test_no_more_memory_is_used_than_allowed(accelerator: Accelerator) -> None:
    accelerator.release_cached()
    accelerator.limit_memory(2**28)
    try:
        with pytest.raises((RuntimeError, MemoryError)) as failed:
            torch.zeros(2**29, dtype=torch.uint8, device=accelerator.device)
        assert is_out_of_memory(failed.value)
    finally:
        accelerator.limit_memory(None)
    torch.zeros(2**29, dtype=torch.uint8, device=accelerator.device)
