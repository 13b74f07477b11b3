"""A split backward pass gives the gradients that autograd gives, to the bit."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import Stage
from swarm_shared.model.split_backward import Weights, WeightTape, product
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ComputeDtype, ModelConfig, RopeScaling


def config(
    heads: int, head_size: int, bottlenecks: tuple[int, ...] = (), **blocks: Any
) -> ModelConfig:
    return ModelConfig(
        vocabulary_size=61, hidden_size=heads * head_size, intermediate_size=40, layers=3,
        heads=heads, key_value_heads=heads // 2, sequence_length=24, tie_embeddings=True,
        bottleneck_size=4 if bottlenecks else 0, bottlenecks=bottlenecks, **blocks,
    )  # fmt: skip


BLOCKS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries(
        {
            "attention_head_size": st.sampled_from([0, 6, 16]),
            "attention_bias": st.sampled_from(["none", "all"]),
            "query_key_norm": st.booleans(),
            "rope_scaling": st.sampled_from(
                [RopeScaling(), RopeScaling(kind="llama3", factor=8, original_length=32)]
            ),
        }
    ),
    st.just({"attention_bias": "qkv"}),
)


def stage_of(model: ModelConfig, first: int, end: int, dtype: ComputeDtype) -> Stage:
    cut = StageRange(first_layer=first, end_layer=end)
    stage = Stage(model, cut, is_first=first == 0, is_last=end == model.layers, dtype=dtype)
    initialise(stage, 7)
    with torch.no_grad():
        for name, parameter in stage.named_parameters():
            if name.endswith(".bias"):
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()))
    return stage


def inputs_of(stage: Stage, sequences: int, length: int, generator: torch.Generator):
    """Input and targets; the input is a leaf with a gradient where it is an activation."""
    tokens = torch.randint(0, 61, (sequences, length), generator=generator)
    targets = torch.randint(0, 61, (sequences, length), generator=generator)
    if stage.is_first:
        return tokens, None
    width = stage.config.hidden_size
    if stage.stage_range.first_layer in stage.config.bottlenecks:
        width = stage.config.bottleneck_size
    x = torch.randn(sequences, length, width, generator=generator).to(stage.compute_dtype)
    return x.requires_grad_(), targets if stage.is_last else None


class HostOfOneMemory:
    """Provides weights of host memory, which the device shares."""

    def __init__(self) -> None:
        self.passes = [0, 0]
        """Products forward, and in the backward pass."""

    @contextmanager
    def on_device(self, weight: torch.Tensor, *, in_backward: bool) -> Iterator[torch.Tensor]:
        self.passes[in_backward] += 1
        yield weight.detach()

    def keep_gradient(self, gradient: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: gradient


def differentiated(stage: Stage, inputs, targets, slope, tape: WeightTape | None, again: int = 0):
    """The gradients of the input and of every parameter, by autograd or with the tape."""
    parameters = [parameter for _, parameter in stage.all_parameters()]
    entry = [] if stage.is_first else [inputs]
    if tape is None:
        output = stage(inputs, targets)
        return torch.autograd.grad(output, entry + parameters, slope)
    with tape.recording():
        output = stage(inputs, targets, again)
    direct = [parameter for parameter in parameters if parameter not in tape]
    found = list(torch.autograd.grad(output, entry + direct, slope))
    own = dict(zip(map(id, direct), found[len(entry) :], strict=True))
    return found[: len(entry)] + [
        own[id(p)] if id(p) in own else tape.gradient(p) for p in parameters
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bottlenecks", [(), (1, 2)])
@pytest.mark.parametrize("cut", [(0, 1), (1, 2), (2, 3)])
@settings(max_examples=20)
@given(data=st.data())
def test_both_halves_together_give_autograds_gradients(
    dtype: ComputeDtype, bottlenecks: tuple[int, ...], cut: tuple[int, int], data: st.DataObject
) -> None:
    heads = data.draw(st.sampled_from([2, 4]), "heads")
    head_size = data.draw(st.sampled_from([4, 8, 10]), "head size")
    sequences = data.draw(st.integers(1, 3), "sequences")
    length = data.draw(st.integers(1, 24), "length")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32), "seed"))
    weights = data.draw(st.sampled_from([Weights.NOW, Weights.LATER]), "weights")
    on_host = data.draw(st.sets(st.integers(0, 6)), "matrices in host memory")
    again = data.draw(st.sampled_from([0, 1]), "layers that are computed again")
    blocks = data.draw(BLOCKS, "blocks")
    stage = stage_of(config(heads, head_size, bottlenecks, **blocks), *cut, dtype)
    inputs, targets = inputs_of(stage, sequences, length, generator)
    slope = None
    if not stage.is_last:
        slope = torch.randn(stage(inputs, targets).shape, generator=generator)
        slope = slope.to(stage.compute_dtype)
    tape = WeightTape(only_of_host=bool(again))
    tape.weights = weights

    expected = differentiated(stage, inputs, targets, slope, None)
    host = HostOfOneMemory()
    for number, matrix in enumerate(stage.matrices()):
        matrix.host_weights = host if number in on_host else None
    found = differentiated(stage, inputs, targets, slope, tape, again)

    assert host.passes[0] == len(on_host)
    assert host.passes[1] >= len(on_host)
    assert not any(gradient.requires_grad for gradient in found)
    assert all(one.dtype == other.dtype for one, other in zip(expected, found, strict=True))
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_a_tape_keeps_the_factors_of_each_product() -> None:
    first, second = torch.randn(8, 4).requires_grad_(), torch.randn(8, 4).requires_grad_()
    x = torch.randn(3, 4, requires_grad=True)
    tape = WeightTape()
    tape.weights = Weights.LATER
    with tape.recording():
        output = product(x, first) + product(x, second)
    torch.autograd.grad(output, [x], torch.ones(3, 8))

    # The input once, though it is a factor of both; the output's gradient as well.
    assert tape.nbytes == 3 * 4 * 4 + 3 * 8 * 4
    assert torch.equal(tape.gradient(first), tape.gradient(first))


def test_the_tape_and_the_graph_are_freed_without_a_garbage_collection() -> None:
    first, second = torch.randn(8, 4).requires_grad_(), torch.randn(4, 8).requires_grad_()
    tape = WeightTape()
    tape.weights = Weights.LATER
    with tape.recording():
        inner = product(torch.randn(3, 4, requires_grad=True), first)
        outer = product(inner, second)
    gc.disable()
    try:
        torch.autograd.grad(outer, [inner], torch.ones(3, 4), retain_graph=True)
        tape.gradient(second)
        gone = weakref.ref(inner), weakref.ref(tape)
        del inner, outer, tape
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


def test_without_weights_nothing_is_kept() -> None:
    weight = torch.randn(8, 4).requires_grad_()
    x = torch.randn(3, 4, requires_grad=True)
    tape = WeightTape()
    tape.weights = Weights.NEVER
    with tape.recording():
        output = product(x, weight)
    torch.autograd.grad(output, [x], torch.ones(3, 8))
    assert tape.nbytes == 0
    with pytest.raises(KeyError):
        tape.gradient(weight)


def test_a_weight_in_two_products_is_refused() -> None:
    weight = torch.randn(4, 4).requires_grad_()
    with WeightTape().recording(), pytest.raises(ValueError, match="two products"):
        product(product(torch.randn(3, 4), weight), weight)
