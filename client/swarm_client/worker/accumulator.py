"""The gradients of one step, summed, and what is needed to take one of them out again.

Owns one flat float32 vector on the stage's device, the set of microbatches in it, and per
microbatch, while a byte budget lasts, the tensors from which its gradient can be computed again.
Does not own computing gradients. Within a step the parameters that it is computed with do not
change, so a gradient that is computed again is the same gradient, and subtracting it undoes the
addition up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_client.worker.transfer import MicrobatchInput
from swarm_shared.model import FlatLayout
from swarm_shared.types import MicrobatchIndex


@dataclass(frozen=True, slots=True)
class KeptMicrobatch:
    """All in host memory. No output gradient on the last stage, whose targets serve."""

    inputs: MicrobatchInput
    output_gradient: Tensor | None

    @property
    def nbytes(self) -> int:
        gradient = 0 if self.output_gradient is None else self.output_gradient.nbytes
        return self.inputs.nbytes + gradient


class Accumulator:
    def __init__(self, layout: FlatLayout, device: torch.device, kept_budget_bytes: int) -> None:
        self.flat = layout.new_flat(device)
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
            torch._foreach_add_(self._views, list(gradients))
        self._microbatches[microbatch] = kept
        self._kept_bytes += kept.nbytes
        self._forget_oldest()

    def subtract(
        self, microbatches: Iterable[MicrobatchIndex], gradients: Sequence[Tensor]
    ) -> None:
        """Take out microbatches whose gradients sum up to `gradients`."""
        if gradients:
            torch._foreach_sub_(self._views, list(gradients))
        for microbatch in microbatches:
            kept = self._microbatches.pop(microbatch)
            self._kept_bytes -= 0 if kept is None else kept.nbytes
        if not self._microbatches:
            self.flat.zero_()  # leave no rounding behind

    def reset(self) -> None:
        self.flat.zero_()
        self._microbatches.clear()
        self._kept_bytes = 0

    def _forget_oldest(self) -> None:
        # Those that raced or were hedged came last, and are what has to go out again.
        for microbatch, kept in self._microbatches.items():
            if self._kept_bytes <= self._budget_bytes:
                return
            if kept is not None:
                self._microbatches[microbatch] = None
                self._kept_bytes -= kept.nbytes
