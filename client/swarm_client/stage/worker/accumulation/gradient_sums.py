"""The sums of a step's gradients over microbatches, on a stage's device.

In runs with exact sums a gradient is added in whole counts (`swarm_shared.model.fixed_point_sums`).
The sums of a step need 53 bits, and a microbatch or a few need less than 32. So the counts are kept
in int32 on the device, half of the memory of a float64, which some devices do not have at all. What
a parameter has in int32 goes to float64 in host memory before it could overflow. Integers below
2^53 are exact in float64, so the sums are the same whenever that happens.

Does not own which microbatches are in the sums
(`swarm_client.stage.worker.accumulation.accumulator`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from swarm_shared.model import FlatLayout
from swarm_shared.model.fixed_point_sums import Quantum
from swarm_shared.model.host_copies import HostCopies

INT32_MAX = 2.0**31 - 1

See = Callable[[Tensor], None]
"""Called with each piece of what is added, float32, in order."""


class GradientSums(Protocol):
    """One sum for each element of a stage's parameters."""

    def add(
        self, gradients: Sequence[Tensor], see: See | None = None, *, in_place: bool = False
    ) -> None:
        """Add one microbatch's gradients, one tensor for each parameter.

        What `see` is called with is valid until it returns, or for good if it is made `in_place`:
        in the gradients' own memory, which are gradients no more.
        """

    def zeros(self) -> Self:
        """Return new sums of the same parameters."""

    def subtract(self, other: Self) -> None:
        """Subtract other sums of the same parameters."""

    def write_to(self, flat: Tensor) -> None:
        """Write all sums to a flat vector in host memory."""

    def clear(self) -> None:
        """Make all sums zero."""


class FloatSums:
    """Sums in float32, which depend on the order of the additions in their last bits."""

    def __init__(self, layout: FlatLayout, device: torch.device) -> None:
        self._layout = layout
        self._flat = layout.new_flat(device)
        self._views = list(layout.views(self._flat))

    def add(
        self, gradients: Sequence[Tensor], see: See | None = None, *, in_place: bool = False
    ) -> None:
        device = self._flat.device
        torch._foreach_add_(self._views, [gradient.to(device) for gradient in gradients])
        if see is not None:
            for gradient in gradients:
                see(gradient)

    def zeros(self) -> FloatSums:
        return FloatSums(self._layout, self._flat.device)

    def subtract(self, other: FloatSums) -> None:
        self._flat.sub_(other._flat)

    def write_to(self, flat: Tensor) -> None:
        flat.copy_(self._flat)

    def clear(self) -> None:
        self._flat.zero_()


class CountedSums:
    """Sums in whole counts, exact whatever was added and taken out in which order."""

    def __init__(self, layout: FlatLayout, device: torch.device, quantum: Quantum) -> None:
        self._layout = layout
        self._quantum = quantum
        self._counts = layout.new_flat(device, torch.int32)
        self._views = [view.view(-1) for view in layout.views(self._counts)]
        self._bounds = [0.0] * len(self._views)
        """Upper bounds of the magnitudes in each view."""
        self._spilled: dict[int, Tensor] = {}
        """Counts in float64, in host memory, by the number of the parameter."""

    def add(
        self, gradients: Sequence[Tensor], see: See | None = None, *, in_place: bool = False
    ) -> None:
        bounds = self._quantum.bounds(gradients)
        for number, (gradient, bound) in enumerate(zip(gradients, bounds, strict=True)):
            if bound > INT32_MAX:
                target = self._spilled_of(number)
            else:
                self._make_room(number, bound)
                target = self._views[number]
            start = 0
            device = self._counts.device
            for counts in self._quantum.each_counts((gradient,), device, in_place=in_place):
                end = start + counts.numel()
                target[start:end].add_(counts.to(target))
                start = end
                if see is not None:
                    see(counts)

    def zeros(self) -> CountedSums:
        return CountedSums(self._layout, self._counts.device, self._quantum)

    def subtract(self, other: CountedSums) -> None:
        for number, bound in enumerate(other._bounds):
            self._make_room(number, bound)
            self._views[number].sub_(other._views[number])
        for number, spilled in other._spilled.items():
            self._spilled_of(number).sub_(spilled)

    def _make_room(self, number: int, bound: float) -> None:
        """Prepare a parameter's int32 for counts of at most this magnitude."""
        if self._bounds[number] + bound > INT32_MAX:
            self._spill(number)
        self._bounds[number] += bound

    def _spill(self, number: int) -> None:
        view = self._views[number]
        self._spilled_of(number).add_(view.cpu())
        view.zero_()
        self._bounds[number] = 0.0

    def _spilled_of(self, number: int) -> Tensor:
        if number not in self._spilled:
            size = self._views[number].numel()
            self._spilled[number] = torch.zeros(size, dtype=torch.float64)
        return self._spilled[number]

    def write_to(self, flat: Tensor) -> None:
        copies = HostCopies(self._views)
        for number, (view, target) in enumerate(
            zip(self._views, self._layout.views(flat), strict=True)
        ):
            # On the host: the device would convert to float64 in its own memory.
            target.view(-1).copy_(copies.of(view))
            if number in self._spilled:
                target.view(-1).add_(self._spilled[number])

    def clear(self) -> None:
        self._counts.zero_()
        self._bounds = [0.0] * len(self._views)
        self._spilled.clear()


def gradient_sums(
    layout: FlatLayout, device: torch.device, quantum: Quantum | None
) -> GradientSums:
    """Return zero sums: counted ones if the run has a quantum."""
    if quantum is None:
        return FloatSums(layout, device)
    return CountedSums(layout, device, quantum)
