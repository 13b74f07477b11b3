"""Sums in int32 that spill over, compared with Python's own integers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.stage.worker.accumulation.gradient_sums import INT32_MAX, CountedSums, FloatSums
from swarm_shared.model.fixed_point_sums import Quantum
from swarm_shared.model.flat_gradients import FlatEntry, FlatLayout

QUANTUM = Quantum(size=2.0**-20, max_counts=2.0**45)
LAYOUT = FlatLayout(
    (
        FlatEntry("matrix", (2, 2), 0, 4),
        FlatEntry("nothing", (0,), 4, 0),
        FlatEntry("vector", (1,), 4, 1),
    ),
    own_count=5,
    count=5,
)  # fmt: skip
CPU = torch.device("cpu")

magnitudes = st.sampled_from([0, 1, 3, 2**20, 2**30, 2**31 - 128, 2**31, 2**33, 2**45])
microbatches = st.lists(
    st.lists(st.tuples(magnitudes, st.sampled_from([-1, 1])), min_size=5, max_size=5), max_size=12
)


def gradients(counts: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Gradients of exactly so many counts: magnitude and sign of each element."""
    flat = torch.tensor([m * sign for m, sign in counts], dtype=torch.float64) * QUANTUM.size
    return [view.clone() for view in LAYOUT.views(flat.float())]


def totals(sums: CountedSums) -> list[int]:
    flat = torch.full((LAYOUT.count,), 7.0, dtype=torch.float64)
    sums.write_to(flat)
    return [int(one) for one in flat]


def exact(counted: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    return [sum(one[i][0] * one[i][1] for one in counted) for i in range(LAYOUT.count)]


@given(microbatches, microbatches)
def test_sums_are_exact_whatever_overflows_an_int32(added, removed) -> None:
    sums = CountedSums(LAYOUT, CPU, QUANTUM)
    for one in [*added, *removed]:
        sums.add(gradients(one))
    assert totals(sums) == exact([*added, *removed])
    taken_out = sums.zeros()
    for one in removed:
        taken_out.add(gradients(one))
    sums.subtract(taken_out)
    assert totals(sums) == exact(added)
    sums.clear()
    assert totals(sums) == [0] * LAYOUT.count


def test_only_the_parameter_that_could_overflow_goes_to_the_host() -> None:
    sums = CountedSums(LAYOUT, CPU, QUANTUM)
    half = int(INT32_MAX // 2)
    for _ in range(3):
        sums.add(gradients([(half, 1), (1, 1), (1, 1), (1, 1), (1, 1)]))
    assert list(sums._spilled) == [0]
    assert sums._counts.dtype == torch.int32
    assert totals(sums) == [3 * gradient_count(half), 3, 3, 3, 3]


def gradient_count(count: int) -> int:
    """The count that a float32 gradient of so many counts has."""
    return int(float(torch.tensor(float(count), dtype=torch.float32)))


def test_the_pieces_that_are_seen_are_what_is_added() -> None:
    seen: list[float] = []
    counts = [(3, 1), (2**33, -1), (0, 1), (1, 1), (2**20, -1)]
    CountedSums(LAYOUT, CPU, QUANTUM).add(
        gradients(counts), lambda piece: seen.extend(piece.tolist())
    )
    assert seen == [m * sign for m, sign in counts]


def test_float_sums_are_those_of_torch() -> None:
    sums = FloatSums(LAYOUT, CPU)
    parts = [gradients([(3, 1), (5, -1), (0, 1), (1, 1), (2**20, -1)]) for _ in range(2)]
    for one in parts:
        sums.add(one)
    taken_out = sums.zeros()
    taken_out.add(parts[0])
    sums.subtract(taken_out)
    flat = torch.zeros(LAYOUT.count)
    sums.write_to(flat)
    assert torch.equal(flat, torch.cat([one.reshape(-1) for one in parts[1]]))
