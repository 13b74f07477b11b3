"""A range of a shard is proved by the root, whatever the shard's size, and by nothing else."""

from __future__ import annotations

import hashlib

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_shared.data.merkle import (
    HASH_BYTES,
    LEAF_BYTES,
    TreeBuilder,
    hash_leaf,
    leaf_count,
    leaf_size_bytes,
    proof_places,
    proved_root,
    root_of,
    tree_of,
    tree_size_bytes,
)


def leaves_of(count: int) -> list[bytes]:
    return [hash_leaf(number.to_bytes(4, "little")) for number in range(count)]


def proof_of(tree: bytes, leaf: int, leaves: int) -> bytes:
    return b"".join(
        tree[at * HASH_BYTES : (at + 1) * HASH_BYTES] for at in proof_places(leaf, leaves)
    )


@given(st.integers(1, 300), st.data())
def test_each_leaf_leads_to_the_root_and_no_other_leaf_place_or_proof_does(
    count: int, data: st.DataObject
) -> None:
    hashes = leaves_of(count)
    tree = tree_of(hashes)
    leaf = data.draw(st.integers(0, count - 1))
    proof = proof_of(tree, leaf, count)
    assert len(tree) == tree_size_bytes(count)
    assert proved_root(hashes[leaf], leaf, count, proof).hex() == root_of(tree)
    assert len(proof) <= HASH_BYTES * (count - 1).bit_length()
    if count > 1:
        other = data.draw(st.integers(0, count - 1).filter(lambda one: one != leaf))
        wrong = bytearray(proof)
        wrong[data.draw(st.integers(0, len(wrong) - 1))] ^= 1
        assert proved_root(hashes[other], leaf, count, proof).hex() != root_of(tree)
        assert proved_root(hashes[leaf], leaf, count, bytes(wrong)).hex() != root_of(tree)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5 * LEAF_BYTES), st.lists(st.integers(1, 3 * LEAF_BYTES), max_size=6))
def test_the_tree_does_not_depend_on_the_pieces_in_which_the_content_arrives(
    size: int, cuts: list[int]
) -> None:
    content = hashlib.shake_256(str(size).encode()).digest(size)
    whole, pieces = TreeBuilder(), TreeBuilder()
    whole.add(content)
    start = 0
    for cut in [*cuts, size]:
        pieces.add(content[start : start + cut])
        start += cut
    assert pieces.tree() == whole.tree()
    leaves = [
        hash_leaf(content[n * LEAF_BYTES :][: leaf_size_bytes(size, n)])
        for n in range(leaf_count(size))
    ]
    assert whole.tree() == tree_of(leaves)


def test_an_inner_node_is_no_leaf() -> None:
    """Otherwise two hashes of 32 bytes could be passed off as content (RFC 6962)."""
    left, right = leaves_of(2)
    assert root_of(tree_of([left, right])) != hash_leaf(left + right).hex()


def test_a_proof_in_a_shard_of_one_gibibyte_has_half_a_kilobyte() -> None:
    leaves = leaf_count(2**30)
    assert len(proof_places(leaves - 1, leaves)) * HASH_BYTES == 512
