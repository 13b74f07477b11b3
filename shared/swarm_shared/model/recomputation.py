"""Layers whose graph is not kept: autograd holds their input and computes them again when their
backward pass needs what it would have saved (Chen et al. 2016, arXiv 1604.06174).

The second forward pass ends with the last tensor that is needed. `torch.utils.checkpoint` does as
much, but imports torch's compiler on its first call: two seconds of a core and 80 MB for each
process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

_second_pass: ContextVar[bool] = ContextVar("second_pass", default=False)


def is_second_pass() -> bool:
    """Whether a layer is being computed again, in a backward pass."""
    return _second_pass.get()


class _Saved:
    """What autograd holds in place of a saved tensor."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: Tensor | None = None


class _EverythingSavedError(Exception):
    """Ends the second forward pass."""


def recomputed(
    layer: Callable[[Tensor], Tensor],
    x_BTD: Tensor,
    context: Callable[[], AbstractContextManager[object]],
) -> Tensor:
    """Return layer(x_BTD), of whose graph only x_BTD is kept. `context` is entered for the second
    forward pass, as the caller has entered it for the first; both must compute the same."""
    saved: list[weakref.ref[_Saved]] = []

    def keep_nothing(_: Tensor) -> _Saved:
        place = _Saved()
        saved.append(weakref.ref(place))
        return place

    def compute_again(place: _Saved) -> Tensor:
        if place.tensor is None:
            _fill(saved, layer, x_BTD, context)
        assert place.tensor is not None, "both forward passes save the same tensors"
        return place.tensor

    with saved_tensors_hooks(keep_nothing, compute_again):
        return layer(x_BTD)


def _fill(
    saved: list[weakref.ref[_Saved]],
    layer: Callable[[Tensor], Tensor],
    x_BTD: Tensor,
    context: Callable[[], AbstractContextManager[object]],
) -> None:
    """Run the layer forward until it has saved as many tensors as in the first pass.

    A tensor is freed with the node of the graph that holds its place.
    """
    places = iter(saved)
    missing = len(saved)

    def keep(tensor: Tensor) -> None:
        nonlocal missing
        place = next(places)()
        if place is not None:
            # Detached: a tensor that its own node saves would otherwise keep itself alive.
            place.tensor = tensor.detach()
        missing -= 1
        if not missing:
            raise _EverythingSavedError

    again_BTD = x_BTD.detach().requires_grad_(x_BTD.requires_grad)
    # This graph has no backward pass of its own.
    hooks = saved_tensors_hooks(keep, lambda _: torch.empty(0))
    token = _second_pass.set(True)
    try:
        with suppress(_EverythingSavedError), torch.enable_grad(), context(), hooks:
            layer(again_BTD)
    finally:
        _second_pass.reset(token)
