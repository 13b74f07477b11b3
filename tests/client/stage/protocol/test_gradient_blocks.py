"""Blocks of a gradient: digests of pieces of any size, samples, and what a block proves."""

from __future__ import annotations

import itertools

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from swarm_client.stage.protocol import gradient_blocks
from swarm_client.stage.protocol.gradient_blocks import (
    BLOCK_BYTES,
    BlockDigests,
    block_count,
    block_range,
    gradient_digest,
    has_blocks,
    sampled_blocks,
    shown_bytes,
)
from swarm_shared.base.types import MAX_SAMPLED_BLOCKS

SEED, OTHER_SEED = "5eed" * 8, "beef" * 8


def content_of(nbytes: int) -> bytes:
    return blake3(b"a gradient").digest(nbytes)


def digests_of(content: bytes, *, ends: list[int] = [], threads: int = 1) -> bytes:  # noqa: B006
    digests, view = BlockDigests(threads), memoryview(content)
    for start, end in itertools.pairwise([0, *ends, len(content)]):
        digests.update(view[start:end])
    return digests.joined()


def block_of(content: bytes, block: int) -> bytes:
    place = block_range(block, len(content))
    return content[place.start : place.stop]


@given(
    nbytes=st.integers(0, 40 * BLOCK_BYTES),
    cuts=st.lists(st.floats(0, 1), max_size=5),
    threads=st.integers(1, 3),
)
def test_the_digests_are_those_of_each_block_however_the_bytes_come(
    nbytes: int, cuts: list[float], threads: int
) -> None:
    content = content_of(nbytes)
    ends = sorted(int(cut * nbytes) for cut in cuts)
    blocks = [block_of(content, block) for block in range(block_count(nbytes))]
    assert b"".join(blocks) == content
    expected = b"".join(blake3(block).digest(16) for block in blocks)
    assert digests_of(content, ends=ends, threads=threads) == expected


def test_a_piece_may_change_once_it_was_added() -> None:
    piece, digests = bytearray(content_of(BLOCK_BYTES + 8)), BlockDigests()
    digests.update(memoryview(piece))
    before = digests.joined()
    piece[:] = bytes(len(piece))
    assert digests.joined() == before == digests_of(content_of(BLOCK_BYTES + 8))


def test_a_receipts_digest_binds_each_block_and_their_order() -> None:
    content = content_of(3 * BLOCK_BYTES)
    exchanged = block_of(content, 1) + block_of(content, 0) + block_of(content, 2)
    changed = content[:-1] + bytes([content[-1] ^ 1])
    digests = {gradient_digest(digests_of(one)) for one in (content, exchanged, changed, content)}
    assert len(digests) == 3


def test_all_blocks_of_a_small_gradient_are_in_a_sample_and_the_most_of_a_large_one() -> None:
    assert sampled_blocks(SEED, 0) == ()
    assert sampled_blocks(SEED, 1) == (0,)
    small = MAX_SAMPLED_BLOCKS * BLOCK_BYTES
    assert sampled_blocks(SEED, small) == tuple(range(MAX_SAMPLED_BLOCKS))
    large = 10 * small + 1
    sample = sampled_blocks(SEED, large)
    assert len(sample) == MAX_SAMPLED_BLOCKS
    assert list(sample) == sorted(set(sample))
    assert set(sample) < set(range(block_count(large)))
    assert sample != sampled_blocks(OTHER_SEED, large)


def test_a_sample_is_the_same_on_every_machine() -> None:
    """Auditors of the same receipt that compared different blocks could contradict each other."""
    assert sampled_blocks(SEED, 2000 * BLOCK_BYTES)[:6] == PINNED


PINNED = (106, 154, 185, 214, 225, 248)


@pytest.mark.parametrize("nbytes", [5 * BLOCK_BYTES, 5 * BLOCK_BYTES - 12])
def test_shown_blocks_are_those_of_the_digests_or_refused(nbytes: int) -> None:
    content, blocks = content_of(nbytes), (1, 4)
    digests = digests_of(content)
    shown = b"".join(block_of(content, block) for block in blocks)
    assert len(digests + shown) == shown_bytes(blocks, nbytes)
    assert has_blocks(digests, blocks, memoryview(shown))
    changed = bytearray(shown)
    changed[BLOCK_BYTES + 5] ^= 1
    assert not has_blocks(digests, blocks, memoryview(changed))
    assert not has_blocks(digests, (0, 4), memoryview(shown))
    assert not has_blocks(digests, blocks, memoryview(shown)[:BLOCK_BYTES])
    assert has_blocks(digests, (), memoryview(b""))


def test_few_blocks_are_hashed_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_blocks, "ThreadPoolExecutor", None)
    few = content_of((2 * gradient_blocks.LEAST_BLOCKS_OF_A_THREAD - 1) * BLOCK_BYTES)
    assert digests_of(few, threads=8) == digests_of(few)
    with pytest.raises(TypeError):
        digests_of(few + content_of(BLOCK_BYTES), threads=8)
