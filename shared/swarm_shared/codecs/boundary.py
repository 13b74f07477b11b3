"""A stage boundary inside a model that is not cut, for the reference.

In a swarm the next stage computes with the decoded activation, and the stage before with the
decoded gradient. The same two functions, put into one process's graph, make it compute what the
swarm computes. Rounding passes the gradient unchanged, as it does in the swarm.

Shape suffixes: B sequences, T positions, D width of the boundary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from swarm_shared.codecs.tensors import round_trip
from swarm_shared.run.codec_sizes import ActivationCodec, GradientCodec


class _StageBoundary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_BTD: Tensor, activation: ActivationCodec, gradient: GradientCodec
    ) -> Tensor:
        ctx.gradient = gradient
        return x_BTD.view_as(x_BTD) if activation == "none" else round_trip(activation, x_BTD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient_BTD,) = gradients
        if ctx.gradient != "none":
            gradient_BTD = round_trip(ctx.gradient, gradient_BTD)
        return gradient_BTD, None, None


def stage_boundary(
    activation: ActivationCodec, gradient: GradientCodec
) -> Callable[[Tensor], Tensor]:
    """Return the function that an activation_BTD passes where the model would be cut."""

    def cross(x_BTD: Tensor) -> Tensor:
        crossed: Tensor = _StageBoundary.apply(  # type: ignore[no-untyped-call]
            x_BTD, activation, gradient
        )
        return crossed

    return cross
