"""AdamW in single IEEE 754 operations: the same bits on every processor.

Each operation of IEEE 754 (product, sum, quotient, square root) has one correctly rounded result.
torch's fused kernel joins products and sums to one operation where the processor has it, so that
hosts with and without AVX2 ended the same step with different parameters. Here every operation is a
pass of its own over a window that fits into a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swarm_shared.run.manifest import OptimizerConfig

WINDOW_ELEMENTS = 1 << 16
"""256 KiB of each of five arrays: smaller ones spend more in calls than the cache saves."""
LEAST_WINDOWS_OF_A_THREAD = 16
"""With 8 windows two threads took nearly twice as long as one: the interpreter's lock changes hands
in each operation."""

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class AdamWVectors:
    """One parameter with its gradient and its moments, flat, in host memory."""

    parameter_N: Vector  # noqa: N815
    gradient_N: Vector  # noqa: N815
    first_moment_N: Vector  # noqa: N815
    second_moment_N: Vector  # noqa: N815

    def windows(self) -> Sequence[AdamWVectors]:
        """The vectors in parts of at most WINDOW_ELEMENTS, which share their memory."""
        stops = range(0, len(self.parameter_N), WINDOW_ELEMENTS)
        parts = [slice(start, start + WINDOW_ELEMENTS) for start in stops]
        return [
            AdamWVectors(
                self.parameter_N[part], self.gradient_N[part], self.first_moment_N[part],
                self.second_moment_N[part],
            )
            for part in parts
        ]  # fmt: skip


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The factors of one step, each rounded to float32 once."""

    kept: np.float32
    """The share of a weight that decay leaves."""
    beta1: np.float32
    gradient_share: np.float32
    beta2: np.float32
    square_share: np.float32
    root_correction: np.float32
    """The square root of the second moment's bias correction."""
    epsilon: np.float32
    rate: np.float32
    """The learning rate over the first moment's bias correction."""

    @classmethod
    def of(
        cls, config: OptimizerConfig, learning_rate: float, step: int, *, decays: bool
    ) -> AdamWStep:
        """The factors of a step, counted from 1 (Loshchilov & Hutter, arXiv 1711.05101,
        algorithm 2)."""
        decay = config.weight_decay if decays else 0.0
        return cls(
            kept=np.float32(1.0 - learning_rate * decay),
            beta1=np.float32(config.beta1),
            gradient_share=np.float32(1.0 - config.beta1),
            beta2=np.float32(config.beta2),
            square_share=np.float32(1.0 - config.beta2),
            root_correction=np.float32(math.sqrt(1.0 - _power(config.beta2, step))),
            epsilon=np.float32(config.epsilon),
            rate=np.float32(learning_rate / (1.0 - _power(config.beta1, step))),
        )

    def take(self, vectors: AdamWVectors) -> None:
        """Take the step with a window; its parameter and moments are changed in place."""
        parameter, gradient = vectors.parameter_N, vectors.gradient_N
        first, second = vectors.first_moment_N, vectors.second_moment_N
        # Each line one operation: a fused one would round otherwise.
        with np.errstate(over="ignore", under="ignore", invalid="ignore"):
            change = gradient * self.gradient_share
            first *= self.beta1
            first += change
            np.multiply(gradient, gradient, out=change)
            change *= self.square_share
            second *= self.beta2
            second += change
            np.sqrt(second, out=change)
            change /= self.root_correction
            change += self.epsilon
            np.divide(first, change, out=change)
            change *= self.rate
            parameter *= self.kept
            parameter -= change


def take_step(work: Sequence[tuple[AdamWStep, AdamWVectors]], threads: int) -> None:
    """Take a step with each of these vectors, in at most so many threads; any number gives the same
    bits."""
    windows = [(step, window) for step, vectors in work for window in vectors.windows()]
    threads = min(threads, len(windows) // LEAST_WINDOWS_OF_A_THREAD)
    if threads <= 1:
        _take_all(windows)
        return
    size = math.ceil(len(windows) / threads)
    shares = [windows[start : start + size] for start in range(0, len(windows), size)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(_take_all, shares))  # raises what a thread has raised


def _take_all(windows: Sequence[tuple[AdamWStep, AdamWVectors]]) -> None:
    for step, window in windows:
        step.take(window)


def _power(base: float, exponent: int) -> float:
    """`base ** exponent` by squaring: libraries of systems differ in the last bit of `pow`."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result
