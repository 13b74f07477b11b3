"""Cutting the model must not change what it computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from swarm_shared.base.errors import ProtocolError
from swarm_shared.model.initialise import STANDARD_DEVIATION, initialise
from swarm_shared.model.llama import EMBEDDING_NAME, Rotary, Stage, check_token_values
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ComputeDtype, ModelConfig, RopeScaling

SEED = 7


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


QWEN3 = {"query_key_norm": True, "attention_bias": "all", "attention_head_size": 12}


def config(tied: bool = False, bottlenecks: tuple[int, ...] = (), **blocks: Any) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=61, hidden_size=32, intermediate_size=48, layers=5, heads=4,
        key_value_heads=2, sequence_length=12, tie_embeddings=tied,
        bottleneck_size=8 if bottlenecks else 0, bottlenecks=bottlenecks, **blocks,
    )  # fmt: skip


def stages(model: ModelConfig, ends: Sequence[int], dtype: ComputeDtype = "float32"):
    built = []
    for index, (start, end) in enumerate(zip((0, *ends[:-1]), ends, strict=True)):
        stage = Stage(
            model,
            StageRange(first_layer=start, end_layer=end),
            is_first=index == 0,
            is_last=index == len(ends) - 1,
            dtype=dtype,
        )
        initialise(stage, SEED)
        built.append(stage)
    return built


def batch(model: ModelConfig, sequences: int = 3):
    generator = torch.Generator().manual_seed(1)
    shape = (sequences, model.sequence_length + 1)
    tokens = torch.randint(0, model.vocabulary_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def run_chain(chain: Sequence[Stage], inputs, targets, recompute: bool = False):
    """As the swarm does it: each stage has a graph of its own; the loss. Gradients accumulate."""
    received, outputs = [inputs], []
    for stage in chain[:-1]:
        if not stage.is_first:
            received[-1].requires_grad_()
        with torch.set_grad_enabled(not recompute):
            outputs.append(stage(received[-1]))
        received.append(outputs[-1].detach().clone())
    if len(chain) > 1:
        received[-1].requires_grad_()
    loss = chain[-1](received[-1], targets)
    loss.backward()
    for index in reversed(range(len(chain) - 1)):
        gradient = received[index + 1].grad
        output = chain[index](received[index]) if recompute else outputs[index]
        output.backward(gradient)
    return loss.detach()


def gradients(chain: Sequence[Stage]) -> dict[str, torch.Tensor]:
    """By name; the two halves of a tied table are summed, as the engine does."""
    found: dict[str, torch.Tensor] = {}
    for stage in chain:
        for name, parameter in stage.all_parameters():
            assert parameter.grad is not None
            found[name] = found[name] + parameter.grad if name in found else parameter.grad
    return found


@pytest.mark.parametrize("blocks", [{}, QWEN3], ids=["llama", "qwen3"])
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ends", [(3, 5), (1, 3, 5), (0, 5, 5), (1, 2, 3, 4, 5)])
def test_a_chain_of_stages_equals_the_whole_model_to_the_bit(ends, dtype, narrow, blocks):
    model = config(bottlenecks=ends[:-1] if narrow else (), **blocks)
    inputs, targets = batch(model)
    whole, chain = stages(model, (5,), dtype), stages(model, ends, dtype)
    for _ in range(2):  # twice, so that accumulation is part of it
        loss_whole = run_chain(whole, inputs, targets)
        loss_chain = run_chain(chain, inputs, targets)
    assert torch.equal(loss_whole, loss_chain)
    expected, seen = gradients(whole), gradients(chain)
    assert expected.keys() == seen.keys()
    for name in expected:
        assert torch.equal(expected[name], seen[name]), name


@pytest.mark.parametrize("ends", [(3, 5), (1, 3, 5), (0, 5, 5)])
@pytest.mark.parametrize("tied", [False, True])
def test_the_whole_model_s_parameters_are_the_stages_one_after_the_other(ends, tied):
    """So that a stage's part of any flat vector is one piece of it."""
    model = config(tied, bottlenecks=ends[:-1])
    [whole], chain = stages(model, (5,)), stages(model, ends)
    of_stages = [entry for stage in chain for entry in stage.own_parameters()]
    expected = [entry for entry in whole.own_parameters() if not tied or entry[0] != EMBEDDING_NAME]
    assert [name for name, _ in of_stages] == [name for name, _ in expected]
    for (name, mine), (_, theirs) in zip(of_stages, expected, strict=True):
        assert torch.equal(mine, theirs), name


def test_what_crosses_a_bottleneck_is_narrow_and_varies_as_much_as_its_input():
    model = config(bottlenecks=(2,))
    first, last = stages(model, (2, 5))
    inputs, _ = batch(model, sequences=8)
    narrow_BTC = first(inputs)
    assert narrow_BTC.shape == (8, 12, 8)
    assert 0.5 < float(narrow_BTC.detach().std()) < 2.0
    widened_BTD = last.model.bottleneck(2, narrow_BTC)
    assert 0.5 < float(widened_BTD.detach().std()) / STANDARD_DEVIATION < 2.0


def test_an_activation_as_wide_as_the_model_is_refused_behind_a_bottleneck():
    [_, last] = stages(config(bottlenecks=(2,)), (2, 5))
    with pytest.raises(ProtocolError, match="12, 8"):
        last(torch.zeros(1, 12, 32))


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"bottleneck_size": 32}, "less than hidden_size"),
        ({"bottleneck_size": 8, "bottlenecks": (3, 1)}, "in order"),
        ({"bottleneck_size": 8, "bottlenecks": (2, 2)}, "each once"),
        ({"bottleneck_size": 8, "bottlenecks": (6,)}, "layers of the model"),
        ({"bottlenecks": (2,)}, "need a bottleneck_size"),
    ],
)
def test_bottlenecks_that_make_no_sense_are_refused(wrong, why):
    with pytest.raises(ValidationError, match=why):
        ModelConfig.model_validate(config().model_dump() | wrong)


@pytest.mark.parametrize("theta", [math.nextafter(1.0, 2.0), 1.0001, 1e9])
def test_any_base_that_yarn_permits_makes_finite_positions(theta):
    scaling = RopeScaling(kind="yarn", factor=4, high_frequency_factor=32, original_length=10**7)
    changed = {
        "rope_theta": theta, "rope_scaling": scaling.model_dump(), "attention_head_size": 4096,
    }  # fmt: skip
    rotary = Rotary(ModelConfig.model_validate(config().model_dump() | changed))
    assert rotary.cos_TH.isfinite().all()
    assert rotary.sin_TH.isfinite().all()


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"heads": 3, "key_value_heads": 3}, "multiple of 2 . heads"),
        ({"heads": 3, "key_value_heads": 3, "attention_head_size": 8}, "a multiple of heads"),
        ({"attention_head_size": 7}, "multiple of 2"),
        ({"query_key_norm": True, "attention_bias": "qkv"}, "not with .qkv. .Qwen2"),
        ({"rope_scaling": {"kind": "linear", "factor": 0.5}}, "greater than or equal to 1"),
        ({"rope_scaling": {"kind": "llama3", "low_frequency_factor": 4}}, "be less than high_fr"),
        ({"rope_scaling": {"kind": "longrope"}}, "'none', 'linear', 'llama3' or 'yarn'"),
        ({"rope_scaling": {"kind": "yarn"}, "rope_theta": 1.0}, "must be more than 1"),
    ],
)
def test_blocks_that_no_family_has_are_refused(wrong, why):
    with pytest.raises(ValidationError, match=why):
        ModelConfig.model_validate(config().model_dump() | wrong)


@pytest.mark.parametrize(
    ("blocks", "names"),
    [
        ({}, set()),
        ({"attention_bias": "qkv"}, {"q_proj.bias", "k_proj.bias", "v_proj.bias"}),
        (
            {"attention_bias": "all"},
            {"q_proj.bias", "k_proj.bias", "v_proj.bias", "o_proj.bias"},
        ),
        ({"query_key_norm": True}, {"q_norm.weight", "k_norm.weight"}),
    ],
)
def test_a_layer_has_the_biases_and_norms_of_its_configuration(blocks, names):
    (plain,), (stage,) = stages(config(), (5,)), stages(config(**blocks), (5,))
    added = stage.state_dict().keys() - plain.state_dict().keys()
    assert {name.removeprefix("model.layers.2.self_attn.") for name in added if ".2." in name} == (
        names
    )


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("ends", [(3, 5), (1, 3, 5)])
def test_a_split_tied_model_equals_the_whole_once_its_two_halves_are_summed(ends, dtype, narrow):
    model = config(tied=True, bottlenecks=ends[:-1] if narrow else ())
    inputs, targets = batch(model)
    whole, chain = stages(model, (5,), dtype), stages(model, ends, dtype)
    assert torch.equal(run_chain(whole, inputs, targets), run_chain(chain, inputs, targets))
    expected, seen = gradients(whole), gradients(chain)
    assert expected.keys() == seen.keys()
    for name in expected:
        if name == EMBEDDING_NAME:  # autograd adds the two halves in another order
            torch.testing.assert_close(seen[name], expected[name], rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(expected[name], seen[name]), name


def test_each_half_of_a_tied_table_has_a_gradient_of_its_own():
    model = config(tied=True)
    chain = stages(model, (2, 5))
    run_chain(chain, *batch(model))
    first, last = (stage.tied_parameters()[0][1].grad for stage in chain)
    assert first.abs().sum() > 0
    assert last.abs().sum() > 0
    assert not torch.equal(first, last)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_recomputing_the_forward_pass_gives_the_gradients_of_the_kept_graph(dtype):
    model = config()
    kept, recomputed = stages(model, (2, 4, 5), dtype), stages(model, (2, 4, 5), dtype)
    loss_kept = run_chain(kept, *batch(model))
    loss_recomputed = run_chain(recomputed, *batch(model), recompute=True)
    assert torch.equal(loss_kept, loss_recomputed)
    expected, seen = gradients(kept), gradients(recomputed)
    for name in expected:
        assert torch.equal(expected[name], seen[name]), name


def test_the_loss_is_the_sum_over_tokens_and_starts_at_the_uniform_guess():
    model = config()
    (whole,) = stages(model, (5,))
    inputs, targets = batch(model)
    with torch.no_grad():
        logits = whole(inputs)
        loss = whole(inputs, targets)
    picked = torch.log_softmax(logits.double(), -1).gather(-1, targets[..., None])
    assert loss.item() == pytest.approx(-picked.sum().item(), rel=1e-6)
    uniform = torch.log(torch.tensor(61.0)).item()
    assert loss.item() / targets.numel() == pytest.approx(uniform, rel=0.02)


def test_a_position_never_sees_what_comes_after_it():
    model = config()
    (whole,) = stages(model, (5,))
    inputs, _ = batch(model)
    changed = inputs.clone()
    changed[:, 8] = (changed[:, 8] + 1) % model.vocabulary_size
    with torch.no_grad():
        before, after = whole(inputs), whole(changed)
    torch.testing.assert_close(before[:, :8], after[:, :8], rtol=1e-5, atol=1e-6)
    assert not torch.allclose(before[:, 8:], after[:, 8:], rtol=1e-3, atol=1e-4)


def test_bfloat16_computes_nearly_the_float32_loss_and_sends_half_the_bytes():
    model = config()
    inputs, targets = batch(model)
    wide = run_chain(stages(model, (2, 5)), inputs, targets)
    chain = stages(model, (2, 5), "bfloat16")
    narrow = run_chain(chain, inputs, targets)
    assert chain[0](inputs).dtype == torch.bfloat16
    assert narrow.dtype == torch.float32
    assert all(p.dtype == torch.float32 for stage in chain for p in stage.parameters())
    assert all(g.dtype == torch.float32 for g in gradients(chain).values())
    assert narrow.item() == pytest.approx(wide.item(), rel=5e-3)
    assert narrow.item() != wide.item()


def test_parameters_are_own_or_tied_and_named_with_global_layer_indices():
    first, last = stages(config(tied=True), (3, 5))
    assert [name for name, _ in first.tied_parameters()] == [EMBEDDING_NAME]
    assert [name for name, _ in last.tied_parameters()] == [EMBEDDING_NAME]
    assert not any(name == EMBEDDING_NAME for name, _ in (*first.own_parameters(),))
    names = [name for name, _ in last.own_parameters()]
    assert "model.layers.3.self_attn.q_proj.weight" in names
    assert "model.norm.weight" in names
    assert "lm_head.weight" not in names
    (whole,) = stages(config(tied=True), (5,))
    assert whole.tied_parameters() == []
    assert EMBEDDING_NAME in dict(whole.own_parameters())
    assert set(whole.state_dict()) == {name for name, _ in whole.all_parameters()}


@pytest.mark.parametrize(
    "activations",
    [
        torch.zeros(2, 12, 31),
        torch.zeros(2, 13, 32),
        torch.zeros(12, 32),
        torch.zeros(2, 0, 32),
        torch.zeros(2, 12, 32, dtype=torch.float64),
    ],
)
def test_activations_of_a_wrong_shape_or_dtype_are_refused(activations):
    _, last = stages(config(), (3, 5))
    with pytest.raises(ProtocolError, match="activations have shape"):
        last(activations)


@pytest.mark.parametrize(
    "tokens",
    [
        torch.zeros(2, 13, dtype=torch.int64),
        torch.zeros(12, dtype=torch.int64),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(2, 12, dtype=torch.int32),
    ],
)
def test_token_ids_of_a_wrong_shape_or_dtype_are_refused(tokens):
    first, _ = stages(config(), (3, 5))
    with pytest.raises(ProtocolError, match="token ids have shape"):
        first(tokens)


def test_targets_of_another_shape_than_the_inputs_are_refused():
    (whole,) = stages(config(), (5,))
    inputs, targets = batch(config())
    with pytest.raises(ProtocolError, match="targets have shape"):
        whole(inputs, targets[:, 1:])


@pytest.mark.parametrize("bad", [-100, -1, 61, 2**40])
def test_token_values_outside_the_vocabulary_are_refused(bad):
    tokens = torch.zeros(2, 12, dtype=torch.int64)
    check_token_values(tokens, 61)
    tokens[1, 3] = bad
    with pytest.raises(ProtocolError, match="the vocabulary holds 0 to 60"):
        check_token_values(tokens, 61)
