"""Profiles against counts by hand, and against what a real backward pass keeps."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import Stage
from swarm_shared.model.profile import profile_layers
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import PRESETS, ModelConfig
from swarm_shared.run.stage_cut import stage_profile

MODEL = ModelConfig(
    vocabulary_size=300, hidden_size=64, intermediate_size=176, layers=3, heads=4,
    key_value_heads=2, sequence_length=32,
)  # fmt: skip
SEQUENCES = 5


def test_flops_equal_the_count_by_hand():
    profile = profile_layers(MODEL, SEQUENCES)
    tokens = SEQUENCES * 32
    matrices = 64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 176
    attention = 2 * SEQUENCES * 4 * 32 * 32 * 16
    assert profile.embedding.flops == 0
    assert profile.layers[0].flops == 3 * 2 * (tokens * matrices + attention)
    assert profile.head.flops == 3 * 2 * tokens * 64 * 300
    assert len(profile.layers) == 3


@pytest.mark.parametrize("tied", [False, True])
def test_parameters_equal_those_of_the_real_model(tied):
    model = MODEL.model_copy(update={"tie_embeddings": tied})
    profile = profile_layers(model, SEQUENCES)
    for start, end in ((0, 3), (0, 1), (1, 2), (2, 3)):
        cut = StageRange(first_layer=start, end_layer=end)
        stage = Stage(model, cut, is_first=start == 0, is_last=end == 3)
        real = sum(parameter.numel() for parameter in stage.parameters())
        assert stage_profile(profile, cut, start == 0, end == 3).parameters == real


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_activations_equal_what_a_real_forward_pass_keeps(dtype):
    profile = profile_layers(MODEL, SEQUENCES, dtype)
    cut = StageRange(first_layer=1, end_layer=2)
    stage = Stage(MODEL, cut, is_first=False, is_last=False, dtype=dtype)
    initialise(stage, 1)
    own = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), *stage.buffers())}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    x = torch.randn(SEQUENCES, 32, 64).to(stage.compute_dtype).requires_grad_()
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        stage(x)
    real = sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in own)
    assert profile.layers[0].saved_activation_bytes == pytest.approx(real, rel=0.02)


def test_bytes_at_a_boundary_halve_in_bfloat16():
    wide, narrow = (profile_layers(MODEL, SEQUENCES, d) for d in ("float32", "bfloat16"))
    assert wide.boundary_activation_bytes == SEQUENCES * 32 * 64 * 4
    assert narrow.boundary_activation_bytes * 2 == wide.boundary_activation_bytes


def test_a_model_far_beyond_this_machine_s_memory_is_profiled_in_no_memory():
    preset = PRESETS["7b"]
    profile = profile_layers(preset.model, preset.sequences_per_microbatch, "bfloat16")
    whole = StageRange(first_layer=0, end_layer=preset.model.layers)
    assert stage_profile(profile, whole, True, True).parameters == pytest.approx(6.74e9, rel=0.01)
    assert stage_profile(profile, whole, True, True).flops == pytest.approx(
        6 * 6.74e9 * 2048, rel=0.2
    )
