"""One forward pass with its graph, and the gradients of its backward pass."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_shared.model.split_backward import Weights, WeightTape


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward pass with its graph. `entry` is the leaf of the input's gradient: None on stage
    0."""

    entry: Tensor | None
    output: Tensor
    recomputed_layers: int = 0
    offloaded_layers: int = 0
    tape: WeightTape | None = None
    """The tape of the weights' products; None where the backward pass cannot be split."""


@dataclass(frozen=True, slots=True)
class ParameterGradients:
    """The gradients of some parameters, in their order. Those on the tape may have yet to be
    computed."""

    parameters: list[Tensor]
    direct: dict[int, Tensor]
    """The gradients of the parameters that are not on the tape, by the parameter's `id`."""
    tape: WeightTape | None

    @property
    def nbytes(self) -> int:
        """The bytes that are kept for them."""
        kept = 0 if self.tape is None else self.tape.nbytes
        return kept + sum(gradient.nbytes for gradient in self.direct.values())

    def computed(self) -> list[Tensor]:
        """Return all gradients."""
        gradients: list[Tensor] = []
        for parameter in self.parameters:
            gradient = self.direct.get(id(parameter))
            if gradient is None:
                assert self.tape is not None
                gradient = self.tape.gradient(parameter)
            gradients.append(gradient)
        return gradients


def differentiate(
    graph: Graph, output_gradient: Tensor | None, parameters: list[Tensor], weights: Weights,
    while_computing: Callable[[], None],
) -> tuple[Tensor | None, ParameterGradients]:  # fmt: skip
    """Return the gradient of the graph's input (None on stage 0), and those of these parameters.

    `weights` says when the weights' gradients are computed, as far as the graph has a tape.
    """
    tape = graph.tape
    if tape is not None:
        tape.weights = weights
    direct = [parameter for parameter in parameters if tape is None or parameter not in tape]
    inputs = direct if graph.entry is None else [graph.entry, *direct]
    if not parameters and not inputs:
        return None, ParameterGradients([], {}, tape)
    if not inputs:
        # All are on the tape: the backward pass ends at it, and leaves nothing in a `grad`.
        torch.autograd.backward(graph.output, output_gradient)
        while_computing()
        return None, ParameterGradients(parameters, {}, tape)
    gradients = list(torch.autograd.grad(graph.output, inputs, output_gradient))
    while_computing()
    input_gradient = None if graph.entry is None else gradients.pop(0)
    by_parameter = dict(zip(map(id, direct), gradients, strict=True))
    return input_gradient, ParameterGradients(parameters, by_parameter, tape)
