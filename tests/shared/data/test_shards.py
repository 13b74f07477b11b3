from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swarm_shared.base.errors import DataError
from swarm_shared.data.shards import (
    TokenBytes,
    check_shards,
    slot_starts,
    slots_in,
    token_bytes_for,
    token_dtype,
    unigram_entropy_nats,
    verify_shard,
    write_shard,
    write_shards,
)
from swarm_shared.run.manifest import DataConfig, ShardInfo


def data_of(*shards: ShardInfo, token_bytes: TokenBytes = 2) -> DataConfig:
    return DataConfig(
        token_bytes=token_bytes, shards=shards, tokenizer="bpe", unigram_entropy_nats=0.0
    )


@pytest.mark.parametrize("token_bytes", [1, 2, 4])
def test_a_shard_is_raw_little_endian_and_comes_back(tmp_path: Path, token_bytes: TokenBytes):
    largest = min(2 ** (8 * token_bytes), 10**6) - 1
    ids = np.array([0, 1, 200, largest], dtype=np.uint32)
    info = write_shard(tmp_path, "train-00000.tokens", "train", [ids[:1], ids[1:]], token_bytes)
    path = tmp_path / info.name
    assert path.read_bytes() == b"".join(int(i).to_bytes(token_bytes, "little") for i in ids)
    assert {file.name for file in tmp_path.iterdir()} == {info.name, "train-00000.tree"}
    verify_shard(path, info, token_bytes, largest + 1)
    check_shards(tmp_path, data_of(info, info, token_bytes=token_bytes))


@given(
    st.lists(st.lists(st.integers(0, 65_535), max_size=9), max_size=9).filter(any),
    st.integers(1, 12),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_cutting_into_shards_loses_no_token(
    tmp_path: Path, pieces: list[list[int]], shard_tokens: int
):
    arrays = [np.array(piece, dtype=np.uint32) for piece in pieces]
    infos = write_shards(tmp_path, "train", iter(arrays), 2, shard_tokens)
    everything = [token for piece in pieces for token in piece]
    shards = [np.fromfile(tmp_path / info.name, token_dtype(2)) for info in infos]
    assert [token for shard in shards for token in shard.tolist()] == everything
    assert all(info.tokens == shard_tokens for info in infos[:-1])
    assert [info.name for info in infos] == sorted(info.name for info in infos)


def test_a_sequence_is_a_slot_of_its_own_shard_and_one_token_more():
    sizes = np.array([9, 3, 10])
    assert [slots_in(size, 4) for size in sizes] == [2, 0, 2]
    shards, starts = slot_starts(sizes, np.array([3, 0, 1, 2]), 4)
    assert shards.tolist() == [2, 0, 0, 2]
    assert starts.tolist() == [4, 0, 4, 0]


def test_the_narrowest_width_that_holds_every_id_is_chosen():
    sizes = [2, 256, 257, 65_536, 65_537]
    assert [token_bytes_for(size) for size in sizes] == [1, 1, 2, 2, 4]


def written(folder: Path) -> ShardInfo:
    ids = np.arange(1000, dtype=np.uint32)
    return write_shard(folder, "train-00000.tokens", "train", [ids], 2)


def test_a_shard_cut_short_is_refused_before_it_is_read(tmp_path: Path):
    info = written(tmp_path)
    path = tmp_path / info.name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="has 1999 bytes, but its 1000 tokens take 2000"):
        check_shards(tmp_path, data_of(info, info))
    with pytest.raises(DataError, match="1999"):
        verify_shard(path, info, 2, 1000)


def test_a_shard_with_one_changed_byte_is_refused_on_verification(tmp_path: Path):
    info = written(tmp_path)
    path = tmp_path / info.name
    content = bytearray(path.read_bytes())
    content[1234] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged"):
        verify_shard(path, info, 2, 1000)


def test_an_id_outside_the_vocabulary_is_refused_on_verification(tmp_path: Path):
    info = written(tmp_path)
    verify_shard(tmp_path / info.name, info, 2, 1000)
    with pytest.raises(DataError, match="token id 999, but the model's vocabulary has 999"):
        verify_shard(tmp_path / info.name, info, 2, 999)


def test_a_missing_shard_is_named(tmp_path: Path):
    info = written(tmp_path)
    (tmp_path / info.name).unlink()
    with pytest.raises(DataError, match=r"train-00000\.tokens"):
        check_shards(tmp_path, data_of(info, info))
    with pytest.raises(DataError, match="cannot read"):
        verify_shard(tmp_path / info.name, info, 2, 1000)


def test_an_id_too_large_for_its_bytes_is_not_written(tmp_path: Path):
    with pytest.raises(DataError, match="does not fit"):
        write_shard(tmp_path, "train-00000.tokens", "train", [np.array([256])], 1)
    assert list(tmp_path.iterdir()) == []


def test_a_split_without_tokens_is_not_written(tmp_path: Path):
    with pytest.raises(DataError, match="no tokens"):
        write_shards(tmp_path, "train", [], 1)
    assert list(tmp_path.iterdir()) == []


def test_a_source_that_fails_leaves_no_half_shard(tmp_path: Path):
    def failing() -> Iterator[np.ndarray]:
        yield np.arange(10)
        raise DataError("the text ends here")

    with pytest.raises(DataError, match="ends here"):
        write_shard(tmp_path, "train-00000.tokens", "train", failing(), 1)
    assert list(tmp_path.iterdir()) == []


def test_the_unigram_entropy_is_that_of_the_tokens_own_distribution(tmp_path: Path):
    def entropy(*shards: list[int]) -> float:
        infos = [
            write_shard(tmp_path, f"heldout-{number}.tokens", "heldout", [np.array(ids)], 2)
            for number, ids in enumerate(shards)
        ]
        train = written(tmp_path)
        return unigram_entropy_nats(tmp_path, data_of(train, *infos), "heldout", 300)

    assert entropy(list(range(256)), list(range(256))) == pytest.approx(math.log(256))
    assert entropy([7] * 100) == 0.0
    expected = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert entropy([1, 1], [1, 299]) == pytest.approx(expected)
