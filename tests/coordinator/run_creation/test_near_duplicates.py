"""Similarity of documents by their signatures, beside the Jaccard index of their shingles."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.run_creation.near_duplicates import (
    BINS,
    SHINGLE_BYTES,
    NearDuplicates,
    Signature,
    add_shingles,
    no_signature,
    similarity,
)

VOCABULARY = [f"word{number:03}" for number in range(500)]


def signature(*pieces: bytes) -> Signature:
    made = no_signature()
    for piece in pieces:
        add_shingles(made, piece)
    return made


def jaccard(one: bytes, other: bytes) -> float:
    a, b = (
        {text[at : at + SHINGLE_BYTES] for at in range(len(text) - SHINGLE_BYTES + 1)}
        for text in (one, other)
    )
    return len(a & b) / len(a | b)


def edited(words: list[str], edits: int, source: random.Random) -> bytes:
    changed = list(words)
    for place in source.sample(range(len(words)), edits):
        changed[place] = "changed"
    return " ".join(changed).encode()


@given(st.integers(0, 2**32), st.integers(60, 1000), st.integers(0, 30))
def test_the_estimate_is_near_the_jaccard_index(seed: int, length: int, edits: int) -> None:
    source = random.Random(seed)
    words = source.choices(VOCABULARY, k=length)
    one, other = " ".join(words).encode(), edited(words, edits, source)
    # Five standard errors, and more where a short document leaves bins empty.
    assert similarity(signature(one), signature(other)) == pytest.approx(
        jaccard(one, other), abs=0.35
    )


def test_the_estimate_is_unbiased() -> None:
    source = random.Random(1)
    errors = []
    for edits in range(100):
        words = source.choices(VOCABULARY, k=600)
        one, other = " ".join(words).encode(), edited(words, edits, source)
        errors.append(similarity(signature(one), signature(other)) - jaccard(one, other))
    assert abs(sum(errors) / len(errors)) < 0.02


@given(st.binary(max_size=300))
def test_a_document_equals_itself_and_short_ones_repeat_none(text: bytes) -> None:
    found = NearDuplicates(1.0)
    assert not found.repeats(signature(text))
    assert found.repeats(signature(text)) == (len(text) >= SHINGLE_BYTES)


def test_a_document_may_come_in_pieces() -> None:
    text = " ".join(VOCABULARY).encode()
    whole, half = signature(text), len(text) // 2
    assert similarity(whole, signature(text[:half], text[half:])) > 0.9
    assert len(whole) == BINS


def test_edited_copies_are_found_and_other_texts_are_not() -> None:
    source = random.Random(2)
    found = NearDuplicates(0.8)
    originals = [source.choices(VOCABULARY, k=400) for _ in range(50)]
    assert not any(found.repeats(signature(" ".join(words).encode())) for words in originals)
    assert all(found.repeats(signature(edited(words, 3, source))) for words in originals)
    assert not any(found.repeats(signature(edited(words, 90, source))) for words in originals)


def test_texts_with_the_same_head_are_kept() -> None:
    """As files under the same licence."""
    source = random.Random(3)
    found = NearDuplicates(0.8)
    head = " ".join(VOCABULARY[:60])
    for _ in range(50):
        text = f"{head} {' '.join(source.choices(VOCABULARY, k=150))}".encode()
        assert not found.repeats(signature(text))
