"""Linear digests of vectors of whole numbers."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.identity.linear_digest import (
    MODULUS,
    DigestKey,
    digest_sum,
    from_text,
    to_text,
)

SEED = "00" * 16
WHOLE = st.integers(-(2**52), 2**52)


@given(
    vectors=st.integers(1, 40).flatmap(
        lambda size: st.lists(st.lists(WHOLE, min_size=size, max_size=size), min_size=1, max_size=5)
    ),
    seed=st.binary(min_size=16, max_size=16),
)
def test_the_digest_of_a_sum_is_the_sum_of_the_digests(
    vectors: list[list[int]], seed: bytes
) -> None:
    key = DigestKey(seed.hex(), "own")
    parts = [np.array(vector, np.int64) for vector in vectors]
    total = np.sum(parts, axis=0, dtype=np.int64)
    assert digest_sum(key.digest(part) for part in parts) == key.digest(total)


@given(size=st.integers(0, 100_000), cut=st.floats(0, 1))
def test_digests_of_consecutive_parts_add_up_to_that_of_the_whole(size: int, cut: float) -> None:
    counts = np.random.default_rng(size).integers(-(2**40), 2**40, size).astype(np.float64)
    key, at = DigestKey(SEED, "own"), int(size * cut)
    assert digest_sum((key.digest(counts[:at]), key.digest(counts[at:], at))) == key.digest(counts)


@given(
    counts=st.lists(WHOLE, min_size=1, max_size=40),
    at=st.integers(0, 39),
    change=st.integers(-(2**20), 2**20).filter(bool),
    seed=st.binary(min_size=16, max_size=16),
)
def test_a_change_of_one_element_changes_the_digest(
    counts: list[int], at: int, change: int, seed: bytes
) -> None:
    key = DigestKey(seed.hex(), "own")
    other = list(counts)
    other[at % len(counts)] += change
    assert key.digest(np.array(counts)) != key.digest(np.array(other))


def test_whole_numbers_have_one_digest_in_every_type() -> None:
    counts = [0, 1, -1, 2**24, -(2**24)]
    key = DigestKey(SEED, "own")
    digests = {
        key.digest(np.array(counts, np.float64)),
        key.digest(np.array(counts, np.float32)),
        key.digest(np.array(counts, np.int64)),
    }
    assert len(digests) == 1
    assert digests.pop() < MODULUS


def test_another_seed_and_another_part_give_another_digest() -> None:
    counts = np.arange(100)
    digests = {
        DigestKey(seed, part).digest(counts)
        for seed in (SEED, "01" * 16)
        for part in ("own", "tied")
    }
    assert len(digests) == 4


def test_the_digest_of_a_vector_is_the_same_on_every_machine() -> None:
    """Members compare it; a change of the function is a change of the protocol."""
    assert DigestKey("0123456789abcdef" * 2, "own").digest(np.arange(-5, 5)) == 17368001292716570208


@given(st.integers(0, MODULUS - 1))
def test_a_digest_crosses_the_network_as_sixteen_hex_digits(digest: int) -> None:
    assert len(to_text(digest)) == 16
    assert from_text(to_text(digest)) == digest
