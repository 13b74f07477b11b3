"""Sizes that are computed from the model's shape are those of the modules that are built."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from kits.manifests import manifest_of, stage_ranges
from swarm_client.stage.protocol.slot_sizes import slot_sizes as worker_sizes
from swarm_shared.model.llama import Stage
from swarm_shared.run.manifest import CodecsConfig, Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes


def cut_at(
    ends: tuple[int, ...], dtype: Any = "float32", tied: bool = False, bottleneck_size: int = 0,
    **blocks: Any,
) -> Manifest:  # fmt: skip
    return manifest_of(
        model={
            "vocabulary_size": 50, "hidden_size": 16, "intermediate_size": 24, "layers": ends[-1],
            "heads": 4, "key_value_heads": 2, "sequence_length": 8, "tie_embeddings": tied,
            "bottleneck_size": bottleneck_size,
            "bottlenecks": ends[:-1] if bottleneck_size else (), **blocks,
        },
        stages=stage_ranges(*ends),
        training={"sequences_per_microbatch": 3, "dtype": dtype},
    )  # fmt: skip


@pytest.mark.parametrize(
    "blocks",
    [
        {},
        {"attention_bias": "qkv"},
        {"query_key_norm": True, "attention_bias": "all", "attention_head_size": 6},
    ],
    ids=["llama", "qwen2", "qwen3"],
)
@pytest.mark.parametrize("bottleneck_size", [0, 5])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("ends", [(3,), (1, 3), (0, 2, 3, 3)])
def test_parameters_are_those_of_the_built_stage(
    ends: tuple[int, ...], tied: bool, bottleneck_size: int, blocks: dict[str, Any]
) -> None:
    manifest = cut_at(ends, tied=tied, bottleneck_size=bottleneck_size, **blocks)
    last = manifest.stage_count - 1
    for index, (cut, sizes) in enumerate(zip(manifest.stages, stage_sizes(manifest), strict=True)):
        with torch.device("meta"):
            stage = Stage(manifest.model, cut, index == 0, index == last)
        assert sizes.parameters == sum(p.numel() for p in stage.parameters())
        assert sizes.state_bytes == 12 * sizes.parameters
        assert sizes.gradient_bytes == 4 * sizes.parameters


def test_the_version_before_is_part_of_the_state_where_gradients_lag_a_step_behind() -> None:
    manifest = cut_at((1, 3))
    training = manifest.training.model_copy(update={"staleness": 1})
    stale = stage_sizes(manifest.model_copy(update={"training": training}))
    for plain, sizes in zip(stage_sizes(manifest), stale, strict=True):
        assert sizes.state_bytes == plain.state_bytes + 4 * sizes.parameters
        assert sizes.gradient_bytes == plain.gradient_bytes


def test_a_bottleneck_is_what_crosses_a_border() -> None:
    manifest = cut_at((1, 2), bottleneck_size=4)
    first, last = stage_sizes(manifest)
    assert first.output_bytes == last.input_bytes == 3 * 8 * 4 * 4
    assert worker_sizes(manifest, 0).output_bytes == first.output_bytes
    assert worker_sizes(manifest, 1).tensor_bytes == first.output_bytes


@pytest.mark.parametrize("bottlenecks", [(2,), (1, 2), ()])
def test_a_run_has_a_bottleneck_at_each_border_or_at_none(bottlenecks: tuple[int, ...]) -> None:
    words = cut_at((1, 3), bottleneck_size=4).model_dump()
    words["model"]["bottlenecks"] = bottlenecks
    if not bottlenecks:
        assert Manifest.model_validate(words).model.boundary_size == 16
        return
    with pytest.raises(ValidationError, match="one at each border"):
        Manifest.model_validate(words)


def test_a_boundary_carries_one_activation_in_the_run_s_precision() -> None:
    first, last = stage_sizes(cut_at((1, 2)))
    assert (first.input_bytes, first.output_bytes) == (3 * 8 * 4, 3 * 8 * 16 * 4)
    assert (last.input_bytes, last.output_bytes) == (first.output_bytes, 0)
    assert stage_sizes(cut_at((1, 2), "bfloat16"))[0].output_bytes == 3 * 8 * 16 * 2


def test_a_boundary_carries_what_the_codecs_make_of_activations_and_gradients() -> None:
    codecs = CodecsConfig(activation="int8", gradient="bfloat16")
    manifest = cut_at((1, 2, 3)).model_copy(update={"codecs": codecs})
    # 384 values: a block and a half, a scale each.
    activation, gradient = 384 + 2 * 2, 384 * 2
    first, middle, last = stage_sizes(manifest)
    assert (first.sent_bytes, first.received_bytes) == (activation, 3 * 8 * 4 + gradient)
    assert middle.sent_bytes == middle.received_bytes == activation + gradient
    assert (last.sent_bytes, last.received_bytes) == (gradient, activation)
    for index, sizes in enumerate((first, middle, last)):
        worker = worker_sizes(manifest, index)
        assert worker.input_bytes == sizes.input_bytes
        assert worker.output_bytes == sizes.output_bytes
        assert worker.input_gradient_bytes == sizes.input_gradient_bytes
        assert worker.output_gradient_bytes == sizes.output_gradient_bytes
