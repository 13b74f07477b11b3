"""The sum of one step's gradients, and what is needed to take a microbatch out of it again.

Owns one flat vector on the stage's device, and beside it the set of microbatches in it, with the
tensors from which their gradients can be recomputed
(`swarm_shared.volunteer_rules.accumulated_set`). Does not own the computation of gradients. Within
a step the parameters do not change, so a recomputed gradient is the same gradient. Where gradients
are fixed-point counts (`swarm_shared.model.fixed_point_sums`), subtracting it undoes the addition
exactly; where they are summed in float32, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_client.stage.worker.digests import GradientDigest
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex
from swarm_shared.model import FlatLayout
from swarm_shared.model.fixed_point_sums import Quantum, totals_dtype
from swarm_shared.volunteer_rules.accumulated_set import AccumulatedSet, Removal


@dataclass(frozen=True, slots=True)
class KeptMicrobatch:
    """The inputs of a microbatch as they crossed the wire, from which it is computed again. No
    output gradient on the last stage, where the targets replace it."""

    inputs: bytearray
    """The input, on the last stage followed by the targets."""
    output_gradient: bytearray

    @property
    def nbytes(self) -> int:
        return len(self.inputs) + len(self.output_gradient)


class Accumulator:
    def __init__(
        self, layout: FlatLayout, device: torch.device, kept_budget_bytes: int,
        quantum: Quantum | None = None,
    ) -> None:  # fmt: skip
        self.flat = layout.new_flat(device, totals_dtype(quantum))
        self.contents: AccumulatedSet[KeptMicrobatch] = AccumulatedSet(kept_budget_bytes)
        """The microbatches that `flat` contains."""
        self.transcripts: dict[MicrobatchIndex, Transcript] = {}
        """What was exchanged for each of them, as long as it is in `flat`."""
        self._layout = layout
        self._quantum = quantum
        self._views = list(layout.views(self.flat))

    def add(
        self, microbatch: MicrobatchIndex, gradients: Sequence[Tensor], kept: KeptMicrobatch
    ) -> str:
        """Add finite gradients, one per parameter, in the layout's order; return the digest of what
        was added."""
        self.contents.add(microbatch, kept)
        digest = GradientDigest()
        if gradients:
            self._add(self._views, gradients, digest)
        return digest.hex()

    def subtract(
        self, removal: Removal[KeptMicrobatch], gradients: Iterable[Sequence[Tensor]]
    ) -> None:
        """Carry out a removal, given the recomputed gradients: all of it, or nothing if a
        computation fails."""
        total: Tensor | None = None
        for one in gradients:
            if one and total is None:
                total = torch.zeros_like(self.flat)
            if total is not None:
                self._add(list(self._layout.views(total)), one)
        if total is not None:
            self.flat.sub_(total)
        self.contents.remove(removal.microbatches)
        for microbatch in removal.microbatches:
            self.transcripts.pop(microbatch, None)
        if not self.contents:
            self.flat.zero_()  # removes rounding errors

    def _add(
        self, views: list[Tensor], gradients: Sequence[Tensor], digest: GradientDigest | None = None
    ) -> None:
        see = None if digest is None else digest.update
        if self._quantum is not None:
            self._quantum.add(views, gradients, see)
            return
        torch._foreach_add_(views, list(gradients))
        if see is not None:
            for gradient in gradients:
                see(gradient)

    def reset(self) -> None:
        self.flat.zero_()
        self.contents.clear()
        self.transcripts.clear()
