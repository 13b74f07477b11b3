"""Learning rate and clip factor."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.errors import SwarmError
from swarm_shared.run.manifest import OptimizerConfig
from swarm_shared.run.schedule import clip_factor, learning_rate


def config(warmup: int, ratio: float = 0.1) -> OptimizerConfig:
    return OptimizerConfig(
        learning_rate=0.01, warmup_steps=warmup, minimum_learning_rate_ratio=ratio
    )


def test_the_rate_rises_linearly_peaks_after_the_warm_up_and_ends_at_the_minimum():
    rates = [learning_rate(config(10), 100, step) for step in range(1, 101)]
    assert rates[:10] == pytest.approx([0.001 * step for step in range(1, 11)])
    assert max(rates) == rates[9] == 0.01
    assert rates[99] == pytest.approx(0.001)
    assert rates[54] == pytest.approx((0.01 + 0.001) / 2)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_without_warm_up_the_first_step_has_the_peak_rate():
    assert learning_rate(config(0), 100, 1) == 0.01
    assert learning_rate(config(0), 100, 100) == pytest.approx(0.001)


@given(
    warmup=st.integers(0, 50), total=st.integers(1, 60), step=st.integers(1, 200),
    ratio=st.floats(0, 1),
)  # fmt: skip
def test_the_rate_is_never_above_the_peak_and_after_warm_up_never_below_the_minimum(
    warmup, total, step, ratio
):
    rate = learning_rate(config(warmup, ratio), total, step)
    assert 0 <= rate <= 0.01
    if step > warmup:
        assert rate >= 0.01 * ratio * (1 - 1e-12)


@given(warmup=st.integers(0, 50), total=st.integers(1, 60), ratio=st.floats(0, 1))
def test_after_the_warm_up_the_rate_never_rises_again_not_even_beyond_the_last_step(
    warmup, total, ratio
):
    steps = range(max(1, warmup), 3 * total + warmup + 2)
    rates = [learning_rate(config(warmup, ratio), total, step) for step in steps]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.01 * ratio)


def test_a_norm_below_the_bound_changes_nothing_and_one_above_is_scaled_to_it():
    assert clip_factor(0.5, 1.0) == 1.0
    assert clip_factor(0.0, 1.0) == 1.0
    assert clip_factor(4.0, 1.0) * 4.0 == pytest.approx(1.0, rel=1e-6)


@pytest.mark.parametrize("clip_norm", [1.0, 1e-6])
def test_the_factor_is_that_of_torch_also_where_its_epsilon_counts(clip_norm):
    parameter = torch.zeros(2, dtype=torch.float64)
    parameter.grad = torch.tensor([3.0, 4.0], dtype=torch.float64) * clip_norm
    torch.nn.utils.clip_grad_norm_([parameter], clip_norm)
    expected = parameter.grad[0].item() / (3 * clip_norm)
    assert clip_factor(5.0 * clip_norm, clip_norm) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("norm", [float("nan"), float("inf"), -1.0])
def test_a_norm_that_is_no_finite_number_is_refused(norm):
    with pytest.raises(SwarmError, match="lower the learning rate"):
        clip_factor(norm, 1.0)
