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

    def counts(self, gradient: Tensor) -> Tensor:
        """Return one microbatch's gradient in counts: a new float32 tensor of integers, ties to
        even. An element too large for exact sums becomes the largest count."""
        scaled = torch.mul(gradient, 1.0 / self.size)
        return scaled.round_().clamp_(-self.max_counts, self.max_counts)

    def add(self, totals: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
        """Add the counts of one microbatch's gradients to contiguous float64 totals."""
        for total, gradient in zip(totals, gradients, strict=True):
            size = _window_elements(gradient)
            windows = torch.split(total.view(-1), size)
            for window, counts in zip(windows, self._windows(gradient), strict=True):
                window.add_(counts)

    def bounds(self, gradients: Sequence[Tensor]) -> list[float]:
        """Upper bounds of the magnitudes of each finite gradient's counts, with a single wait for
        the device."""
        extremes = [torch.stack(torch.aminmax(g.detach())) for g in gradients if g.numel()]
        largest = torch.stack(extremes).abs_().amax(1).tolist() if extremes else []
        found = iter(min(one / self.size, self.max_counts) + 1.0 for one in largest)
        return [next(found) if gradient.numel() else 0.0 for gradient in gradients]

    def each_counts(self, gradients: Iterable[Tensor]) -> Iterator[Tensor]:
        """Yield the counts of one microbatch's gradients in pieces, float32."""
        for gradient in gradients:
            yield from self._windows(gradient)

    def _windows(self, gradient: Tensor) -> Iterator[Tensor]:
        for part in torch.split(gradient.reshape(-1), _window_elements(gradient)):
            yield self.counts(part)

    def mean(self, counts: Tensor, tokens: int) -> Tensor:
        """Return the gradient of the mean loss over so many tokens, rounded to float32 once."""
        return (counts * (self.size / tokens)).float()


def _window_elements(gradient: Tensor) -> int:
    """On a CPU one window at a time, so that the counts stay in its cache."""
    return _WINDOW_ELEMENTS if gradient.device.type == "cpu" else max(1, gradient.numel())


def quantum_of(manifest: Manifest) -> Quantum | None:
    """Return the run's quantum; None where the manifest says that sums are plain float32."""
    return Quantum.of(manifest) if manifest.codecs.average == "exact" else None


def totals_dtype(quantum: Quantum | None) -> torch.dtype:
    """Return the dtype of a flat vector of a step's sums."""
    return torch.float32 if quantum is None else torch.float64


def mean_gradient(totals: Tensor, tokens: int, quantum: Quantum | None) -> Tensor:
    """Return a new float32 vector: a step's sums over its tokens."""
    return totals / tokens if quantum is None else quantum.mean(totals, tokens)
