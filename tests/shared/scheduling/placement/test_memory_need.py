"""The least memory of a stage against what torch measures, and manifests that claim less."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.manifests import manifest_of
from swarm_shared.base.errors import CapacityError
from swarm_shared.model.profile import profile_layers
from swarm_shared.run.manifest import CodecsConfig, Manifest, StageRange
from swarm_shared.run.model_config import PRESETS, ComputeDtype, ModelConfig
from swarm_shared.run.stage_cut import plan_stages, stage_memory
from swarm_shared.scheduling.placement.memory_need import check_stage_memory, least_stage_memory


def honest_manifest(
    model: ModelConfig, sequences: int, stage_count: int, dtype: ComputeDtype = "float32",
    staleness: Any = 0, average: Any = "exact",
) -> Manifest:  # fmt: skip
    """A manifest with the figures that `swarm-coordinator init` measures."""
    profile = profile_layers(model, sequences, dtype)
    exact = average == "exact"
    cuts = plan_stages(profile, stage_count, staleness=staleness, exact=exact)
    stages = tuple(
        cut.model_copy(
            update={
                "memory": stage_memory(
                    profile,
                    cut,
                    index == 0,
                    index == stage_count - 1,
                    staleness=staleness,
                    exact=exact,
                )
            }
        )
        for index, cut in enumerate(cuts)
    )
    return manifest_of(
        model=model, stages=stages, data={"token_bytes": 4},
        training={
            "sequences_per_microbatch": sequences, "dtype": dtype, "staleness": staleness,
        },
        codecs=CodecsConfig(average=average),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PRESETS)
def test_the_bound_is_just_below_what_torch_measures(name: str, dtype: ComputeDtype):
    chosen = PRESETS[name]
    manifest = honest_manifest(chosen.model, chosen.sequences_per_microbatch, chosen.stages, dtype)
    check_stage_memory(manifest)
    for cut, least in zip(manifest.stages, least_stage_memory(manifest), strict=True):
        claimed = cut.memory
        assert 0.7 * claimed.device_bytes < least.device_bytes <= claimed.device_bytes
        assert 0.7 * claimed.comfortable_bytes < least.comfortable_bytes
        assert least.comfortable_bytes <= claimed.comfortable_bytes
        assert least.host_bytes == claimed.host_bytes
        assert least.streamable_bytes == claimed.streamable_bytes


def test_the_bound_is_just_below_for_wide_heads_with_norms():
    """The shape of Qwen3-0.6B, with fewer layers and words."""
    model = ModelConfig(
        vocabulary_size=1000, hidden_size=1024, intermediate_size=3072, layers=4, heads=16,
        key_value_heads=8, sequence_length=512, attention_head_size=128, query_key_norm=True,
    )  # fmt: skip
    manifest = honest_manifest(model, 4, 1)
    (cut,), (least,) = manifest.stages, least_stage_memory(manifest)
    assert 0.7 * cut.memory.device_bytes < least.device_bytes <= cut.memory.device_bytes


@given(
    heads=st.sampled_from([(1, 1), (4, 1), (4, 2), (4, 4)]),
    head_size=st.sampled_from([0, 8, 128]),
    bias=st.sampled_from(["none", "all"]),
    query_key_norm=st.booleans(),
    sizes=st.tuples(
        st.integers(1, 8), st.integers(8, 200), st.integers(2, 500), st.integers(2, 60)
    ),
    layers=st.integers(1, 4),
    stages=st.integers(1, 3),
    sequences=st.integers(1, 5),
    tied=st.booleans(),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    staleness=st.sampled_from([0, 1]),
    average=st.sampled_from(["exact", "none", "int8"]),
)
@settings(max_examples=25, deadline=None)
def test_no_honest_manifest_is_refused(
    heads: tuple[int, int], head_size: int, bias: Any, query_key_norm: bool,
    sizes: tuple[int, int, int, int], layers: int, stages: int,
    sequences: int, tied: bool, dtype: ComputeDtype, staleness: int, average: str,
):  # fmt: skip
    width, intermediate, vocabulary, length = sizes
    model = ModelConfig(
        vocabulary_size=vocabulary, hidden_size=8 * width * heads[0],
        intermediate_size=intermediate, layers=layers, heads=heads[0], key_value_heads=heads[1],
        sequence_length=length, tie_embeddings=tied, attention_head_size=head_size,
        attention_bias=bias, query_key_norm=query_key_norm,
    )  # fmt: skip
    check_stage_memory(honest_manifest(model, sequences, stages, dtype, staleness, average))


@pytest.mark.parametrize(
    ("figure", "claimed"),
    [("device_bytes", 1000), ("comfortable_bytes", 1000), ("host_bytes", 1000),
     ("streamable_bytes", 2**40)],
)  # fmt: skip
def test_a_manifest_that_hides_the_size_of_a_stage_is_refused_in_a_sentence(
    figure: str, claimed: int
):
    small = PRESETS["small"]
    manifest = honest_manifest(small.model, small.sequences_per_microbatch, 2)
    first, second = manifest.stages
    memory = second.memory.model_copy(update={figure: claimed})
    hidden = second.model_copy(update={"memory": memory})
    with pytest.raises(CapacityError, match=r"claims .* for stage 1, and") as refused:
        check_stage_memory(manifest.model_copy(update={"stages": (first, hidden)}))
    assert "leave this run" in str(refused.value)


def test_a_microbatch_of_more_tokens_needs_more_memory():
    stage = StageRange(first_layer=0, end_layer=4)
    model = PRESETS["tiny"].model
    one, many = (
        honest_manifest(model, sequences, 1).model_copy(update={"stages": (stage,)})
        for sequences in (1, 100)
    )
    assert least_stage_memory(many)[0].device_bytes > 10 * least_stage_memory(one)[0].device_bytes


def test_a_model_beyond_all_figures_is_refused_in_a_sentence():
    """Its activations are more bytes than a manifest can name."""
    model = PRESETS["tiny"].model.model_copy(
        update={"hidden_size": 65_536, "intermediate_size": 262_144, "sequence_length": 131_072}
    )
    stage = StageRange(first_layer=0, end_layer=model.layers)
    manifest = manifest_of(
        model=model, stages=(stage,), training={"sequences_per_microbatch": 9999}
    )
    with pytest.raises(CapacityError, match="needs at least"):
        check_stage_memory(manifest)
