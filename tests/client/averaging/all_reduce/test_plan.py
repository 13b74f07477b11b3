"""The plan of a round: pure, the same on every member."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarm_client.averaging.all_reduce.codec import (
    INT8_BLOCK,
    NotFiniteError,
    check_finite,
    decode_piece,
    dtype_of,
    encode_piece,
    exponent_is_valid,
    payload_bytes,
    payload_is_valid,
    payload_sizes,
    reduce_piece,
)
from swarm_client.averaging.all_reduce.errors import RoundFailure
from swarm_client.averaging.all_reduce.frames import (
    HEADER_BYTES,
    HELLO_BYTES,
    Abort,
    FrameKind,
    Header,
    StreamHello,
)
from swarm_client.averaging.all_reduce.plan import RoundSpec, partition, plan_digest
from swarm_shared.base.errors import FrameError, ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.run.codec_sizes import AVERAGE_CODECS, AverageCodec

# Two cores, shared with other work: examples are not timed.
unhurried = settings(deadline=None, max_examples=60)


def members(count: int) -> tuple[PeerId, ...]:
    return tuple(PeerId(f"peer{index}") for index in range(count))


@st.composite
def specs(draw: st.DrawFn) -> RoundSpec:
    group = members(draw(st.integers(1, 9)))
    share = st.one_of(st.just(0.0), st.floats(0, 1e12), st.integers(0, 100).map(float))
    shares = draw(
        st.one_of(
            st.none(),
            st.lists(share, min_size=len(group), max_size=len(group)).filter(any).map(tuple),
        )
    )
    return RoundSpec(
        "round",
        group,
        draw(st.sampled_from(group)),
        draw(st.integers(1, 10**9)),
        shares,
        draw(st.integers(1, 10**6)),
    )


@unhurried
@given(specs())
def test_the_slices_cover_the_vector_once_in_group_order(spec: RoundSpec) -> None:
    slices = partition(spec)
    assert len(slices) == len(spec.members)
    position = 0
    for part in slices:
        assert part.start == position
        assert part.stop >= part.start
        position = part.stop
    assert position == spec.elements


@unhurried
@given(specs())
def test_the_pieces_cover_each_slice_and_are_bounded(spec: RoundSpec) -> None:
    for part in partition(spec):
        assert part.pieces <= part.stop - part.start
        if part.pieces:
            assert part.piece(0)[0] == part.start
            assert part.piece(part.pieces - 1)[1] == part.stop
            for index in {0, part.pieces // 2, part.pieces - 1}:
                start, stop = part.piece(index)
                assert 0 < stop - start <= spec.piece_elements


@unhurried
@given(specs())
def test_every_member_makes_the_same_plan(spec: RoundSpec) -> None:
    for member in spec.members:
        theirs = dataclasses.replace(spec, me=member)
        assert partition(theirs) == partition(spec)
        assert plan_digest(theirs) == plan_digest(spec)


@unhurried
@given(specs())
def test_slices_follow_the_shares(spec: RoundSpec) -> None:
    shares = spec.shares or (1.0,) * len(spec.members)
    for share, part in zip(shares, partition(spec), strict=True):
        if share == 0:
            assert part.pieces == 0
        exact = spec.elements * share / math.fsum(shares)
        assert abs(part.stop - part.start - exact) <= 16 + spec.elements * 1e-9


@unhurried
@given(specs())
def test_a_reducers_memory_is_bounded_whatever_the_group(spec: RoundSpec) -> None:
    held = spec.window_pieces * (len(spec.members) - 1)
    assert held <= max(32, 2 * (len(spec.members) - 1))
    assert spec.window_pieces >= 2


def test_any_difference_between_plans_changes_the_digest() -> None:
    spec = RoundSpec("r", members(3), PeerId("peer0"), 1000)
    others = [
        dataclasses.replace(spec, round_id="s"),
        dataclasses.replace(spec, members=(*members(2), PeerId("x"))),
        dataclasses.replace(spec, members=(PeerId("peer1"), PeerId("peer0"), PeerId("peer2"))),
        dataclasses.replace(spec, elements=1001),
        dataclasses.replace(spec, shares=(1.0, 2.0, 1.0)),
        dataclasses.replace(spec, piece_elements=17),
        dataclasses.replace(spec, codec="float16"),
        dataclasses.replace(spec, codec="int8"),
    ]
    digests = {plan_digest(each) for each in [spec, *others]}
    assert len(digests) == 1 + len(others)


@pytest.mark.parametrize(
    "wrong",
    [
        {"round_id": ""},
        {"round_id": "x" * 201},
        {"members": ()},
        {"members": (PeerId("peer0"), PeerId("peer0"))},
        {"me": PeerId("stranger")},
        {"elements": 0},
        {"shares": (1.0,)},
        {"shares": (1.0, -1.0, 1.0)},
        {"shares": (1.0, math.nan, 1.0)},
        {"shares": (0.0, 0.0, 0.0)},
        {"piece_elements": 0},
        {"codec": "zip"},
    ],
    ids=str,
)
def test_a_round_that_cannot_be_run_is_refused(wrong: dict[str, object]) -> None:
    right = RoundSpec("r", members(3), PeerId("peer0"), 1000)
    with pytest.raises(ProtocolError, match="cannot be run"):
        dataclasses.replace(right, **wrong)


# ------------------------------------------------------------------------------------- codecs

finite_pieces = st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=50).map(
    lambda values: np.array(values, np.float32)
)


@unhurried
@given(finite_pieces)
def test_plain_pieces_come_back_bit_for_bit(values: np.ndarray) -> None:
    encoded = encode_piece(values, "none")
    assert len(encoded.payload) == payload_bytes(len(values), "none")
    back = decode_piece(encoded.exponent, encoded.payload, "none", len(values))
    assert back.tobytes() == values.tobytes()


@unhurried
@given(finite_pieces)
def test_float16_keeps_eleven_bits_of_any_scale(values: np.ndarray) -> None:
    encoded = encode_piece(values, "float16")
    assert len(encoded.payload) == payload_bytes(len(values), "float16")
    assert exponent_is_valid(encoded.exponent, "float16")
    back = decode_piece(encoded.exponent, encoded.payload, "float16", len(values))
    exact = values.astype(np.float64)
    # Elements far below the largest fall into float16's subnormals, spaced 2**-24 of the scale.
    largest = float(np.abs(exact).max())
    tolerance = np.abs(exact) * 2.0**-11 + max(largest * 2.0**-38, 2.0**-124)
    assert (np.abs(back - exact) <= tolerance).all()


@st.composite
def long_pieces(draw: st.DrawFn) -> np.ndarray:
    """One to three blocks of unlike magnitude, the last one whole or not."""
    count = draw(st.integers(1, 3 * INT8_BLOCK))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    powers = draw(st.lists(st.integers(-149, 127), min_size=3, max_size=3))
    scales = np.repeat(np.ldexp(np.float64(1), powers), INT8_BLOCK)[:count]
    return (rng.uniform(-1.999, 1.999, count) * scales).astype(np.float32)


@unhurried
@given(long_pieces())
def test_int8_is_off_by_half_a_level_of_its_block_at_most(values: np.ndarray) -> None:
    encoded = encode_piece(values, "int8")
    assert len(encoded.payload) == payload_bytes(len(values), "int8")
    assert exponent_is_valid(encoded.exponent, "int8")
    back = decode_piece(encoded.exponent, encoded.payload, "int8", len(values))
    assert back.shape == values.shape
    for start in range(0, len(values), INT8_BLOCK):
        block = values[start : start + INT8_BLOCK].astype(np.float64)
        largest = float(np.abs(block).max())
        # The largest floats come back as the largest multiple of the largest scale; blocks below
        # the smallest scale as zeros. The level is chosen by a product in float32: of 127 levels,
        # three roundings are up to 2^-15 of half a level.
        half = max(largest / 254, largest - 127 * (1 - 2.0**-24) * 2.0**121) * (1 + 2.0**-14)
        error = np.abs(back[start : start + INT8_BLOCK] - block)
        assert (error <= max(half, 127 * 2.0**-126)).all()


def test_the_largest_floats_stay_finite_and_keep_their_sign_and_the_smallest_become_zero() -> None:
    largest = np.finfo(np.float32).max
    values = np.array([largest, -largest, 1.0], np.float32)
    encoded = encode_piece(values, "int8")
    back = decode_piece(encoded.exponent, encoded.payload, "int8", len(values))
    np.testing.assert_allclose(back, [127 * 2.0**121, -127 * 2.0**121, 0], rtol=1e-6)
    tiny = encode_piece(np.full(3, 2.0**-140, np.float32), "int8")
    assert not decode_piece(tiny.exponent, tiny.payload, "int8", 3).any()


def test_an_outlier_coarsens_its_own_block_only() -> None:
    values = np.full(3 * INT8_BLOCK, 0.5, np.float32)
    values[INT8_BLOCK] = 1e4
    encoded = encode_piece(values, "int8")
    back = decode_piece(encoded.exponent, encoded.payload, "int8", len(values)).reshape(
        3, INT8_BLOCK
    )
    np.testing.assert_allclose(back[[0, 2]], 0.5, rtol=1e-6)
    assert back[1, 0] == pytest.approx(1e4)
    assert not back[1, 1:].any()


@unhurried
@given(st.integers(1, 3 * INT8_BLOCK), st.data())
def test_any_bytes_of_an_int8_piece_are_finite_elements_or_refused(
    count: int, data: st.DataObject
) -> None:
    size = payload_bytes(count, "int8")
    payload = memoryview(data.draw(st.binary(min_size=size, max_size=size)))
    scales = np.frombuffer(payload, "<f4", -(-count // INT8_BLOCK))
    values = decode_piece(0, payload, "int8", count)
    assert values.shape == (count,)
    if np.abs(scales).max() <= (1 - 2.0**-24) * 2.0**121:
        check_finite(values)
    elif not np.isfinite(scales).all():
        with pytest.raises(NotFiniteError):
            check_finite(values)


@unhurried
@given(st.sampled_from(AVERAGE_CODECS), st.integers(2, 5), st.integers(1, 700), st.integers(0, 99))
def test_the_reducer_keeps_exactly_what_the_others_will_decode(
    codec: AverageCodec, count: int, elements: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, elements)).astype(dtype_of(codec))
    if codec == "exact":
        vectors = np.rint(vectors * 1000)
    me = seed % count
    inputs = [None if i == me else encode_piece(vectors[i], codec) for i in range(count)]
    kept = np.empty(elements, dtype_of(codec))
    summed = reduce_piece(vectors[me], inputs, codec, kept)
    assert summed.payload.nbytes in payload_sizes(elements, codec)
    assert payload_is_valid(summed.payload, elements, codec)
    taken = decode_piece(summed.exponent, summed.payload, codec, elements)
    assert kept.tobytes() == taken.tobytes()
    lost = 0.0 if codec == "exact" else 0.02 * count * 4
    np.testing.assert_allclose(kept, vectors.sum(0), atol=lost)


@pytest.mark.parametrize("codec", AVERAGE_CODECS)
def test_a_header_carries_only_exponents_that_its_codec_writes(codec: AverageCodec) -> None:
    assert exponent_is_valid(0, codec)
    assert exponent_is_valid(-7, codec) == (codec == "float16")
    assert not exponent_is_valid(200, codec)


@pytest.mark.parametrize("codec", AVERAGE_CODECS)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_piece_that_is_not_finite_is_not_encoded(codec: AverageCodec, bad: float) -> None:
    with pytest.raises(NotFiniteError):
        encode_piece(np.array([1, bad, 2], dtype_of(codec)), codec)


@unhurried
@given(st.integers(2, 5), st.integers(0, 10**6))
def test_a_piece_is_summed_in_group_order_wherever_the_reducer_stands(
    count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((count, 33)).astype(np.float32) * 10.0 ** rng.integers(
        -6, 6, (count, 1)
    ).astype(np.float32)
    expected = vectors[0].copy()
    for vector in vectors[1:]:
        expected = expected + vector
    for me in range(count):
        inputs = [None if i == me else encode_piece(vectors[i], "none") for i in range(count)]
        out = np.empty(33, np.float32)
        summed = reduce_piece(vectors[me], inputs, "none", out)
        assert out.tobytes() == expected.tobytes() == bytes(summed.payload)


def test_a_sum_that_overflows_has_no_culprit() -> None:
    big = np.full(4, 3e38, np.float32)
    with pytest.raises(NotFiniteError) as caught:
        reduce_piece(big, [None, encode_piece(big, "none")], "none", np.empty(4, np.float32))
    assert caught.value.member is None


# ------------------------------------------------------------------------------------- frames


@unhurried
@given(
    st.sampled_from(FrameKind),
    st.integers(0, 2**16 - 1),
    st.binary(min_size=8, max_size=8),
    st.integers(0, 2**32 - 1),
    st.integers(-(2**31), 2**31 - 1),
    st.integers(0, 2**32 - 1),
)
def test_a_header_comes_back_as_it_was(
    kind: FrameKind, sender: int, tag: bytes, piece: int, exponent: int, nbytes: int
) -> None:
    header = Header(kind, sender, tag, piece, exponent, nbytes)
    assert len(header.encode()) == HEADER_BYTES
    assert Header.decode(header.encode()) == header


@unhurried
@given(st.sampled_from(RoundFailure), st.text(max_size=300), st.integers(0, 4) | st.none())
def test_an_abort_frame_keeps_its_meaning(
    failure: RoundFailure, reason: str, culprit: int | None
) -> None:
    back = Abort.decode(Abort(failure, culprit, reason).encode(), 5)
    assert (back.failure, back.culprit) == (failure, culprit)


@pytest.mark.parametrize("data", [b"", bytes(HELLO_BYTES), bytes(HELLO_BYTES + 1)])
def test_what_is_no_greeting_is_a_frame_error(data: bytes) -> None:
    with pytest.raises(FrameError):
        StreamHello.decode(data)
