"""A backward pass in two halves: first the gradients that other stages wait for, later those of the
weights.

The gradient of a product's input is needed by the stage before, that of its weight only at the end
of the step; both are as much work. Split, the second half fills the time in which a stage would
wait (zero bubble pipelines, Qi et al. 2024, arXiv 2401.10241, section 2). Every product is
the one that autograd makes, so that the gradients are equal to the bit.

A tape holds, from the first half to the second, the input of each product and the gradient of its
output. Parameters that are no factor of a product (norms, biases, the token table) are
differentiated in the first half: the gradient of a bias is a sum over tokens, which costs nothing
beside the products.

A weight may lie in host memory (`HostWeights`), and is on the device for its products only; its
gradient goes to host memory as soon as it is known. Then every backward pass needs a tape, as
autograd takes no gradient on another device than a parameter's.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own convention)
from torch import Tensor

from swarm_shared.model.recomputation import is_second_pass

_recording: ContextVar[WeightTape | None] = ContextVar("recording", default=None)


class Weights(enum.Enum):
    """What a backward pass does about the gradients of weights."""

    NOW = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class HostWeights(Protocol):
    """Weights in host memory, which come to the device when they are needed."""

    def on_device(self, weight: Tensor, *, in_backward: bool) -> AbstractContextManager[Tensor]:
        """Provide a weight on the device, for what is handed to the device within."""

    def keep_gradient(self, gradient: Tensor) -> Callable[[], Tensor]:
        """Begin to copy a weight's gradient to host memory; return what waits for its end."""


class WeightTape:
    """The products of one forward pass, and what its backward pass leaves of them."""

    def __init__(self, *, only_of_host: bool = False) -> None:
        self.only_of_host = only_of_host
        """Whether only products with weights in host memory are recorded: those of layers that are
        computed again are known when it is too late to leave them for later."""
        self.weights = Weights.NOW
        """What the backward pass shall do; set before it."""
        self._recorded: set[int] = set()
        self._factors: dict[int, tuple[Tensor, Tensor, HostWeights | None]] = {}
        """By the weight's `id`: the product's input, the gradient of its output, and what provides
        the weight."""
        self._gradients: dict[int, Tensor] = {}
        self._leaving: dict[int, Callable[[], Tensor]] = {}
        """By the weight's `id`: waits until a gradient is in host memory."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record the products that are computed forward within."""
        token = _recording.set(self)
        try:
            yield
        finally:
            _recording.reset(token)

    def __contains__(self, weight: Tensor) -> bool:
        """Whether the weight is a factor of a recorded product."""
        return id(weight) in self._recorded

    @property
    def nbytes(self) -> int:
        """The bytes that the tape keeps for later."""
        storages = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for x, gradient, _ in self._factors.values()
            for tensor in (x, gradient)
        }
        return sum(storages.values())

    def gradient(self, weight: Tensor) -> Tensor:
        """Return the gradient of a recorded weight after the backward pass, computed now if it was
        left for later. It is in host memory if the weight is."""
        known = self._gradients.get(id(weight))
        if known is not None:
            return known
        arrived = self._leaving.get(id(weight))
        if arrived is not None:
            return arrived()
        x, gradient, host = self._factors[id(weight)]
        found = _weight_gradient(x, weight, gradient)
        return found if host is None else host.keep_gradient(found)()

    def record(self, weight: Tensor) -> None:
        """Record a product. ValueError for a weight that is in one already: its gradient would be a
        sum."""
        if id(weight) in self._recorded:
            raise ValueError("a weight is in two products of one forward pass")
        self._recorded.add(id(weight))

    def passed(
        self, key: int, weight: Tensor, x: Tensor, gradient: Tensor,
        host: HostWeights | None = None,
    ) -> None:  # fmt: skip
        """The backward pass has come to the product with the weight of this `id`."""
        if self.weights is Weights.NOW:
            found = _weight_gradient(x, weight, gradient)
            if host is None:
                self._gradients[key] = found
            else:
                self._leaving[key] = host.keep_gradient(found)
        elif self.weights is Weights.LATER:
            # Detached: the graph holds this tape, which would otherwise hold the graph for ever.
            self._factors[key] = x.detach(), gradient.detach(), host


def product(x: Tensor, weight: Tensor, host: HostWeights | None = None) -> Tensor:
    """Return `x @ weight.t()`, recorded where a tape records. A frozen weight has no gradient, and
    is never recorded. `host` provides the weight if it lies in host memory."""
    tape = _recording.get() if weight.requires_grad else None
    if host is None and tape is not None and tape.only_of_host:
        tape = None
    if tape is not None:
        tape.record(weight)
    output: Tensor
    if host is not None:
        output = _HostProduct.apply(x, weight, host, tape)  # type: ignore[no-untyped-call]
    elif not weight.requires_grad:
        output = _FrozenProduct.apply(x, weight)  # type: ignore[no-untyped-call]
    elif tape is not None:
        output = _Product.apply(x, weight, tape)  # type: ignore[no-untyped-call]
    else:
        output = F.linear(x, weight)
    return output


class _Product(torch.autograd.Function):
    """A product whose backward pass gives the gradient of the input, and the tape the rest."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tape: WeightTape) -> Tensor:
        ctx.save_for_backward(x, weight)
        # What is saved may come back as another tensor (`saved_tensors_hooks`).
        ctx.tape, ctx.key = tape, id(weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight = ctx.saved_tensors
        (gradient,) = gradients
        ctx.tape.passed(ctx.key, weight, x, gradient)
        if not ctx.needs_input_grad[0]:
            return None, None, None
        return (gradient @ weight.to(gradient.dtype)).to(x.dtype), None, None


class _FrozenProduct(torch.autograd.Function):
    """A product of which only the input has a gradient. Only the weight itself is saved: autograd's
    own product would, in bfloat16, keep a copy of the weight with every graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.input_dtype = x.dtype
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (weight,), (gradient,) = ctx.saved_tensors, gradients
        return (gradient @ weight.to(gradient.dtype)).to(ctx.input_dtype), None


class _HostProduct(torch.autograd.Function):
    """A product whose weight is on the device only while it is computed, forward and backward."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, host: HostWeights, tape: WeightTape | None
    ) -> Tensor:
        # A layer that is computed again saves as many tensors as in the first pass.
        ctx.save_for_backward(*([x] if weight.requires_grad else []))
        ctx.weight, ctx.host, ctx.tape, ctx.input_dtype = weight, host, tape, x.dtype
        with host.on_device(weight, in_backward=is_second_pass()) as there:
            return F.linear(x, there)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        for x in ctx.saved_tensors:
            ctx.tape.passed(id(ctx.weight), ctx.weight, x, gradient, ctx.host)
        if not ctx.needs_input_grad[0]:
            return None, None, None, None
        with ctx.host.on_device(ctx.weight, in_backward=True) as there:
            found = (gradient @ there.to(gradient.dtype)).to(ctx.input_dtype)
        return found, None, None, None


@torch.no_grad()
def _weight_gradient(x: Tensor, weight: Tensor, gradient: Tensor) -> Tensor:
    rows = gradient.flatten(0, -2)
    found = rows.t() @ x.to(gradient.dtype).flatten(0, -2)
    return found.to(weight.dtype)
