"""The sum of one step's gradients, and what is needed to take a microbatch out of it again.

Owns the sums (`swarm_client.stage.worker.accumulation.gradient_sums`) and the set of microbatches
in them, with the tensors from which their gradients can be recomputed
(`swarm_shared.volunteer_rules.accumulated_set`). Does not own the computation of gradients. Within
a step the parameters do not change, so a recomputed gradient is the same gradient. Where gradients
are fixed-point counts (`swarm_shared.model.fixed_point_sums`), subtracting it undoes the addition
exactly; where they are summed in float32, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_client.stage.worker.accumulation.digests import BackgroundDigest, GradientDigest
from swarm_client.stage.worker.accumulation.gradient_sums import GradientSums, gradient_sums
from swarm_client.stage.worker.transfer.pieces_to_host import PiecesToHost
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
    """The sum of the gradients of a step, with the microbatches that are in it."""

    def __init__(
        self, layout: FlatLayout, device: torch.device, kept_budget_bytes: int,
        quantum: Quantum | None = None, pieces: PiecesToHost | None = None,
    ) -> None:  # fmt: skip
        self.contents: AccumulatedSet[KeptMicrobatch] = AccumulatedSet(kept_budget_bytes)
        """The microbatches in the sums."""
        self.transcripts: dict[MicrobatchIndex, Transcript] = {}
        """The transcript of each microbatch in the sums."""
        self._layout = layout
        self._pieces = pieces
        self._dtype = totals_dtype(quantum)
        self._sums = gradient_sums(layout, device, quantum)

    def totals(self) -> Tensor:
        """Return the sums as a new flat vector in host memory."""
        flat = self._layout.new_flat(dtype=self._dtype)
        self._sums.write_to(flat)
        return flat

    def write_to(self, flat: Tensor) -> None:
        """Write the sums to a flat vector in host memory."""
        self._sums.write_to(flat)

    def add(
        self, microbatch: MicrobatchIndex, gradients: Sequence[Tensor], kept: KeptMicrobatch
    ) -> str:
        """Add finite gradients, one per parameter, in the layout's order; return the digest of what
        was added. Without the memory for it the accumulator is empty afterwards."""
        self.contents.add(microbatch, kept)
        digest = GradientDigest(self._pieces)
        with self._whole_or_empty():
            if gradients:
                self._sums.add(gradients, digest.update)
        return digest.hex()

    def can_hash_in_background(self, gradients: Sequence[Tensor]) -> bool:
        """Whether these gradients can be hashed while the device computes: all are on a device with
        streams, and no two share memory."""
        if self._pieces is None or not gradients or any(gradient.is_cpu for gradient in gradients):
            return False
        addresses = {gradient.untyped_storage().data_ptr() for gradient in gradients}
        return len(addresses) == len(gradients)

    def add_hashed_in_background(
        self, microbatch: MicrobatchIndex, gradients: Sequence[Tensor], kept: KeptMicrobatch
    ) -> Future[str]:
        """Add gradients that allow it (`can_hash_in_background`); return the future digest. Their
        memory is overwritten with counts, and is in use until the digest is known."""
        if self._pieces is None:
            raise RuntimeError("this device has no streams")
        self.contents.add(microbatch, kept)
        digest = BackgroundDigest(self._pieces)
        with self._whole_or_empty():
            self._sums.add(gradients, digest.update, in_place=True)
        return digest.begin()

    def subtract(
        self, removal: Removal[KeptMicrobatch], gradients: Iterable[Sequence[Tensor]]
    ) -> None:
        """Carry out a removal, given the recomputed gradients: all of it, or nothing if a
        computation fails. Without the memory to subtract them the accumulator is empty
        afterwards."""
        removed: GradientSums | None = None
        for recomputed in gradients:
            if recomputed:
                removed = removed or self._sums.zeros()
                removed.add(recomputed)
        if removed is not None:
            with self._whole_or_empty():
                self._sums.subtract(removed)
        self.contents.remove(removal.microbatches)
        for microbatch in removal.microbatches:
            self.transcripts.pop(microbatch, None)
        if not self.contents:
            self._sums.clear()  # removes rounding errors

    @contextmanager
    def _whole_or_empty(self) -> Iterator[None]:
        """Empty the accumulator if a change of the sums ends half done: they are sums of nothing
        then, and what was counted is found missing when the step closes."""
        try:
            yield
        except BaseException:
            self.reset()
            raise

    def reset(self) -> None:
        """Empty the accumulator: its sums, the microbatches in them, and their transcripts."""
        self._sums.clear()
        self.contents.clear()
        self.transcripts.clear()
