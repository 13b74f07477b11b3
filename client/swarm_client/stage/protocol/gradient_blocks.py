"""Blocks of a gradient as it is counted, and the digest that a receipt has of all of them.

A stage's gradient has up to gigabytes, more than a home's uplink carries within an audit. The
receipt's digest is that of the digests of all blocks, so that it binds each single one: where
an auditor computes otherwise than the audited peer, it gets all digests and the blocks of a sample
that was drawn after the receipt was signed. Free of torch: the daemon asks for blocks, and the
worker shows them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from blake3 import blake3

from swarm_shared.base.transcript import GRADIENT_BLOCK_BYTES as BLOCK_BYTES
from swarm_shared.base.types import MAX_SAMPLED_BLOCKS
from swarm_shared.identity.work_statements import DIGEST_BYTES, wire_digest

LEAST_BLOCKS_OF_A_THREAD = 16
"""Fewer blocks are hashed in less time than it takes to hand them to a thread."""


def block_count(nbytes: int) -> int:
    """Number of blocks of a gradient; the last one may be shorter."""
    return -(-nbytes // BLOCK_BYTES)


def block_range(block: int, nbytes: int) -> range:
    """The bytes of one block of a gradient."""
    return range(block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, nbytes))


def sampled_blocks(seed: str, nbytes: int) -> tuple[int, ...]:
    """The blocks of a sample in ascending order: all of a small gradient, otherwise those that
    follow from the seed, the same for all auditors of a receipt."""

    def lot(block: int) -> bytes:
        return blake3(f"{seed}/{block}".encode()).digest()

    blocks = range(block_count(nbytes))
    return tuple(sorted(heapq.nsmallest(MAX_SAMPLED_BLOCKS, blocks, key=lot)))


def shown_bytes(blocks: Sequence[int], nbytes: int) -> int:
    """Bytes with which a gradient's digests and these blocks are shown."""
    return block_count(nbytes) * DIGEST_BYTES + sum(len(block_range(b, nbytes)) for b in blocks)


class BlockDigests:
    """The digests of a gradient's blocks, of which the bytes come in pieces of any size."""

    def __init__(self, threads: int = 1) -> None:
        self._threads = threads
        self._pool: ThreadPoolExecutor | None = None
        self._whole = bytearray()
        self._begun, self._begun_bytes = blake3(), 0

    def update(self, piece: memoryview) -> None:
        """Add the next bytes; they may change afterwards."""
        if self._begun_bytes:
            head = piece[: BLOCK_BYTES - self._begun_bytes]
            self._begin(head)
            piece = piece[len(head) :]
            if self._begun_bytes < BLOCK_BYTES:
                return
            self._whole += self._begun.digest(DIGEST_BYTES)
            self._begun, self._begun_bytes = blake3(), 0
        end = len(piece) - len(piece) % BLOCK_BYTES
        self._hash(piece[:end])
        self._begin(piece[end:])

    def _begin(self, piece: memoryview) -> None:
        self._begun.update(piece)
        self._begun_bytes += len(piece)

    def _hash(self, blocks: memoryview) -> None:
        """Hash whole blocks, each thread a share of them."""
        count = len(blocks) // BLOCK_BYTES
        threads = min(self._threads, count // LEAST_BLOCKS_OF_A_THREAD)
        if threads <= 1:
            self._whole += _digests(blocks)
            return
        self._pool = self._pool or ThreadPoolExecutor(self._threads)
        size = -(-count // threads) * BLOCK_BYTES
        shares = (blocks[start : start + size] for start in range(0, len(blocks), size))
        self._whole += b"".join(self._pool.map(_digests, shares))

    def joined(self) -> bytes:
        """Return the digests of all blocks so far, one behind the other."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        begun = self._begun.digest(DIGEST_BYTES) if self._begun_bytes else b""
        return bytes(self._whole) + begun


def _digests(blocks: memoryview) -> bytes:
    starts = range(0, len(blocks), BLOCK_BYTES)
    return b"".join(
        blake3(blocks[start : start + BLOCK_BYTES]).digest(DIGEST_BYTES) for start in starts
    )


def gradient_digest(digests: bytes) -> str:
    """Return the digest of a gradient with these digests of its blocks."""
    return wire_digest(digests)


def has_blocks(digests: bytes, blocks: Sequence[int], content: memoryview) -> bool:
    """Whether the digests of a gradient's blocks have those of these blocks, which are in `content`
    one behind the other."""
    wanted = [digests[block * DIGEST_BYTES : (block + 1) * DIGEST_BYTES] for block in blocks]
    shown = [content[start : start + BLOCK_BYTES] for start in range(0, len(content), BLOCK_BYTES)]
    return [blake3(block).digest(DIGEST_BYTES) for block in shown] == wanted
