"""Whole numbers on the wire: as few bytes as they need, and back without a loss."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.model.test_fixed_point_sums import manifest
from swarm_client.averaging.all_reduce.codec import (
    LARGEST_PART,
    LARGEST_SUM,
    EncodedPiece,
    NotFiniteError,
    decode_piece,
    encode_piece,
    payload_is_valid,
    payload_sizes,
    reduce_piece,
)
from swarm_client.averaging.all_reduce.exact_codec import BLOCK, blocks
from swarm_shared.base.types import MAX_MICROBATCHES
from swarm_shared.model.fixed_point_sums import Quantum

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


def summed(parts: Sequence[np.ndarray], me: int = 0) -> np.ndarray:
    inputs = [None if i == me else encode_piece(one, "exact") for i, one in enumerate(parts)]
    out = np.empty(len(parts[0]))
    reduce_piece(parts[me], inputs, "exact", out)
    return out


@pytest.mark.parametrize("count", [LARGEST_PART + 1, -LARGEST_PART - 1, LARGEST])
def test_a_member_that_puts_in_more_than_a_step_can_give_is_named(count: float) -> None:
    honest, liar = np.ones(3), np.array([1.0, count, 0.0])
    for parts in ([honest, liar, honest], [honest, honest, liar]):
        with pytest.raises(NotFiniteError) as caught:
            summed(parts)
        assert parts[caught.value.member or 0] is liar


def test_the_largest_part_of_a_sum_that_no_step_gives_is_named() -> None:
    liar, honest = np.array([0.0, LARGEST_PART]), np.array([5.0, LARGEST_PART - 4])
    assert summed([honest, liar])[1] == LARGEST_SUM - 4
    for parts in ([honest, liar, honest], [liar, honest, honest]):
        with pytest.raises(NotFiniteError) as caught:
            summed(parts)
        assert parts[caught.value.member or 0] is liar


@unhurried
@given(st.lists(st.integers(-(2**51), 2**51), min_size=2, max_size=40), st.integers(0, 39))
def test_large_parts_make_an_exact_sum_or_none_in_any_order(parts: list[int], turn: int) -> None:
    """Float64 would round a sum of these on its way, even where its end is small."""
    arrays = [np.array([float(part)]) for part in parts]
    try:
        found = summed(arrays, turn % len(parts))
    except NotFiniteError:
        assert abs(sum(parts)) > LARGEST_SUM
    else:
        assert int(found[0]) == sum(parts)


def test_the_limits_are_those_of_a_steps_counts() -> None:
    """An honest member is never refused: all microbatches of a step together stay within a part,
    and those of both stages of a tied embedding within a sum."""
    for microbatches in (1, 3, 4, 5, 1000, MAX_MICROBATCHES):
        largest = Quantum.of(manifest(microbatches=microbatches)).max_counts * microbatches
        assert largest <= LARGEST_PART
        assert 2 * largest <= LARGEST_SUM


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
