"""Initial values: the same on every machine and for every cut."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import Stage
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ModelConfig

MODEL = ModelConfig(
    vocabulary_size=300, hidden_size=64, intermediate_size=176, layers=4, heads=4,
    key_value_heads=2, sequence_length=16,
)  # fmt: skip


def stage(start: int, end: int, seed: int = 3, model: ModelConfig = MODEL) -> Stage:
    cut = StageRange(first_layer=start, end_layer=end)
    built = Stage(model, cut, is_first=start == 0, is_last=end == MODEL.layers)
    initialise(built, seed)
    return built


def test_a_parameter_has_the_same_values_however_the_model_is_cut():
    whole = dict(stage(0, 4).named_parameters())
    pieces = [stage(0, 1), stage(1, 3), stage(3, 4)]
    names = [name for piece in pieces for name, _ in piece.named_parameters()]
    assert sorted(names) == sorted(whole)
    for piece in pieces:
        for name, parameter in piece.named_parameters():
            assert torch.equal(parameter, whole[name]), name


def test_values_do_not_depend_on_threads_or_on_torch_s_own_generator():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(1)
    first = stage(0, 4)
    torch.set_num_threads(3)
    torch.manual_seed(2)
    second = stage(0, 4)
    torch.set_num_threads(before)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_values_are_the_published_ones():
    """Pinned: a peer of another version of this code would silently start another model."""
    weight = dict(stage(0, 4).named_parameters())["model.layers.2.mlp.down_proj.weight"]
    digest = hashlib.sha256(weight.detach().numpy().astype("<f4").tobytes()).hexdigest()
    assert digest[:16] == "37f781d464c0912a"


def test_another_seed_or_name_gives_other_values():
    first, other = (dict(stage(0, 4, seed).named_parameters()) for seed in (3, 4))
    name = "model.layers.0.mlp.gate_proj.weight"
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("gate", "up")])
    assert not torch.equal(first[name], first[name.replace("layers.0", "layers.1")])


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("model.embed_tokens.weight", 0.02),
        ("model.layers.1.mlp.up_proj.weight", 0.02),
        ("model.layers.1.self_attn.o_proj.weight", 0.02 / math.sqrt(8)),
        ("model.layers.1.mlp.down_proj.weight", 0.02 / math.sqrt(8)),
    ],
)
def test_matrices_are_normal_with_the_stated_deviation(name, deviation):
    values = dict(stage(0, 4).named_parameters())[name].detach().view(-1).double() / deviation
    count = values.numel()
    assert abs(values.mean().item()) < 5 / math.sqrt(count)
    assert values.std().item() == pytest.approx(1, abs=5 / math.sqrt(2 * count))
    for bound, share in ((1, 0.6827), (2, 0.9545)):
        inside = (values.abs() < bound).double().mean().item()
        assert inside == pytest.approx(share, abs=5 * math.sqrt(share * (1 - share) / count))
    # Neighbours come from one random word: they must not be correlated.
    lagged = (values[:-1] * values[1:]).mean().item()
    assert abs(lagged) < 5 / math.sqrt(count)


def test_norms_start_at_one_and_biases_at_zero():
    model = MODEL.model_copy(update={"attention_bias": "all", "query_key_norm": True})
    for name, parameter in stage(0, 4, model=model).named_parameters():
        if "norm" in name:
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        if "bias" in name:
            assert torch.equal(parameter, torch.zeros_like(parameter)), name
