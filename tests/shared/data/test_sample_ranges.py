"""A microbatch from ranges of bytes has the token ids of its slots in the shards."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kits.manifests import manifest_of
from swarm_shared.base.errors import DataError, ProtocolError
from swarm_shared.data import merkle
from swarm_shared.data.leaf_files import LeafFiles, ShardSamples
from swarm_shared.data.sample_ranges import Int64, LeafId, SampleRanges, check_leaf, leaf_shape
from swarm_shared.data.sampler import heldout_slots, training_slots
from swarm_shared.data.shards import (
    Split,
    TokenBytes,
    token_dtype,
    tree_path,
    write_missing_trees,
    write_shards,
)
from swarm_shared.run.manifest import Manifest

LENGTH = 700


def written(
    folder: Path, sizes: tuple[int, ...], token_bytes: TokenBytes, vocabulary: int = 256
) -> Manifest:
    """A manifest of shards with random tokens; sequences longer than some leaves."""
    dice = np.random.default_rng(sum(sizes))
    shards = []
    for number, size in enumerate(sizes):
        split = "heldout" if number == 0 else "train"
        tokens = dice.integers(0, vocabulary, size, dtype=np.uint32)
        (info,) = write_shards(folder, split, [tokens], token_bytes)
        name = f"{split}-{number}.tokens"
        (folder / info.name).rename(folder / name)
        tree_path(folder / info.name).rename(tree_path(folder / name))
        shards.append(info.model_copy(update={"name": name}))
    base = manifest_of()
    data = base.data.model_copy(update={"shards": tuple(shards), "token_bytes": token_bytes})
    model = base.model.model_copy(update={"sequence_length": LENGTH})
    return base.model_copy(update={"data": data, "model": model})


def tokens_of(folder: Path, manifest: Manifest, split: Split, slots_B: Int64) -> Int64:
    """The tokens of the slots, out of all slots of the split."""
    dtype = token_dtype(manifest.data.token_bytes)
    shards = [np.fromfile(folder / info.name, dtype) for info in manifest.data.split(split)]
    rows = [
        ids[start : start + LENGTH + 1]
        for ids in shards
        for start in range(0, ids.size - LENGTH, LENGTH)
    ]
    return np.stack(rows)[slots_B].astype(np.int64)


@given(
    st.lists(st.integers(1, 60_000), min_size=1, max_size=4),
    st.sampled_from([1, 2, 4]),
    st.integers(1, 50),
)
@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_ranges_give_the_samples_of_the_shards(
    tmp_path: Path, sizes: list[int], token_bytes: TokenBytes, step: int
) -> None:
    manifest = written(tmp_path, (2 * LENGTH, LENGTH + 1, *sizes), token_bytes)
    files, ranges = LeafFiles(tmp_path, manifest.data), SampleRanges(manifest)
    samples = ShardSamples(tmp_path, manifest)
    of_training = tokens_of(tmp_path, manifest, "train", training_slots(manifest, step, 1))
    of_heldout = tokens_of(tmp_path, manifest, "heldout", heldout_slots(manifest, step))
    for found, from_shards, tokens_BS in (
        (ranges.training(step, 1), samples.training(step, 1), of_training),
        (ranges.heldout(step), samples.heldout(step), of_heldout),
    ):
        contents = {leaf: files.content(leaf) for one in found for leaf in one.leaves}
        for leaf, content in contents.items():
            check_leaf(manifest, leaf, content, files.proof(leaf))
            assert len(content) == leaf_shape(manifest, leaf).size_bytes
            assert len(files.proof(leaf)) == leaf_shape(manifest, leaf).proof_bytes
        arrays = ranges.arrays([one.cut(contents) for one in found])
        for given_arrays in (arrays, from_shards):
            for mine, expected in zip(
                given_arrays, (tokens_BS[:, :-1], tokens_BS[:, 1:]), strict=True
            ):
                np.testing.assert_array_equal(mine, expected)
                assert mine.dtype == np.int64


def test_a_changed_bit_of_a_range_is_found_by_its_proof(tmp_path: Path) -> None:
    manifest = written(tmp_path, (5000, 40_000), 2)
    files = LeafFiles(tmp_path, manifest.data)
    leaf = LeafId(1, 3)
    content = bytearray(files.content(leaf))
    content[17] ^= 4
    with pytest.raises(ProtocolError, match=r"train-1\.tokens are not those of the manifest"):
        check_leaf(manifest, leaf, bytes(content), files.proof(leaf))
    with pytest.raises(ProtocolError):
        check_leaf(manifest, LeafId(1, 2), files.content(leaf), files.proof(leaf))


def test_a_token_id_outside_of_the_vocabulary_is_refused(tmp_path: Path) -> None:
    manifest = written(tmp_path, (5000, 5000), 2, vocabulary=1000)
    files, ranges = LeafFiles(tmp_path, manifest.data), SampleRanges(manifest)
    found = ranges.training(1, 0)
    contents = {leaf: files.content(leaf) for one in found for leaf in one.leaves}
    with pytest.raises(DataError, match=r"token id \d+, but its model's vocabulary has 256 ids"):
        ranges.arrays([one.cut(contents) for one in found])


def test_the_first_token_id_that_is_refused_is_the_size_of_the_vocabulary() -> None:
    manifest = manifest_of(model={"vocabulary_size": 256}, data={"token_bytes": 2})
    ranges = SampleRanges(manifest)
    inputs_BT, targets_BT = ranges.arrays([np.array([1, 255], "<u2").tobytes()])
    assert (inputs_BT.tolist(), targets_BT.tolist()) == ([[1]], [[255]])
    with pytest.raises(DataError, match="holds token id 256"):
        ranges.arrays([np.array([1, 256], "<u2").tobytes()])


@pytest.mark.parametrize(
    "wanted", [LeafId(2, 0), LeafId(0, 1), LeafId(1, 5), LeafId(1, 2**28 - 1)], ids=str
)
def test_a_leaf_that_the_manifest_does_not_have_is_refused(tmp_path: Path, wanted: LeafId) -> None:
    manifest = written(tmp_path, (5000, 40_000), 2)
    files = LeafFiles(tmp_path, manifest.data)
    for read in (files.content, files.proof):
        with pytest.raises(DataError, match="there is no"):
            read(wanted)


def test_a_cut_or_missing_file_of_the_organiser_is_one_sentence(tmp_path: Path) -> None:
    manifest = written(tmp_path, (5000, 40_000), 2)
    files, shard = LeafFiles(tmp_path, manifest.data), tmp_path / "train-1.tokens"
    shard.write_bytes(shard.read_bytes()[: 4 * merkle.LEAF_BYTES])
    with pytest.raises(DataError, match=r"train-1\.tokens is shorter than the manifest says; rest"):
        files.content(LeafId(1, 4))
    for read_all in (
        lambda: write_missing_trees(tmp_path, manifest.data, print),
        lambda: ShardSamples(tmp_path, manifest),
    ):
        with pytest.raises(
            DataError, match=r"train-1\.tokens has 65536 bytes, but its 40000 tokens"
        ):
            read_all()
    shard.unlink()
    with pytest.raises(DataError, match=r"cannot read .*train-1\.tokens \(No such file"):
        files.content(LeafId(1, 0))
    with pytest.raises(DataError, match=r"cannot read .*train-1\.tokens \(No such file"):
        write_missing_trees(tmp_path, manifest.data, print)


def test_a_missing_or_cut_tree_is_made_again_and_only_of_the_manifests_shard(
    tmp_path: Path,
) -> None:
    manifest = written(tmp_path, (5000, 40_000), 2)
    tree = tree_path(tmp_path / "train-1.tokens")
    before, lines = tree.read_bytes(), list[str]()
    write_missing_trees(tmp_path, manifest.data, lines.append)
    assert lines == []
    for damage in (tree.unlink, lambda: tree.write_bytes(before[:-1])):
        damage()
        write_missing_trees(tmp_path, manifest.data, lines.append)
        assert tree.read_bytes() == before
    assert lines == ["hashing train-1.tokens, whose tree is missing"] * 2
    shard = tmp_path / "train-1.tokens"
    shard.write_bytes(bytes(shard.stat().st_size))
    tree.unlink()
    with pytest.raises(DataError, match=r"train-1\.tokens is damaged: its Merkle root begins"):
        write_missing_trees(tmp_path, manifest.data, lines.append)
    assert not tree.exists()
