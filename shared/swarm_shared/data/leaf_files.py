"""The shards in a folder: leaves and their proofs, which the organiser serves, and microbatches.

A number from a remote is checked against the manifest before a file is opened. Blocking: call from
a thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import RawIOBase
from pathlib import Path

from swarm_shared.base.errors import DataError
from swarm_shared.data.merkle import (
    HASH_BYTES,
    LEAF_BYTES,
    leaf_count,
    leaf_size_bytes,
    proof_places,
)
from swarm_shared.data.sample_ranges import Int64, LeafId, SampleRange, SampleRanges
from swarm_shared.data.shards import check_shards, shard_size_bytes, tree_path
from swarm_shared.run.manifest import DataConfig, Manifest, ShardInfo


class LeafFiles:
    """Reads leaves and proofs by number. DataError for a number that the manifest does not have,
    and for a file that is missing or too short."""

    def __init__(self, folder: Path, data: DataConfig) -> None:
        self._folder = folder
        self._data = data

    def proof(self, wanted: LeafId) -> bytes:
        """Return the hashes that lead from the leaf to the manifest's root."""
        info, size_bytes = self._shard(wanted)
        places = proof_places(wanted.leaf, leaf_count(size_bytes))
        offsets = [HASH_BYTES * place for place in places]
        return _read(tree_path(self._folder / info.name), offsets, HASH_BYTES)

    def content(self, wanted: LeafId) -> bytes:
        """Return the bytes of the leaf, as they are in the file."""
        info, size_bytes = self._shard(wanted)
        expected = leaf_size_bytes(size_bytes, wanted.leaf)
        return _read(self._folder / info.name, [LEAF_BYTES * wanted.leaf], expected)

    def _shard(self, wanted: LeafId) -> tuple[ShardInfo, int]:
        if wanted.shard >= len(self._data.shards):
            raise DataError(f"there is no shard {wanted.shard}; the run has fewer")
        info = self._data.shards[wanted.shard]
        size_bytes = shard_size_bytes(info, self._data.token_bytes)
        if wanted.leaf >= leaf_count(size_bytes):
            raise DataError(f"there is no leaf {wanted.leaf} of {info.name}; it has fewer")
        return info, size_bytes


class ShardSamples:
    """The microbatches of a run, from the shards in a folder. DataError if a shard is missing or
    not of its stated size."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        check_shards(folder, manifest.data)
        self._paths = [folder / info.name for info in manifest.data.shards]
        self._ranges = SampleRanges(manifest)
        self._training = manifest.training

    def training(self, step: int, index: int) -> tuple[Int64, Int64]:
        """Return (inputs_BT, targets_BT) of one microbatch; targets are the inputs shifted by
        one."""
        return self._arrays(self._ranges.training(step, index))

    def heldout(self, index: int) -> tuple[Int64, Int64]:
        return self._arrays(self._ranges.heldout(index))

    def of_step(self, step: int) -> list[tuple[Int64, Int64]]:
        """Return all microbatches of a step, in order."""
        return [self.training(step, index) for index in range(self._training.microbatches_per_step)]

    def of_evaluation(self) -> list[tuple[Int64, Int64]]:
        """Return all held-out microbatches that are measured after the last step, in order."""
        return [self.heldout(index) for index in range(self._training.evaluation_microbatches)]

    def _arrays(self, found: Sequence[SampleRange]) -> tuple[Int64, Int64]:
        sequences = [_read(self._paths[one.shard], [one.start], one.size) for one in found]
        return self._ranges.arrays(sequences)


def _read(path: Path, offsets: list[int], count_bytes: int) -> bytes:
    try:
        with path.open("rb", buffering=0) as file:
            parts = [_read_at(file, offset, count_bytes) for offset in offsets]
    except OSError as error:
        raise DataError(f"cannot read {path} ({error.strerror}); restore it from a copy") from error
    if any(len(part) != count_bytes for part in parts):
        raise DataError(f"{path} is shorter than the manifest says; restore it from a copy")
    return b"".join(parts)


def _read_at(file: RawIOBase, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count) or b""
