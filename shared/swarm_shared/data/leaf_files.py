"""Leaves of the shards in a folder, and their proofs: what the organiser serves.

A number from a remote is checked against the manifest before a file is opened. Blocking: call from
a thread.
"""

from __future__ import annotations

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
from swarm_shared.data.sample_ranges import LeafId
from swarm_shared.data.shards import shard_size_bytes, tree_path
from swarm_shared.run.manifest import DataConfig, ShardInfo


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
        return self._read(tree_path(self._folder / info.name), places, HASH_BYTES, HASH_BYTES)

    def content(self, wanted: LeafId) -> bytes:
        """Return the bytes of the leaf, as they are in the file."""
        info, size_bytes = self._shard(wanted)
        expected = leaf_size_bytes(size_bytes, wanted.leaf)
        return self._read(self._folder / info.name, [wanted.leaf], LEAF_BYTES, expected)

    def _shard(self, wanted: LeafId) -> tuple[ShardInfo, int]:
        if wanted.shard >= len(self._data.shards):
            raise DataError(f"there is no shard {wanted.shard}; the run has fewer")
        info = self._data.shards[wanted.shard]
        size_bytes = shard_size_bytes(info, self._data.token_bytes)
        if wanted.leaf >= leaf_count(size_bytes):
            raise DataError(f"there is no leaf {wanted.leaf} of {info.name}; it has fewer")
        return info, size_bytes

    def _read(self, path: Path, places: list[int], unit_bytes: int, count_bytes: int) -> bytes:
        try:
            with path.open("rb", buffering=0) as file:
                parts = [_read_at(file, at * unit_bytes, count_bytes) for at in places]
        except OSError as error:
            raise DataError(
                f"cannot read {path} ({error.strerror}); restore it from a copy"
            ) from error
        if any(len(part) != count_bytes for part in parts):
            raise DataError(f"{path} is shorter than the manifest says; restore it from a copy")
        return b"".join(parts)


def _read_at(file: RawIOBase, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count) or b""
