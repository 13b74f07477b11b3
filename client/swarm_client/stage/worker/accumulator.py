"""The sum of one step's gradients, and what is needed to take a microbatch out of it again.

Owns one flat vector on the stage's device, the set of microbatches in it, and per microbatch,
within a byte budget, the tensors from which its gradient can be recomputed. Does not own the
computation of gradients. Within a step the parameters do not change, so a recomputed gradient is
the same gradient. Where gradients are fixed-point counts (`swarm_shared.model.fixed_point_sums`),
subtracting it undoes the addition exactly; where they are summed in float32, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_client.stage.worker.payloads import MicrobatchInput
from swarm_shared.base.types import MicrobatchIndex
from swarm_shared.model import FlatLayout
from swarm_shared.model.fixed_point_sums import Quantum, totals_dtype


@dataclass(frozen=True, slots=True)
class KeptMicrobatch:
    """The inputs of a microbatch, in host memory. No output gradient on the last stage, where the
    targets replace it."""

    inputs: MicrobatchInput
    output_gradient: Tensor | None

    @property
    def nbytes(self) -> int:
        gradient = 0 if self.output_gradient is None else self.output_gradient.nbytes
        return self.inputs.nbytes + gradient


class Accumulator:
    def __init__(
        self, layout: FlatLayout, device: torch.device, kept_budget_bytes: int,
        quantum: Quantum | None = None,
    ) -> None:  # fmt: skip
        self.flat = layout.new_flat(device, totals_dtype(quantum))
        self._layout = layout
        self._quantum = quantum
        self._views = list(layout.views(self.flat))
        self._budget_bytes = kept_budget_bytes
        self._kept_bytes = 0
        self._microbatches: dict[MicrobatchIndex, KeptMicrobatch | None] = {}

    def __contains__(self, microbatch: MicrobatchIndex) -> bool:
        return microbatch in self._microbatches

    def microbatches(self) -> tuple[MicrobatchIndex, ...]:
        return tuple(sorted(self._microbatches))

    def kept(self, microbatch: MicrobatchIndex) -> KeptMicrobatch | None:
        return self._microbatches.get(microbatch)

    def add(
        self, microbatch: MicrobatchIndex, gradients: Sequence[Tensor], kept: KeptMicrobatch
    ) -> None:
        """Add finite gradients, one per parameter, in the layout's order."""
        assert microbatch not in self._microbatches
        if gradients:
            self._add(self._views, gradients)
        self._microbatches[microbatch] = kept
        self._kept_bytes += kept.nbytes
        self._drop_oldest_kept()

    def subtract(
        self, microbatches: Iterable[MicrobatchIndex], gradients: Iterable[Sequence[Tensor]]
    ) -> None:
        """Subtract microbatches, given their recomputed gradients: all, or none if a computation
        fails."""
        total: Tensor | None = None
        for one in gradients:
            if one and total is None:
                total = torch.zeros_like(self.flat)
            if total is not None:
                self._add(list(self._layout.views(total)), one)
        if total is not None:
            self.flat.sub_(total)
        for microbatch in microbatches:
            kept = self._microbatches.pop(microbatch)
            self._kept_bytes -= 0 if kept is None else kept.nbytes
        if not self._microbatches:
            self.flat.zero_()  # removes rounding errors

    def _add(self, views: list[Tensor], gradients: Sequence[Tensor]) -> None:
        if self._quantum is None:
            torch._foreach_add_(views, list(gradients))
        else:
            self._quantum.add(views, gradients)

    def reset(self) -> None:
        self.flat.zero_()
        self._microbatches.clear()
        self._kept_bytes = 0

    def _drop_oldest_kept(self) -> None:
        # Racing and hedged microbatches come last, and those are the ones to take out again.
        for microbatch, kept in self._microbatches.items():
            if self._kept_bytes <= self._budget_bytes:
                return
            if kept is not None:
                self._microbatches[microbatch] = None
                self._kept_bytes -= kept.nbytes
