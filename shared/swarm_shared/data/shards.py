"""Files of token ids: written once, hashed.

Owns the shard file (`<name>.tokens`: little-endian unsigned integers of 1, 2 or 4 bytes and nothing
else; `ShardInfo` in the manifest describes it) and the tree file beside it (`<name>.tree`, which
proves ranges of it). Does not decide which tokens make up a microbatch
(`swarm_shared.data.sampler`) or where they come from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from swarm_shared.base.atomic_file import atomic_file, write_atomically
from swarm_shared.base.errors import DataError
from swarm_shared.data.merkle import TreeBuilder, leaf_count, root_of, tree_size_bytes
from swarm_shared.run.manifest import DataConfig, ShardInfo

Split = Literal["train", "heldout"]
TokenBytes = Literal[1, 2, 4]
Tokens = npt.NDArray[Any]

SHARD_TOKENS = 512 * 1024 * 1024
"""Tokens after which the next shard begins: of 2 bytes, 1 GiB, and a manifest of 200 kB names a
terabyte. Volunteers fetch leaves, so the size of a shard costs them nothing."""

_READ_TOKENS = 1024 * 1024


def token_bytes_for(vocabulary_size: int) -> TokenBytes:
    """Return the narrowest integer size that holds every id."""
    if vocabulary_size <= 2**8:
        return 1
    return 2 if vocabulary_size <= 2**16 else 4


def token_dtype(token_bytes: TokenBytes) -> np.dtype[Any]:
    return np.dtype(f"<u{token_bytes}")


def shard_size_bytes(info: ShardInfo, token_bytes: TokenBytes) -> int:
    return info.tokens * token_bytes


def tree_path(shard: Path) -> Path:
    """Return the path of the tree file beside a shard (`swarm_shared.data.merkle`)."""
    return shard.with_suffix(".tree")


def write_shard(
    folder: Path, name: str, split: Split, tokens: Iterable[Tokens], token_bytes: TokenBytes
) -> ShardInfo:
    """Write one shard and its tree, each atomically, holding one piece in memory at a time."""
    builder, count = TreeBuilder(), 0
    dtype = token_dtype(token_bytes)
    limit = 2 ** (8 * token_bytes)
    path = folder / name
    with atomic_file(path) as file:
        for piece in tokens:
            if piece.size and not 0 <= int(piece.min()) <= int(piece.max()) < limit:
                raise DataError(
                    f"a token id does not fit the {token_bytes} byte(s) of {path}: "
                    f"ids from {int(piece.min())} to {int(piece.max())}"
                )
            content = piece.astype(dtype, copy=False).tobytes()
            builder.add(content)
            count += piece.size
            file.write(content)
        if count == 0:
            raise DataError(f"there are no tokens for {path}; add text to the training data")
    tree = builder.tree()
    write_atomically(tree_path(path), tree)
    return ShardInfo(name=name, split=split, tokens=count, merkle_root=root_of(tree))


def write_shards(
    folder: Path,
    split: Split,
    tokens: Iterable[Tokens],
    token_bytes: TokenBytes,
    shard_tokens: int = SHARD_TOKENS,
) -> tuple[ShardInfo, ...]:
    """Write a whole split as shards of at most `shard_tokens` tokens, named in order."""
    shards: list[ShardInfo] = []
    rest = _Pieces(tokens)
    while not shards or not rest.empty():
        name = f"{split}-{len(shards):05d}.tokens"
        shards.append(write_shard(folder, name, split, rest.take(shard_tokens), token_bytes))
    return tuple(shards)


class _Pieces:
    """A stream of arrays that can be cut at any token."""

    def __init__(self, pieces: Iterable[Tokens]) -> None:
        self._pieces = iter(pieces)
        self._held: Tokens | None = None

    def empty(self) -> bool:
        while self._held is None or self._held.size == 0:
            self._held = next(self._pieces, None)
            if self._held is None:
                return True
        return False

    def take(self, count: int) -> Iterator[Tokens]:
        while count and not self.empty():
            assert self._held is not None
            piece, self._held = self._held[:count], self._held[count:]
            count -= piece.size
            yield piece


def slot_starts(
    sizes: npt.NDArray[np.int64], slots_B: npt.NDArray[np.int64], sequence_length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return for each slot its shard and its first token there, in shards of `sizes` tokens."""
    ends = np.cumsum(np.maximum(0, sizes - 1) // sequence_length)
    owners_B = np.searchsorted(ends, slots_B, side="right")
    before_B = np.concatenate(([0], ends))[owners_B]
    return owners_B, (slots_B - before_B) * sequence_length


def slots_in(tokens: int, sequence_length: int) -> int:
    """Return the number of sequences in a shard of `tokens` tokens; each needs one more token as
    target."""
    return max(0, tokens - 1) // sequence_length


def check_shards(folder: Path, data: DataConfig) -> None:
    """DataError if a shard is missing or not of its stated size."""
    for info in data.shards:
        _check_size(folder / info.name, info, data.token_bytes)


def verify_shard(
    path: Path, info: ShardInfo, token_bytes: TokenBytes, vocabulary_size: int
) -> bytes:
    """Read the whole file and return its tree; DataError unless size, Merkle root and every token
    id are right."""
    tree, largest = _read_shard(path, info, token_bytes)
    if largest >= vocabulary_size:
        raise DataError(
            f"{path} holds token id {largest}, but the model's vocabulary has {vocabulary_size} "
            "ids; use data made for this model, or raise [model] vocabulary_size"
        )
    return tree


def check_tree(shard: Path, tree: bytes) -> None:
    """DataError if the tree file beside a verified shard is another one: proofs of it would be
    wrong. A missing one is made when the coordinator starts."""
    path = tree_path(shard)
    if path.exists() and path.read_bytes() != tree:
        raise DataError(f"{path} is damaged; delete it, and the coordinator makes it anew")


def write_missing_trees(folder: Path, data: DataConfig, report: Callable[[str], None]) -> None:
    """Make the tree files that are missing or of another size. DataError if a shard is missing or
    not the manifest's."""
    for info in data.shards:
        shard = folder / info.name
        _check_size(shard, info, data.token_bytes)
        path = tree_path(shard)
        needed_bytes = tree_size_bytes(leaf_count(shard_size_bytes(info, data.token_bytes)))
        if path.exists() and path.stat().st_size == needed_bytes:
            continue
        report(f"hashing {shard.name}, whose tree is missing")
        tree, _ = _read_shard(shard, info, data.token_bytes)
        write_atomically(path, tree)


def unigram_entropy_nats(
    folder: Path, data: DataConfig, split: Split, vocabulary_size: int
) -> float:
    """Return the entropy of the split's own token distribution."""
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for info in data.split(split):
        with (folder / info.name).open("rb") as file:
            while content := file.read(_READ_TOKENS * data.token_bytes):
                ids = np.frombuffer(content, dtype=token_dtype(data.token_bytes))
                counts += np.bincount(ids, minlength=vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    return float(max(0.0, -(shares * np.log(shares)).sum()))


def _read_shard(path: Path, info: ShardInfo, token_bytes: TokenBytes) -> tuple[bytes, int]:
    """Read the whole file; return its tree and its largest token id. DataError unless size and
    Merkle root are right."""
    _check_size(path, info, token_bytes)
    builder, largest = TreeBuilder(), -1
    dtype = token_dtype(token_bytes)
    try:
        with path.open("rb") as file:
            while content := file.read(_READ_TOKENS * token_bytes):
                builder.add(content)
                whole = len(content) - len(content) % token_bytes
                ids = np.frombuffer(content[:whole], dtype=dtype)
                largest = max(largest, int(ids.max(initial=0)))
    except OSError as error:
        raise _unreadable(path, error) from error
    tree = builder.tree()
    _check_root(path, info, root_of(tree))
    return tree, largest


def _check_size(path: Path, info: ShardInfo, token_bytes: TokenBytes) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    expected_bytes = shard_size_bytes(info, token_bytes)
    if size_bytes != expected_bytes:
        raise DataError(
            f"{path} has {size_bytes} bytes, but its {info.tokens} tokens take {expected_bytes}; "
            "delete it and restore it from a copy"
        )


def _check_root(path: Path, info: ShardInfo, root: str) -> None:
    if root != info.merkle_root:
        raise DataError(
            f"{path} is damaged: its Merkle root begins {root[:12]}, the manifest says "
            f"{info.merkle_root[:12]}; delete it and restore it from a copy"
        )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read the data shard {path} ({error.strerror}); restore it from a copy"
    )
