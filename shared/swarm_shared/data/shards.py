"""Files of token ids: written once, hashed, memory-mapped.

Owns the shard file (`<name>.tokens`: little-endian unsigned integers of 1, 2 or 4 bytes and nothing
else; `ShardInfo` in the manifest describes it). Does not decide which tokens make up a microbatch
(`swarm_shared.data.sampler`) or where they come from.
"""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from swarm_shared.base.atomic_file import atomic_file
from swarm_shared.base.errors import DataError
from swarm_shared.run.manifest import DataConfig, ShardInfo

Split = Literal["train", "heldout"]
TokenBytes = Literal[1, 2, 4]
Tokens = npt.NDArray[Any]

SHARD_TOKENS = 64 * 1024 * 1024
"""Tokens after which the next shard begins: small enough to fetch again after damage."""

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


def write_shard(
    folder: Path, name: str, split: Split, tokens: Iterable[Tokens], token_bytes: TokenBytes
) -> ShardInfo:
    """Write one shard atomically from pieces, holding one piece in memory at a time."""
    digest, count = hashlib.sha256(), 0
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
            digest.update(content)
            count += piece.size
            file.write(content)
        if count == 0:
            raise DataError(f"there are no tokens for {path}; add text to the training data")
    return ShardInfo(name=name, split=split, tokens=count, sha256=digest.hexdigest())


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


@dataclass(frozen=True, slots=True)
class TokenStream:
    """The memory-mapped shards of one split, as slots of one sequence each.

    A slot is `sequence_length` inputs and the token after them; neighbouring slots share that one
    token (the last target of one is the first input of the next). No slot crosses a shard, so a
    sequence needs one file only.
    """

    shards: tuple[Tokens, ...]

    @property
    def tokens(self) -> int:
        return sum(shard.size for shard in self.shards)

    def slots(self, sequence_length: int) -> int:
        return sum(slots_in(shard.size, sequence_length) for shard in self.shards)

    def sequences(
        self, slots_B: npt.NDArray[np.int64], sequence_length: int
    ) -> npt.NDArray[np.int64]:
        """Return the tokens of the slots, shape (B, sequence_length + 1)."""
        ends = np.cumsum([slots_in(shard.size, sequence_length) for shard in self.shards])
        owners_B = np.searchsorted(ends, slots_B, side="right")
        tokens_BS = np.empty((len(slots_B), sequence_length + 1), dtype=np.int64)
        for row, (owner, slot) in enumerate(zip(owners_B, slots_B, strict=True)):
            first = int(slot) - (int(ends[owner - 1]) if owner else 0)
            start = first * sequence_length
            tokens_BS[row] = self.shards[owner][start : start + sequence_length + 1]
        return tokens_BS


def slots_in(tokens: int, sequence_length: int) -> int:
    """Return the number of sequences in a shard of `tokens` tokens; each needs one more token as
    target."""
    return max(0, tokens - 1) // sequence_length


def open_shards(folder: Path, data: DataConfig, split: Split) -> TokenStream:
    """Map every shard of a split; refuses one that is missing or not of its stated size."""
    dtype = token_dtype(data.token_bytes)
    shards: list[Tokens] = []
    for info in data.split(split):
        path = folder / info.name
        _check_size(path, info, data.token_bytes)
        mapped = np.memmap(path, dtype=dtype, mode="r", shape=(info.tokens,))
        _advise_random(mapped)
        shards.append(mapped)
    if not shards:
        raise DataError(f"the manifest names no {split} shard; the run has to be made anew")
    return TokenStream(tuple(shards))


def verify_shard(
    path: Path, info: ShardInfo, token_bytes: TokenBytes, vocabulary_size: int
) -> None:
    """Read the whole file; DataError unless size, hash and every token id are right."""
    _check_size(path, info, token_bytes)
    digest, largest = hashlib.sha256(), -1
    dtype = token_dtype(token_bytes)
    try:
        with path.open("rb") as file:
            while content := file.read(_READ_TOKENS * token_bytes):
                digest.update(content)
                whole = len(content) - len(content) % token_bytes
                ids = np.frombuffer(content[:whole], dtype=dtype)
                largest = max(largest, int(ids.max(initial=0)))
    except OSError as error:
        raise _unreadable(path, error) from error
    if digest.hexdigest() != info.sha256:
        raise DataError(
            f"{path} is damaged: its SHA-256 begins {digest.hexdigest()[:12]}, the manifest says "
            f"{info.sha256[:12]}; delete it and fetch it again"
        )
    if largest >= vocabulary_size:
        raise DataError(
            f"{path} holds token id {largest}, but the model's vocabulary has {vocabulary_size} "
            "ids; use data made for this model, or raise [model] vocabulary_size"
        )


def unigram_entropy_nats(stream: TokenStream, vocabulary_size: int) -> float:
    """Return the entropy of the stream's own token distribution."""
    counts = np.zeros(vocabulary_size, dtype=np.int64)
    for shard in stream.shards:
        for start in range(0, shard.size, _READ_TOKENS):
            counts += np.bincount(shard[start : start + _READ_TOKENS], minlength=vocabulary_size)
    shares = counts[counts > 0] / counts.sum()
    return float(max(0.0, -(shares * np.log(shares)).sum()))


def _check_size(path: Path, info: ShardInfo, token_bytes: TokenBytes) -> None:
    try:
        size_bytes = path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error
    expected_bytes = shard_size_bytes(info, token_bytes)
    if size_bytes != expected_bytes:
        raise DataError(
            f"{path} has {size_bytes} bytes, but its {info.tokens} tokens take {expected_bytes}; "
            "delete it and fetch it again"
        )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        f"cannot read the data shard {path} ({error.strerror}); fetch it again or restore it"
    )


def _advise_random(mapped: Tokens) -> None:
    """Samples are scattered, so reading ahead would only fill memory with what is not wanted."""
    held = getattr(mapped, "_mmap", None)
    if isinstance(held, mmap.mmap) and hasattr(mmap, "MADV_RANDOM"):
        held.madvise(mmap.MADV_RANDOM)
