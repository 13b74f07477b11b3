"""Sums of gradients that do not depend on the order or the grouping of the additions.

Floating-point addition is not associative, so a step's gradient would depend, in its last bits, on
which peers counted which microbatches and when; and a difference in the last bit grows. Here each
microbatch's gradient is rounded once, to integer counts of a quantum, and the counts are held in
float64: as long as they stay below 2^53 their sums are exact, whatever the order, the number of
peers, or what was subtracted again in between. So a run under churn has the very sums of a run on
one machine, which rounds the same way. (The idea is that of a long accumulator, Kulisch 1971, cut
down to one word, as in reproducible summation, Demmel and Nguyen 2013, ARITH.)

The quantum is chosen by what AdamW can resolve. AdamW divides a mean gradient's first moment by the
root of the second plus epsilon: a gradient that is off by d moves no parameter by more than d /
epsilon of a whole step. The quantum is at most 2^-16 epsilon, of the mean over a step's tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swarm_shared.run.manifest import Manifest

EXACT_BITS = 53
"""Integers below 2^53 are exact in float64."""

QUANTUM_BITS = 16
"""Powers of two by which the quantum lies below a step's worth of epsilon."""

_WINDOW_ELEMENTS = 1 << 16
_DEVICE_WINDOW_ELEMENTS = 1 << 22


@dataclass(frozen=True, slots=True)
class Quantum:
    """The unit in which gradients are counted; the same for all stages and microbatches of a
    run."""

    size: float
    """A power of two; the unit of a gradient summed over tokens."""
    max_counts: float
    """A power of two: largest count of one element of one microbatch, so that a step's microbatches
    together stay exact."""

    @classmethod
    def of(cls, manifest: Manifest) -> Quantum:
        # math.frexp: the exponent itself, not a logarithm whose last bit depends on a C library.
        exponent = math.frexp(manifest.optimizer.epsilon * manifest.tokens_per_step)[1] - 1
        # Beyond these a float32 that is scaled would lose digits or overflow.
        size = 2.0 ** min(60, max(-100, exponent - QUANTUM_BITS))
        microbatches = 1 << (manifest.training.microbatches_per_step - 1).bit_length()
        # A tied table is summed over two stages.
        return cls(size, 2.0 ** (EXACT_BITS - 2) / microbatches)

    def counts(self, gradient: Tensor, *, in_place: bool = False) -> Tensor:
        """Return one microbatch's gradient in counts: float32 integers, ties to even, in a new
        tensor or in the gradient's. An element too large for exact sums becomes the largest
        count."""
        factor = 1.0 / self.size
        scaled = gradient.mul_(factor) if in_place else torch.mul(gradient, factor)
        return scaled.round_().clamp_(-self.max_counts, self.max_counts)

    def add(self, totals: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add the counts of one microbatch's gradients to contiguous float64 totals."""
        for total, gradient in zip(totals, gradients, strict=True):
            windows = torch.split(total.view(-1), _window_elements(gradient.device))
            counted = self._windows(gradient, gradient.device)
            for window, counts in zip(windows, counted, strict=True):
                window.add_(counts)

    def bounds(self, gradients: Sequence[Tensor]) -> list[float]:
        """Upper bounds of the magnitudes of each finite gradient's counts, with a single wait for
        the device."""
        return [
            0.0 if low > high else min(max(abs(low), abs(high)) / self.size, self.max_counts) + 1.0
            for low, high in extremes(gradients)
        ]

    def each_counts(
        self, gradients: Iterable[Tensor], device: torch.device | None = None, *,
        in_place: bool = False,
    ) -> Iterator[Tensor]:  # fmt: skip
        """Yield the counts of one microbatch's gradients in pieces, float32, on this device, or
        where each gradient is. `in_place`: in the memory of the gradients that are there."""
        for gradient in gradients:
            there = gradient.device if device is None else device
            yield from self._windows(gradient, there, in_place=in_place)

    def _windows(
        self, gradient: Tensor, device: torch.device, *, in_place: bool = False
    ) -> Iterator[Tensor]:
        for part in torch.split(gradient.reshape(-1), _window_elements(device)):
            yield self.counts(part.to(device), in_place=in_place)

    def mean(self, counts: Tensor, tokens: int) -> Tensor:
        """Return the gradient of the mean loss over so many tokens, rounded to float32 once."""
        return (counts * (self.size / tokens)).float()


def extremes(tensors: Sequence[Tensor]) -> list[tuple[float, float]]:
    """Return the least and the largest element of each, NaN if it has one, and (inf, -inf) if it is
    empty; with a single wait for the device."""
    found = [torch.stack(torch.aminmax(one.detach())).float() for one in tensors if one.numel()]
    devices = {one.device for one in found}
    read: dict[int, tuple[float, float]] = {}
    for device in devices:
        there = [number for number, one in enumerate(found) if one.device == device]
        values = torch.stack([found[number] for number in there]).tolist()
        read |= {n: (low, high) for n, (low, high) in zip(there, values, strict=True)}
    known = iter(read[number] for number in range(len(found)))
    return [next(known) if one.numel() else (math.inf, -math.inf) for one in tensors]


def _window_elements(device: torch.device) -> int:
    """On a CPU a window stays in its cache, on a device counts take little of its memory."""
    return _WINDOW_ELEMENTS if device.type == "cpu" else _DEVICE_WINDOW_ELEMENTS


def quantum_of(manifest: Manifest) -> Quantum | None:
    """Return the run's quantum; None where the manifest says that sums are plain float32."""
    return Quantum.of(manifest) if manifest.codecs.average == "exact" else None


def totals_dtype(quantum: Quantum | None) -> torch.dtype:
    """Return the dtype of a flat vector of a step's sums."""
    return torch.float32 if quantum is None else torch.float64


def mean_gradient(totals: Tensor, tokens: int, quantum: Quantum | None) -> Tensor:
    """Return a new float32 vector: a step's sums over its tokens."""
    return totals / tokens if quantum is None else quantum.mean(totals, tokens)
