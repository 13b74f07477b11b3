"""The flat gradient vector."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from swarm_shared.model.flat_gradients import (
    FlatLayout,
    bind_gradients,
    global_norm,
    ordered_sum_of_squares,
    squared_norm,
)
from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import EMBEDDING_NAME, Stage
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ModelConfig

MODEL = ModelConfig(
    vocabulary_size=40, hidden_size=16, intermediate_size=24, layers=2, heads=2,
    key_value_heads=1, sequence_length=8, tie_embeddings=True,
)  # fmt: skip


def stage(start: int = 0, end: int = 1) -> Stage:
    cut = StageRange(first_layer=start, end_layer=end)
    built = Stage(MODEL, cut, is_first=start == 0, is_last=end == MODEL.layers)
    initialise(built, 1)
    return built


def backward(first: Stage) -> None:
    tokens = torch.arange(16).view(2, 8) % MODEL.vocabulary_size
    first(tokens).square().sum().backward()


def test_the_layout_holds_own_parameters_then_tied_ones_without_gaps():
    layout = FlatLayout.of(stage())
    names = [entry.name for entry in layout.entries]
    assert names[-1] == EMBEDDING_NAME
    assert layout.tied_count == MODEL.vocabulary_size * MODEL.hidden_size
    assert layout.entries[0].offset == 0
    assert layout.entries[-1].offset == layout.own_count
    for before, after in pairwise(layout.entries):
        assert before.offset + before.count == after.offset
    assert layout.count == sum(parameter.numel() for parameter in stage().parameters())


def test_bound_gradients_accumulate_in_the_flat_vector_itself():
    plain, bound = stage(), stage()
    layout = FlatLayout.of(bound)
    flat = layout.new_flat()
    bind_gradients(bound, layout, flat)
    for _ in range(3):
        backward(plain)
        backward(bound)
    for (_, parameter), view in zip(plain.all_parameters(), layout.views(flat), strict=True):
        assert torch.equal(parameter.grad, view)
    assert flat.any()
    flat.zero_()
    assert all(not parameter.grad.any() for parameter in bound.parameters())


def test_a_flat_vector_of_another_stage_is_our_own_mistake():
    layout = FlatLayout.of(stage())
    with pytest.raises(AssertionError):
        list(layout.views(torch.zeros(layout.count + 1)))


@pytest.mark.parametrize("count", [1, 5, 1 << 18, (1 << 18) + 1, 1_000_003])
def test_the_sum_of_squares_is_right_and_does_not_depend_on_threads(count):
    values = torch.randn(count, generator=torch.Generator().manual_seed(count)) * 1e3
    before = torch.get_num_threads()
    sums = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        sums.append(ordered_sum_of_squares(values).item())
    torch.set_num_threads(before)
    assert len(set(sums)) == 1
    exact = math.fsum(value * value for value in values.tolist())
    assert sums[0] == pytest.approx(exact, rel=1e-14)


def test_the_sum_of_squares_of_nothing_is_zero():
    assert ordered_sum_of_squares(torch.zeros(0)).item() == 0


def test_a_non_finite_gradient_shows_in_the_norm():
    layout = FlatLayout.of(stage())
    for bad in (float("nan"), float("inf")):
        flat = layout.new_flat()
        flat[5] = bad
        assert not math.isfinite(squared_norm(flat))


def test_the_global_norm_does_not_depend_on_the_order_of_the_stages():
    parts = [0.1, 1e17, 3.0, 1e-9, 7e16]
    assert global_norm(parts) == global_norm(parts[::-1])
    assert global_norm([9.0, 16.0]) == 5.0
