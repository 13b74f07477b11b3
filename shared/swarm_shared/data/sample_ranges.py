"""The bytes behind a microbatch: which leaves of which shards hold its sequences.

The slots that `swarm_shared.data.sampler` draws, as ranges of bytes, so that a trainer needs no
shard on its machine. Pure: numbers in, numbers out.

Shape suffixes: B sequences of a microbatch, T tokens of a sequence, S tokens of a slot (T + 1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from swarm_shared.base.errors import DataError, ProtocolError
from swarm_shared.data.merkle import (
    HASH_BYTES,
    LEAF_BYTES,
    hash_leaf,
    leaf_count,
    leaf_size_bytes,
    proof_places,
    proved_root,
)
from swarm_shared.data.sampler import heldout_slots, training_slots
from swarm_shared.data.shards import Split, shard_size_bytes, slot_starts, token_dtype
from swarm_shared.run.manifest import Manifest

Int64 = npt.NDArray[np.int64]


class LeafId(NamedTuple):
    """One leaf of the run's data: the shard's place in the manifest, the leaf's in the shard."""

    shard: int
    leaf: int


@dataclass(frozen=True, slots=True)
class SampleRange:
    """The bytes of one sequence, in one shard."""

    shard: int
    start: int
    size: int

    @property
    def leaves(self) -> tuple[LeafId, ...]:
        first, last = self.start // LEAF_BYTES, (self.start + self.size - 1) // LEAF_BYTES
        return tuple(LeafId(self.shard, leaf) for leaf in range(first, last + 1))

    def cut(self, contents: Mapping[LeafId, bytes]) -> bytes:
        """Return the bytes of the range out of those of its leaves."""
        joined = b"".join(contents[leaf] for leaf in self.leaves)
        first = self.start % LEAF_BYTES
        return joined[first : first + self.size]


class SampleRanges:
    """Where the samples of a run are."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = manifest
        data = manifest.data
        self._splits: dict[Split, list[int]] = {"train": [], "heldout": []}
        for place, shard in enumerate(data.shards):
            self._splits[shard.split].append(place)
        self._tokens = np.array([shard.tokens for shard in data.shards], dtype=np.int64)

    def training(self, step: int, index: int) -> tuple[SampleRange, ...]:
        return self._ranges("train", training_slots(self._manifest, step, index))

    def heldout(self, index: int) -> tuple[SampleRange, ...]:
        return self._ranges("heldout", heldout_slots(self._manifest, index))

    def _ranges(self, split: Split, slots_B: Int64) -> tuple[SampleRange, ...]:
        places, length = self._splits[split], self._manifest.model.sequence_length
        width = self._manifest.data.token_bytes
        owners_B, starts_B = slot_starts(self._tokens[places], slots_B, length)
        return tuple(
            SampleRange(places[owner], width * int(start), width * (length + 1))
            for owner, start in zip(owners_B, starts_B, strict=True)
        )

    def arrays(self, sequences: Sequence[bytes]) -> tuple[Int64, Int64]:
        """Return (inputs_BT, targets_BT) of a microbatch; targets are the inputs shifted by one."""
        dtype: np.dtype[Any] = token_dtype(self._manifest.data.token_bytes)
        rows = [np.frombuffer(sequence, dtype=dtype) for sequence in sequences]
        tokens_BS = np.stack(rows).astype(np.int64)
        largest = int(tokens_BS.max())
        if largest >= self._manifest.model.vocabulary_size:
            raise DataError(
                f"the run's data holds token id {largest}, but its model's vocabulary has "
                f"{self._manifest.model.vocabulary_size} ids; the organiser has to make it anew"
            )
        return np.ascontiguousarray(tokens_BS[:, :-1]), np.ascontiguousarray(tokens_BS[:, 1:])


@dataclass(frozen=True, slots=True)
class LeafShape:
    """What the manifest says about one leaf."""

    size_bytes: int
    proof_bytes: int


def leaf_shape(manifest: Manifest, wanted: LeafId) -> LeafShape:
    shard_bytes = shard_size_bytes(manifest.data.shards[wanted.shard], manifest.data.token_bytes)
    hashes = len(proof_places(wanted.leaf, leaf_count(shard_bytes)))
    return LeafShape(leaf_size_bytes(shard_bytes, wanted.leaf), HASH_BYTES * hashes)


def check_leaf(
    manifest: Manifest, wanted: LeafId, content: bytes | memoryview, proof: bytes
) -> None:
    """ProtocolError unless these are the bytes that the signed manifest commits to."""
    info = manifest.data.shards[wanted.shard]
    leaves = leaf_count(shard_size_bytes(info, manifest.data.token_bytes))
    root = proved_root(hash_leaf(content), wanted.leaf, leaves, proof)
    if root.hex() != info.merkle_root:
        raise ProtocolError(f"bytes of {info.name} are not those of the manifest")
