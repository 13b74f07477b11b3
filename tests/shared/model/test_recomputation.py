"""A layer computed again gives the same gradients, holds nothing else, and loads nothing."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from kits.loaded_modules import loaded
from swarm_shared.model.llama import DecoderLayer, Rotary
from swarm_shared.model.recomputation import recomputed
from swarm_shared.run.model_config import ModelConfig

CONFIG = ModelConfig(
    vocabulary_size=16, hidden_size=16, intermediate_size=32, layers=1, heads=4, key_value_heads=2,
    sequence_length=8, query_key_norm=True, attention_bias="all",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    """What is held in a cycle would be seen only now and then otherwise."""
    gc.disable()
    yield
    gc.enable()


def layer_and_input() -> tuple[partial[Tensor], list[nn.Parameter], Tensor]:
    torch.manual_seed(3)
    layer = DecoderLayer(CONFIG)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.2)
    x_BTD = torch.randn(2, 8, 16, requires_grad=True)
    return partial(layer, rotary=Rotary(CONFIG)), list(layer.parameters()), x_BTD


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wants_input", [False, True])
def test_every_gradient_is_that_of_a_kept_graph_to_the_bit(
    dtype: torch.dtype, wants_input: bool
) -> None:
    layer, parameters, leaf_BTD = layer_and_input()
    wanted = [leaf_BTD, *parameters] if wants_input else parameters
    found: list[tuple[Tensor, ...]] = []

    def cast() -> torch.autocast:
        return torch.autocast("cpu", dtype, enabled=dtype is torch.bfloat16)

    for again in (False, True):
        x_BTD = leaf_BTD if wants_input else leaf_BTD.detach()
        x_BTD = x_BTD.to(dtype)
        with cast():
            output_BTD = recomputed(layer, x_BTD, cast) if again else layer(x_BTD)
        gradients = torch.autograd.grad(output_BTD.float().pow(2).sum(), wanted)
        found.append((output_BTD, *gradients))
    assert all(map(torch.equal, *found))


def test_only_the_input_is_kept_and_nothing_after_the_backward_pass() -> None:
    made: list[weakref.ref[Tensor]] = []

    def layer(x: Tensor) -> Tensor:
        wide = x.exp()
        made.append(weakref.ref(wide))
        return wide.sin() * 2

    x = torch.randn(4, requires_grad=True)
    output = recomputed(layer, x, nullcontext)
    assert [one() for one in made] == [None]
    torch.autograd.grad(output.sum(), x)
    assert [one() for one in made] == [None, None]


def test_of_the_parameters_nothing_is_kept_either() -> None:
    layer, parameters, x_BTD = layer_and_input()
    output_BTD = recomputed(layer, x_BTD, nullcontext)
    torch.autograd.grad(output_BTD.sum(), [x_BTD, *parameters])
    held = weakref.ref(output_BTD)
    del output_BTD
    assert held() is None


def test_the_second_pass_ends_with_the_last_tensor_that_is_needed() -> None:
    passed: list[str] = []

    def layer(x: Tensor) -> Tensor:
        passed.append("begun")
        needed = x.sin()
        passed.append("needed")
        done = needed + 1
        passed.append("ended")
        return done

    x = torch.randn(4, requires_grad=True)
    torch.autograd.grad(recomputed(layer, x, nullcontext).sum(), x)
    assert passed == ["begun", "needed", "ended", "begun"]


def test_an_error_in_the_second_pass_ends_the_backward_pass() -> None:
    calls = 0

    def layer(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise KeyError("discarded")
        return x.sin()

    x = torch.randn(4, requires_grad=True)
    output = recomputed(layer, x, nullcontext)
    with pytest.raises(KeyError, match="discarded"):
        torch.autograd.grad(output.sum(), x)


def test_torchs_compiler_is_not_imported() -> None:
    """It takes two seconds of a core, which each worker would pay for its first microbatch."""
    code = """
from contextlib import nullcontext
import torch
from swarm_shared.model.recomputation import recomputed
x = torch.ones(4, requires_grad=True)
torch.autograd.grad(recomputed(torch.sin, x, nullcontext).sum(), x)
"""
    assert loaded(code, ["torch._dynamo"]) == []
