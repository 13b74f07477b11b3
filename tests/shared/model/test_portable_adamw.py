"""AdamW in single operations: against the formula, and the same bits everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from swarm_shared.model.portable_adamw import (
    LEAST_WINDOWS_OF_A_THREAD,
    WINDOW_ELEMENTS,
    AdamWStep,
    AdamWVectors,
    take_step,
)
from swarm_shared.run.manifest import OptimizerConfig

CONFIG = OptimizerConfig(learning_rate=0.01, warmup_steps=0, weight_decay=0.1)

DIGEST_OF_STEPS = """
import hashlib
import numpy as np
from swarm_shared.model.portable_adamw import AdamWStep, AdamWVectors, take_step
from swarm_shared.run.manifest import OptimizerConfig

config = OptimizerConfig(learning_rate=0.01, warmup_steps=0, weight_decay=0.1)
noise = np.random.default_rng(7)
values = [noise.random(50_001, dtype=np.float32) - np.float32(0.5) for _ in range(5)]
state = [values[0], np.zeros_like(values[0]), np.zeros_like(values[0])]
for number, gradient in enumerate(values[1:], 1):
    step = AdamWStep.of(config, 0.01, number, decays=True)
    take_step([(step, AdamWVectors(state[0], gradient, *state[1:]))], 2)
print(hashlib.sha256(b"".join(one.tobytes() for one in state)).hexdigest())
"""


def vectors(elements: int, seed: int) -> AdamWVectors:
    noise = np.random.default_rng(seed)
    parameter, gradient, first = (
        noise.standard_normal(elements, dtype=np.float32) for _ in range(3)
    )
    return AdamWVectors(parameter, gradient, first, noise.random(elements, dtype=np.float32))


@pytest.mark.parametrize(
    "windows", [0.001, 1, LEAST_WINDOWS_OF_A_THREAD, 2.1 * LEAST_WINDOWS_OF_A_THREAD]
)
def test_a_step_in_windows_and_threads_is_that_of_the_whole_to_the_bit(windows: float) -> None:
    elements = int(windows * WINDOW_ELEMENTS)
    step = AdamWStep.of(CONFIG, 0.01, 3, decays=True)
    whole = vectors(elements, 1)
    step.take(whole)
    for threads in (1, 2, 5):
        parts = vectors(elements, 1)
        take_step([(step, parts)], threads)
        assert np.array_equal(parts.parameter_N, whole.parameter_N)
        assert np.array_equal(parts.first_moment_N, whole.first_moment_N)
        assert np.array_equal(parts.second_moment_N, whole.second_moment_N)


def test_each_operation_of_a_step_is_rounded_by_itself() -> None:
    """A fused product and sum has another result for these moments."""
    step, changed = AdamWStep.of(CONFIG, 0.01, 3, decays=True), vectors(1000, 2)
    given = vectors(1000, 2)
    step.take(changed)
    wide = given.first_moment_N.astype(np.float64) * step.beta1
    product = (given.gradient_N.astype(np.float64) * step.gradient_share).astype(np.float32)
    fused = (wide + product).astype(np.float32)
    single = wide.astype(np.float32) + product
    assert np.array_equal(changed.first_moment_N, single)
    assert not np.array_equal(single, fused)


def test_processors_with_and_without_vector_units_take_the_same_steps() -> None:
    digests = set()
    for disabled in ("", "AVX512_SKX", "AVX512F AVX512CD AVX512_SKX AVX2 FMA3"):
        environment = {**os.environ, "NPY_DISABLE_CPU_FEATURES": disabled}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DIGEST_OF_STEPS],
            env=environment, capture_output=True, text=True, check=True,
        )  # fmt: skip
        digests.add(done.stdout)
    assert len(digests) == 1


def test_a_step_without_decay_keeps_a_weight_without_gradient() -> None:
    still = np.zeros(4, np.float32)
    kept = AdamWVectors(np.full(4, 2.0, np.float32), still, still.copy(), still.copy())
    AdamWStep.of(CONFIG, 0.01, 1, decays=False).take(kept)
    assert kept.parameter_N.tolist() == [2.0] * 4
    AdamWStep.of(CONFIG, 0.01, 1, decays=True).take(kept)
    assert kept.parameter_N.tolist() == [float(np.float32(2.0) * np.float32(0.999))] * 4
