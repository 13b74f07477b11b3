"""Sums of gradients that no order, grouping or second thought changes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.client.stage_runners import make_manifest
from swarm_shared.model.fixed_point_sums import EXACT_BITS, Quantum, mean_gradient, quantum_of
from swarm_shared.run.manifest import CodecsConfig, Manifest

unhurried = settings(max_examples=60, deadline=None)


def manifest(
    microbatches: int = 4, sequences: int = 2, epsilon: float = 1e-6, average: str = "exact"
) -> Manifest:
    plain = make_manifest(1)
    training = plain.training.model_copy(
        update={"microbatches_per_step": microbatches, "sequences_per_microbatch": sequences}
    )
    return plain.model_copy(
        update={
            "training": training,
            "optimizer": plain.optimizer.model_copy(update={"epsilon": epsilon}),
            "codecs": CodecsConfig(average=average),
        }
    )


def gradients(count: int, seed: int) -> list[torch.Tensor]:
    """Of magnitudes over twelve powers of ten."""
    random = torch.Generator().manual_seed(seed)
    scales = 10.0 ** torch.empty(count, 50).uniform_(-9, 3, generator=random)
    return list(torch.randn(count, 50, generator=random) * scales)


def summed(quantum: Quantum, addends: list[torch.Tensor]) -> torch.Tensor:
    total = torch.zeros(50, dtype=torch.float64)
    for addend in addends:
        quantum.add([total], [addend])
    return total


@unhurried
@given(
    st.integers(1, 65_536), st.integers(1, 4096),
    st.floats(1e-30, 1.0), st.integers(1, 8),
)  # fmt: skip
def test_the_quantum_is_beneath_what_the_optimizer_notices_and_all_sums_of_a_step_are_exact(
    microbatches: int, sequences: int, epsilon: float, stages: int
) -> None:
    described = manifest(microbatches, sequences, epsilon)
    quantum = Quantum.of(described)
    tokens = described.tokens_per_microbatch * microbatches
    assert math.frexp(quantum.size)[0] == 0.5
    assert quantum.size <= max(2.0**-100, epsilon * tokens * 2.0**-16)
    assert quantum.max_counts >= 1
    assert 2 * microbatches * quantum.max_counts < 2.0**EXACT_BITS


@unhurried
@given(st.integers(1, 9), st.integers(0, 999), st.randoms())
def test_sums_depend_on_no_order_and_no_grouping(count: int, seed: int, random) -> None:
    quantum = Quantum.of(manifest(microbatches=16))
    addends = gradients(count, seed)
    in_order = summed(quantum, addends)
    random.shuffle(addends)
    cut = random.randint(0, count)
    parts = summed(quantum, addends[:cut]), summed(quantum, addends[cut:])
    assert torch.equal(in_order, parts[0] + parts[1])
    assert torch.equal(in_order, parts[1] + parts[0])


def test_plain_sums_do_depend_on_it() -> None:
    """Else there were nothing to do here."""
    addends = gradients(6, 1)
    found = set()
    for order in itertools.permutations(addends):
        total = torch.zeros(50)
        for addend in order:
            total += addend
        found.add(total.numpy().tobytes())
    assert len(found) > 1


@unhurried
@given(st.integers(2, 9), st.integers(0, 999))
def test_what_is_taken_out_again_leaves_nothing(count: int, seed: int) -> None:
    quantum = Quantum.of(manifest(microbatches=16))
    addends = gradients(count, seed)
    total = summed(quantum, addends) - summed(quantum, addends[1:])
    assert torch.equal(total, summed(quantum, addends[:1]))


@unhurried
@given(st.integers(1, 9), st.integers(0, 999))
def test_the_mean_is_off_by_less_than_a_ten_thousandth_of_epsilon(count: int, seed: int) -> None:
    described = manifest(microbatches=16)
    quantum = Quantum.of(described)
    tokens = described.tokens_per_microbatch * 16
    addends = [torch.clamp(one, -1000, 1000) for one in gradients(count, seed)]
    mean = mean_gradient(summed(quantum, addends), tokens, quantum)
    exact = torch.stack(addends).double().sum(0) / tokens
    rounding = count * quantum.size / 2 / tokens
    assert rounding <= 16 * described.optimizer.epsilon * 2.0**-17
    error = (mean.double() - exact).abs()
    assert bool((error <= rounding + exact.abs() * 2.0**-24 + 2.0**-149).all())


def test_one_element_too_large_counts_as_the_largest_and_spoils_no_sum() -> None:
    quantum = Quantum.of(manifest(microbatches=4))
    huge = torch.tensor([3e38, -3e38, 1.0])
    counts = quantum.counts(huge)
    assert counts.tolist()[:2] == [quantum.max_counts, -quantum.max_counts]
    total = torch.zeros(3, dtype=torch.float64)
    for _ in range(8):  # four microbatches in two stages
        quantum.add([total], [huge])
    assert bool((total.abs() < 2.0**EXACT_BITS).all())
    assert total[2] == 8 * round(1.0 / quantum.size)


def test_gradients_themselves_are_left_alone() -> None:
    gradient = torch.tensor([0.3, -0.7])
    Quantum.of(manifest()).add([torch.zeros(2, dtype=torch.float64)], [gradient])
    assert gradient.tolist() == torch.tensor([0.3, -0.7]).tolist()


@pytest.mark.parametrize("average", ["none", "float16", "int8"])
def test_only_exact_averages_are_counted(average: str) -> None:
    assert quantum_of(manifest(average=average)) is None
    assert mean_gradient(torch.tensor([4.0]), 8, None).tolist() == [0.5]
