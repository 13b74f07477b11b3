"""The optimizer step and the fingerprint."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from swarm_shared.model.flat_gradients import FlatLayout, bind_gradients
from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import Stage
from swarm_shared.model.optimizer import AdamW, apply_step, fingerprint, make_optimizer
from swarm_shared.run.manifest import (
    MAX_CLIP_NORM,
    MAX_LEARNING_RATE,
    MIN_EPSILON,
    OptimizerConfig,
    StageRange,
)
from swarm_shared.run.model_config import ModelConfig

MODEL = ModelConfig(
    vocabulary_size=50, hidden_size=32, intermediate_size=40, layers=2, heads=2,
    key_value_heads=1, sequence_length=8,
)  # fmt: skip
ADAMW = OptimizerConfig(learning_rate=0.01, warmup_steps=0, weight_decay=0.1)


def stage() -> Stage:
    built = Stage(MODEL, StageRange(first_layer=0, end_layer=2), is_first=True, is_last=True)
    initialise(built, 1)
    return built


def noise(layout: FlatLayout, seed: int) -> torch.Tensor:
    return torch.randn(layout.count, generator=torch.Generator().manual_seed(seed))


def run_steps(model: Stage, steps: int, clip: float = 0.5):
    optimizer, layout = make_optimizer(model, ADAMW), FlatLayout.of(model)
    for step in range(1, steps + 1):
        apply_step(optimizer, layout, noise(layout, step), 0.01 / step, clip)
    return optimizer


def test_parameters_that_step_one_at_a_time_are_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As they do when they lie on another device than the moments."""
    together, apart = stage(), stage()
    expected = fingerprint(together, run_steps(together, 3))
    monkeypatch.setattr(
        AdamW, "_taken_together", lambda self: ([i] for i in range(len(self.parameters)))
    )
    assert fingerprint(apart, run_steps(apart, 3)) == expected


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_stage_on_a_gpu_steps_to_the_same_bits_and_has_its_moments_in_host_memory() -> None:
    on_cpu, on_gpu = stage(), stage().to("cuda:0")
    optimizer = run_steps(on_gpu, 3)
    assert all(moment.device.type == "cpu" for moment in optimizer.first_moments)
    assert fingerprint(on_gpu, optimizer) == fingerprint(on_cpu, run_steps(on_cpu, 3))


def test_a_step_equals_the_published_formula_of_adamw():
    """Against the equations of arXiv 1711.05101 in float64, not against torch."""
    model = stage()
    start = {name: parameter.detach().double() for name, parameter in model.all_parameters()}
    layout = FlatLayout.of(model)
    run_steps(model, 3)
    for (name, parameter), entry in zip(model.all_parameters(), layout.entries, strict=True):
        value = start[name]
        decay = ADAMW.weight_decay if parameter.ndim >= 2 else 0.0
        first, second = torch.zeros_like(value), torch.zeros_like(value)
        for step in range(1, 4):
            flat = noise(layout, step)[entry.offset : entry.offset + entry.count]
            gradient = 0.5 * flat.view(entry.shape).double()
            rate = 0.01 / step
            first = ADAMW.beta1 * first + (1 - ADAMW.beta1) * gradient
            second = ADAMW.beta2 * second + (1 - ADAMW.beta2) * gradient**2
            mean = first / (1 - ADAMW.beta1**step)
            variance = second / (1 - ADAMW.beta2**step)
            value = value - rate * decay * value
            value = value - rate * mean / (variance.sqrt() + ADAMW.epsilon)
        torch.testing.assert_close(
            parameter.detach().double(), value, rtol=1e-4, atol=1e-6, msg=name
        )


LARGEST_STEP = 1e21
"""Change of a parameter in one step, which a run of 10^12 steps may make without an infinity."""

below_one = st.one_of(st.floats(0, 1, exclude_max=True), st.just(math.nextafter(1.0, 0.0)))
gradients = st.one_of(
    st.just(0.0), st.floats(-MAX_CLIP_NORM, MAX_CLIP_NORM), st.floats(-1e-19, 1e-19)
)


@given(
    betas=st.tuples(below_one, below_one),
    rate=st.floats(1e-9, MAX_LEARNING_RATE),
    epsilon=st.one_of(st.just(MIN_EPSILON), st.floats(MIN_EPSILON, 1.0)),
    taken=st.lists(gradients, min_size=1, max_size=30),
    start=st.floats(-1e32, 1e32),
)
def test_no_settings_that_a_manifest_may_have_make_a_parameter_infinite(
    betas: tuple[float, float], rate: float, epsilon: float, taken: list[float], start: float
) -> None:
    config = OptimizerConfig(
        learning_rate=rate, warmup_steps=0, beta1=betas[0], beta2=betas[1], epsilon=epsilon,
        weight_decay=1 / rate / (1 + 1e-9), clip_norm=MAX_CLIP_NORM,
    )  # fmt: skip
    weight = torch.full((2, 2), start)
    zeros = torch.zeros(2, 2)
    optimizer = AdamW(config, [weight], [zeros.clone()], [zeros.clone()], [torch.zeros(())])
    for gradient in taken:
        before = weight.abs().max().item()
        optimizer.step([torch.full((2, 2), gradient)], rate)
        assert weight.abs().max().item() <= before + LARGEST_STEP


def test_a_decay_that_takes_more_than_the_weight_is_refused() -> None:
    with pytest.raises(ValidationError, match=r"2 times weight_decay 0\.6 is more"):
        OptimizerConfig(learning_rate=2.0, warmup_steps=0, weight_decay=0.6)


def test_a_step_gives_the_same_bits_for_any_number_of_threads():
    before = torch.get_num_threads()
    digests = set()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        model = stage()
        run_steps(model, 4)
        digests.add(fingerprint(model).digest)
    torch.set_num_threads(before)
    assert len(digests) == 1


def test_a_step_leaves_the_bound_accumulator_alone():
    model = stage()
    optimizer, layout = make_optimizer(model, ADAMW), FlatLayout.of(model)
    accumulator = layout.new_flat()
    bind_gradients(model, layout, accumulator)
    accumulator.fill_(3.0)
    apply_step(optimizer, layout, noise(layout, 1), 0.01, 0.5)
    assert torch.equal(accumulator, torch.full_like(accumulator, 3.0))
    model(torch.zeros(1, 8, dtype=torch.int64), torch.zeros(1, 8, dtype=torch.int64)).backward()
    assert not torch.equal(accumulator, torch.full_like(accumulator, 3.0))


def test_equal_parameters_have_equal_fingerprints_and_the_norm_is_theirs():
    first, second = fingerprint(stage()), fingerprint(stage())
    assert first == second
    vector = torch.cat([parameter.detach().view(-1) for parameter in stage().parameters()])
    assert first.norm == pytest.approx(vector.double().norm().item(), rel=1e-12)


def test_one_changed_bit_anywhere_changes_the_digest():
    reference = fingerprint(stage()).digest
    for index in range(len(list(stage().parameters()))):
        model = stage()
        with torch.no_grad():
            parameter = list(model.parameters())[index]
            parameter.view(-1).view(torch.int32)[-1] ^= 1
        assert fingerprint(model).digest != reference


def test_one_changed_bit_in_a_moment_or_a_step_count_changes_the_digest():
    model = stage()
    optimizer = run_steps(model, 2)
    reference = fingerprint(model, optimizer)
    for tensors in (optimizer.first_moments, optimizer.second_moments, optimizer.steps):
        for tensor in tensors:
            bits = tensor.view(-1).view(torch.int32)
            bits[-1] ^= 1
            assert fingerprint(model, optimizer).digest != reference.digest
            bits[-1] ^= 1
    assert fingerprint(model, optimizer) == reference
    assert fingerprint(model).norm == reference.norm


def test_swapped_values_and_swapped_parameters_change_the_digest():
    reference = fingerprint(stage()).digest
    model = stage()
    with torch.no_grad():
        flat = model.model.embed_tokens.weight.view(-1)
        flat[[3, 1204]] = flat[[1204, 3]]
    assert fingerprint(model).digest != reference
    model = stage()
    with torch.no_grad():
        layers = model.model.layers
        a, b = layers["0"].mlp.gate_proj.weight, layers["1"].mlp.gate_proj.weight
        a_values = a.clone()
        a.copy_(b)
        b.copy_(a_values)
    assert fingerprint(model).digest != reference


def test_swapped_windows_of_a_large_parameter_change_the_digest():
    wide = MODEL.model_copy(update={"vocabulary_size": 20_000})
    cut = StageRange(first_layer=0, end_layer=0)
    model = Stage(wide, cut, is_first=True, is_last=False)
    initialise(model, 1)
    reference = fingerprint(model).digest
    with torch.no_grad():
        flat = model.model.embed_tokens.weight.view(-1)
        window = 1 << 18
        first = flat[:window].clone()
        flat[:window] = flat[window : 2 * window]
        flat[window : 2 * window] = first
    assert fingerprint(model).digest != reference
