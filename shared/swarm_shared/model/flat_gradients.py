"""Gradients as one flat float32 vector, which is accumulated, averaged and applied.

Owns the layout (own parameters in order, then tied ones), the views into it, and the norm. Does not
own the all-reduce. Accumulated gradients are SUMS over tokens; they are divided by the step's token
count just before the norm is taken.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_shared.model.llama import Stage

_WINDOW_ELEMENTS = 1 << 18


@dataclass(frozen=True, slots=True)
class FlatEntry:
    name: str
    shape: tuple[int, ...]
    offset: int
    count: int


@dataclass(frozen=True, slots=True)
class FlatLayout:
    """Position of each parameter in the flat vector: [0, own_count) own, [own_count, count)
    tied."""

    entries: tuple[FlatEntry, ...]
    own_count: int
    count: int

    @classmethod
    def of(cls, stage: Stage) -> FlatLayout:
        entries: list[FlatEntry] = []
        offset = 0
        for name, parameter in stage.all_parameters():
            entries.append(FlatEntry(name, tuple(parameter.shape), offset, parameter.numel()))
            offset += parameter.numel()
        own_count = sum(parameter.numel() for _, parameter in stage.own_parameters())
        return cls(tuple(entries), own_count, offset)

    @property
    def tied_count(self) -> int:
        return self.count - self.own_count

    def new_flat(
        self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
    ) -> Tensor:
        return torch.zeros(self.count, dtype=dtype, device=device)

    def views(self, flat: Tensor) -> Iterator[Tensor]:
        """Yield the flat vector's parts in the parameters' shapes, sharing its memory."""
        assert flat.shape == (self.count,), "the flat vector belongs to another layout"
        for entry in self.entries:
            yield flat[entry.offset : entry.offset + entry.count].view(entry.shape)


def bind_gradients(stage: Stage, layout: FlatLayout, flat: Tensor) -> None:
    """Make autograd accumulate straight into `flat`, on the stage's device, without a copy."""
    assert flat.device == stage.device
    for (_, parameter), view in zip(stage.all_parameters(), layout.views(flat), strict=True):
        parameter.grad = view


def squared_norm(flat: Tensor) -> float:
    """Return the sum of squares in float64, the same to the bit for any number of threads and any
    device."""
    return float(ordered_sum_of_squares(flat).item())


def ordered_sum_of_squares(values: Tensor) -> Tensor:
    """Return the sum of squares of a flat float32 tensor as a float64 scalar tensor in host memory.

    `Tensor.sum` adds in an order that depends on threads and vector width. Here lanes are added
    element by element, window after window, then halved: every addition is fixed. The square of a
    float32 is exact in float64, so a fused multiply-add changes nothing either. It is taken on the
    host wherever the values are: not all accelerators have float64.
    """
    lanes = torch.zeros(_WINDOW_ELEMENTS, dtype=torch.float64)
    for window in torch.split(values.detach().cpu(), _WINDOW_ELEMENTS):
        wide = window.double()
        lanes[: wide.numel()].addcmul_(wide, wide)
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    return lanes[0]


def global_norm(squared_norms: list[float]) -> float:
    """Return the model's norm from its stages' squared norms, rounded once whatever their order."""
    return math.sqrt(math.fsum(squared_norms))
