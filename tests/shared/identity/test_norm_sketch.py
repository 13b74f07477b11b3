"""Sketches of vectors of whole numbers, and the norms that they tell."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from swarm_shared.identity.linear_digest import digest_sum
from swarm_shared.identity.norm_sketch import (
    BUCKETS,
    Sketch,
    Sketcher,
    SketchKey,
    from_text,
    sketch_digest,
    sketch_sum,
    sketched_norm,
    to_text,
)

SEED, WEIGHTS = "00" * 16, "0f" * 16
SEEDS = st.binary(min_size=16, max_size=16).map(bytes.hex)
WHOLE = st.integers(-(2**52), 2**52)


def equal(sketch_B: Sketch, other_B: Sketch) -> bool:
    return to_text(sketch_B) == to_text(other_B)


def random_counts(size: int, seed: int = 0) -> NDArray[np.int64]:
    return np.random.default_rng(seed).integers(-(2**40), 2**40, size)


@given(
    vectors=st.integers(1, 40).flatmap(
        lambda size: st.lists(st.lists(WHOLE, min_size=size, max_size=size), min_size=1, max_size=5)
    ),
    seed=SEEDS,
    start=st.integers(0, 10_000),
)
def test_the_sketch_of_a_sum_is_the_sum_of_the_sketches(
    vectors: list[list[int]], seed: str, start: int
) -> None:
    sketcher = Sketcher(seed, "own")
    parts = [np.array(vector, np.int64) for vector in vectors]
    total = np.sum(parts, axis=0, dtype=np.int64)
    of_parts = sketcher.sketches(parts, start)
    assert equal(sketch_sum(of_parts), sketcher.sketch(total, start))


@given(size=st.integers(0, 40_000), cut=st.floats(0, 1))
def test_sketches_of_consecutive_parts_add_up_to_that_of_the_whole(size: int, cut: float) -> None:
    counts, sketcher, at = random_counts(size, size), Sketcher(SEED, "own"), int(size * cut)
    parts = sketcher.sketch(counts[:at]), sketcher.sketch(counts[at:], at)
    assert equal(sketch_sum(parts), sketcher.sketch(counts))


def test_whole_numbers_have_one_sketch_in_every_type() -> None:
    counts, sketcher = [0, 1, -1, 2**24, -(2**24)], Sketcher(SEED, "own")
    types = (np.int64, np.float64, np.float32)
    assert len({to_text(sketcher.sketch(np.array(counts, dtype))) for dtype in types}) == 1


@given(at=st.integers(0, 100_000), number=WHOLE, seed=SEEDS)
def test_a_single_element_has_its_norm_wherever_it_is(at: int, number: int, seed: str) -> None:
    assert sketched_norm(Sketcher(seed, "own").sketch(np.array([number]), at)) == abs(number)


@pytest.mark.parametrize(("size", "sparse"), [(300, False), (20_000, False), (20_000, True)])
def test_norms_are_told_to_a_sixth_of_their_square(size: int, sparse: bool) -> None:
    """400 seeds: the mean is the norm's square within five standard errors, the spread is
    sqrt(2 / 64), and no sketch is off by half."""
    counts = random_counts(size) * (1 if not sparse else np.arange(size) % 100 == 0)
    norm = float(np.linalg.norm(counts.astype(np.float64)))
    told = np.array(
        [sketched_norm(Sketcher(f"{n:032x}", "own").sketch(counts)) / norm for n in range(400)]
    )
    squares = told**2
    assert abs(squares.mean() - 1) < 5 * np.sqrt(2 / BUCKETS / 400)
    assert squares.std() < 1.3 * np.sqrt(2 / BUCKETS)
    assert 0.5 < told.min() < told.max() < 1.5


@pytest.mark.parametrize("apart", [1, 64, 128, 8192, 64 * 8192])
def test_two_equal_elements_vanish_hardly_ever(apart: int) -> None:
    """Elements a row, a window, or many windows apart: a liar chooses where it puts something in.
    They vanish where they share a bucket with opposite signs, in one of 128 seeds."""
    zeros = 0
    for seed in range(1000):
        sketcher = Sketcher(f"{seed:032x}", "own")
        one = np.ones(1)
        zeros += not sketch_sum((sketcher.sketch(one, 5), sketcher.sketch(one, 5 + apart))).any()
    assert zeros < 25  # 8 on average; 25 in one of a million tests


def test_another_seed_and_another_part_give_another_sketch() -> None:
    counts = random_counts(100)
    sketches = {
        to_text(Sketcher(seed, part).sketch(counts))
        for seed in (SEED, "01" * 16)
        for part in ("own", "tied")
    }
    assert len(sketches) == 4


def test_the_sketch_of_a_vector_is_the_same_on_every_machine() -> None:
    """Members compare them; a change of the function is a change of the protocol."""
    counts = np.arange(-10_000, 10_000)
    sketch_B = Sketcher("0123456789abcdef" * 2, "own").sketch(counts, 77)
    assert sketch_digest(sketch_B, WEIGHTS) == PINNED


PINNED = 4601600235226070573


def test_a_sketch_crosses_the_network_as_base64() -> None:
    sketch_B = Sketcher(SEED, "own").sketch(random_counts(1000))
    assert len(to_text(sketch_B)) == 684
    assert equal(from_text(to_text(sketch_B)), sketch_B)


# ---- digests of sketches


@given(size=st.integers(1, 20_000), cuts=st.lists(st.floats(0, 1), max_size=3))
def test_digests_of_slices_sketches_add_up_to_that_of_the_whole_sketch(
    size: int, cuts: list[float]
) -> None:
    counts = random_counts(size, size)
    key = SketchKey(SEED, "own", WEIGHTS)
    stops = [0, *sorted(int(size * cut) for cut in cuts), size]
    parts = [
        key.digests((counts[start:stop],), start)[0] for start, stop in itertools.pairwise(stops)
    ]
    assert digest_sum(parts) == sketch_digest(Sketcher(SEED, "own").sketch(counts), WEIGHTS)


@given(bucket=st.integers(0, BUCKETS - 1), change=st.integers(1, 2**50), weights=SEEDS)
def test_another_sketch_has_another_digest(bucket: int, change: int, weights: str) -> None:
    sketch_B = Sketcher(SEED, "own").sketch(random_counts(1000))
    other_B = sketch_B.copy()
    other_B[bucket] ^= np.uint64(change)
    assert sketch_digest(sketch_B, weights) != sketch_digest(other_B, weights)
