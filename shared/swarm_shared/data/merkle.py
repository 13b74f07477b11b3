"""A Merkle tree over the leaves of a shard: proof that a range of bytes is the manifest's.

Owns the size of a leaf, the hashes (RFC 6962: leaves and inner nodes begin with different bytes, a
node without a sibling moves up unchanged) and the tree file (`<shard>.tree`: all hashes, level by
level from the leaves to the root). Pure: bytes in, bytes out.

The manifest holds the root and the size of each shard. A leaf is checked with one hash of each
level, 16 of 32 bytes in a shard of 1 GiB (docs/decisions, number 0038).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

LEAF_BYTES = 16 * 1024
"""Bytes of a leaf, the unit in which data is fetched. A sequence of 2048 tokens of 2 bytes lies in
1.25 leaves on average, so 5 times its bytes cross; the tree takes 1/256 of the data."""

HASH_BYTES = 32

_LEAF, _NODE = hashlib.sha256(b"\0"), hashlib.sha256(b"\1")


def root_of(tree: bytes) -> str:
    """Return the root in a tree file, in hex, as the manifest has it."""
    return tree[-HASH_BYTES:].hex()


def leaf_count(size_bytes: int) -> int:
    """Return the number of leaves of a shard; the last one may be shorter."""
    return -(-size_bytes // LEAF_BYTES)


def leaf_size_bytes(size_bytes: int, leaf: int) -> int:
    """Return the length of one leaf of a shard of `size_bytes`."""
    return min(LEAF_BYTES, size_bytes - leaf * LEAF_BYTES)


def hash_leaf(content: bytes | bytearray | memoryview) -> bytes:
    digest = _LEAF.copy()
    digest.update(content)
    return digest.digest()


def hash_pair(left: bytes, right: bytes) -> bytes:
    digest = _NODE.copy()
    digest.update(left + right)
    return digest.digest()


def tree_of(leaves: Sequence[bytes]) -> bytes:
    """Return the content of the tree file; the root is its last hash. `leaves` are hashes."""
    levels, level = [b"".join(leaves)], list(leaves)
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=False)
        odd = level[-1:] if len(level) % 2 else []
        level = [hash_pair(left, right) for left, right in pairs] + odd
        levels.append(b"".join(level))
    return b"".join(levels)


class TreeBuilder:
    """The tree of content that arrives in pieces; holds 32 bytes a leaf."""

    def __init__(self) -> None:
        self._leaves: list[bytes] = []
        self._rest = b""

    def add(self, content: bytes) -> None:
        whole = memoryview(self._rest + content if self._rest else content)
        end = len(whole) - len(whole) % LEAF_BYTES
        self._leaves += [
            hash_leaf(whole[start : start + LEAF_BYTES]) for start in range(0, end, LEAF_BYTES)
        ]
        self._rest = bytes(whole[end:])

    def tree(self) -> bytes:
        """Return the content of the tree file of everything added, which is at least one byte."""
        rest = [hash_leaf(self._rest)] if self._rest else []
        return tree_of(self._leaves + rest)


def tree_size_bytes(leaves: int) -> int:
    """Return the size of the tree file of a shard with so many leaves."""
    total = leaves
    while leaves > 1:
        leaves = (leaves + 1) // 2
        total += leaves
    return total * HASH_BYTES


def proof_places(leaf: int, leaves: int) -> list[int]:
    """Return the places in the tree file, counted in hashes, that prove one leaf, in order."""
    places, first = [], 0
    while leaves > 1:
        sibling = leaf ^ 1
        if sibling < leaves:
            places.append(first + sibling)
        first += leaves
        leaf, leaves = leaf // 2, (leaves + 1) // 2
    return places


def proved_root(leaf_hash: bytes, leaf: int, leaves: int, proof: bytes) -> bytes:
    """Return the root that a leaf and its proof lead to. The proof has the length that
    `proof_places` gives."""
    root, used = leaf_hash, 0
    while leaves > 1:
        if leaf ^ 1 < leaves:
            sibling = proof[used : used + HASH_BYTES]
            used += HASH_BYTES
            root = hash_pair(sibling, root) if leaf % 2 else hash_pair(root, sibling)
        leaf, leaves = leaf // 2, (leaves + 1) // 2
    return root
