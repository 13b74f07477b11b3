"""Whole numbers on the wire: as few bytes as they need, and back without a loss."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_client.averaging.all_reduce.codec import (
    EncodedPiece,
    NotFiniteError,
    decode_piece,
    encode_piece,
    payload_is_valid,
    payload_sizes,
    reduce_piece,
)
from swarm_client.averaging.all_reduce.exact_codec import BLOCK, blocks

unhurried = settings(max_examples=80, deadline=None)
LARGEST = 2**53 - 1


@st.composite
def pieces(draw: st.DrawFn) -> np.ndarray:
    """Blocks of unlike magnitudes."""
    found = []
    for _ in range(draw(st.integers(1, 4))):
        bits = draw(st.integers(0, 53))
        random = np.random.default_rng(draw(st.integers(0, 999)))
        count = draw(st.sampled_from([1, 7, BLOCK - 1, BLOCK, BLOCK + 1]))
        found.append(random.integers(-(2**bits) + 1, 2**bits, count))
    return np.concatenate(found).astype(np.float64)


@unhurried
@given(pieces())
def test_whole_numbers_come_back_as_they_were(values: np.ndarray) -> None:
    encoded = encode_piece(values, "exact")
    assert encoded.payload.nbytes in payload_sizes(len(values), "exact")
    assert payload_is_valid(encoded.payload, len(values), "exact")
    back = decode_piece(encoded.exponent, encoded.payload, "exact", len(values))
    assert back.dtype == np.float64
    assert back.tobytes() == (values + 0.0).tobytes()


@pytest.mark.parametrize(
    ("largest", "width"),
    [(0, 0), (1, 1), (127, 1), (128, 2), (2**15 - 1, 2), (2**15, 3), (2**23 - 1, 3), (2**23, 4),
     (2**31, 5), (2**39, 6), (2**47 - 1, 6), (2**47, 7), (LARGEST, 7)],
)  # fmt: skip
def test_a_block_takes_as_few_bytes_as_its_largest_element(largest: int, width: int) -> None:
    for sign in (1, -1):
        values = np.zeros(3 * BLOCK)
        values[BLOCK + 5] = sign * largest
        encoded = encode_piece(values, "exact")
        assert encoded.payload.nbytes == 3 + BLOCK * width
        assert decode_piece(0, encoded.payload, "exact", 3 * BLOCK).tolist() == values.tolist()


@unhurried
@given(pieces(), st.integers(1, 5), st.integers(0, 999))
def test_members_in_any_order_make_the_same_sum(
    values: np.ndarray, members: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    parts = [
        random.integers(-(2**49), 2**49, len(values)).astype(np.float64) for _ in range(members)
    ]
    sums = set()
    for _ in range(3):
        random.shuffle(parts)
        me = int(random.integers(members))
        inputs = [None if i == me else encode_piece(one, "exact") for i, one in enumerate(parts)]
        out = np.empty(len(values))
        summed = reduce_piece(parts[me], inputs, "exact", out)
        assert decode_piece(0, summed.payload, "exact", len(values)).tobytes() == out.tobytes()
        sums.add(out.tobytes())
    exact = [sum(int(part[place]) for part in parts) for place in range(len(values))]
    assert sums == {np.array(exact, np.float64).tobytes()}


@pytest.mark.parametrize("bad", [2.0**53, -(2.0**53), np.nan, np.inf, -np.inf])
def test_what_is_not_below_two_to_the_53_is_refused(bad: float) -> None:
    with pytest.raises(NotFiniteError):
        encode_piece(np.array([1.0, bad, 2.0]), "exact")


def test_a_sum_that_is_not_exact_any_more_is_refused_without_a_culprit() -> None:
    large = np.full(3, float(LARGEST))
    with pytest.raises(NotFiniteError) as caught:
        reduce_piece(large, [None, encode_piece(large, "exact")], "exact", np.empty(3))
    assert caught.value.member is None


@unhurried
@given(st.integers(1, 3 * BLOCK), st.binary(max_size=2000))
def test_any_bytes_are_a_piece_or_none_and_take_no_more_memory_than_it(
    elements: int, data: bytes
) -> None:
    payload = memoryview(bytearray(data))
    if payload_is_valid(payload, elements, "exact"):
        found = decode_piece(0, payload, "exact", elements)
        assert found.shape == (elements,)
        assert np.isfinite(found).all()
        assert (found == np.rint(found)).all()


@unhurried
@given(pieces(), st.data())
def test_a_piece_whose_widths_were_changed_is_none(values: np.ndarray, data: st.DataObject) -> None:
    payload = bytearray(encode_piece(values, "exact").payload)
    place = data.draw(st.integers(0, blocks(len(values)) - 1))
    other = data.draw(st.integers(0, 255).filter(lambda width: width != payload[place]))
    payload[place] = other
    piece = EncodedPiece(0, memoryview(payload))
    assert not payload_is_valid(piece.payload, len(values), "exact")
