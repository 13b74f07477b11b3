"""Wire codecs of tensors: what is lost, what is refused, and that nothing else decides."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from swarm_shared.codecs.boundary import stage_boundary
from swarm_shared.codecs.errors import CodecError
from swarm_shared.codecs.tensors import DTYPES, decode, encode, round_trip
from swarm_shared.run.codec_sizes import (
    ACTIVATION_CODECS,
    DTYPE_BYTES,
    GRADIENT_CODECS,
    INT4_BLOCK,
    INT8_BLOCK,
    TOPK_BLOCK,
    TOPK_KEPT,
    CodecName,
    encoded_bytes,
)
from swarm_shared.run.model_config import ComputeDtype

# Two cores, shared with other work: examples are not timed.
unhurried = settings(deadline=None, max_examples=50)

LARGEST = float(torch.finfo(torch.float32).max)
SCALED: dict[CodecName, tuple[int, int]] = {"int8": (INT8_BLOCK, 127), "int4": (INT4_BLOCK, 7)}
LOSSY = [name for name in GRADIENT_CODECS if name != "none"]
every_codec = pytest.mark.parametrize("codec", GRADIENT_CODECS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)

counts = st.integers(1, 700)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Mostly ordinary values of one magnitude, with zeros, denormals, outliers and the largest."""
    count = draw(counts)
    noise = np.random.default_rng(draw(st.integers(0, 2**32))).standard_normal(count)
    values = np.float32(noise * 10.0 ** draw(st.integers(-44, 37)))
    special = arrays.arrays(
        np.float32, draw(st.integers(0, 6)), elements=st.floats(width=32, allow_nan=False,
        allow_infinity=False),
    )  # fmt: skip
    for value in draw(special):
        values[draw(st.integers(0, count - 1))] = value
    if draw(st.booleans()):
        first = draw(st.integers(0, count - 1))
        values[first : first + draw(st.integers(1, 400))] = 0.0
    if draw(st.booleans()):  # the largest is just below a power of two, to which it may be rounded
        above = np.ldexp(np.float32(1), np.frexp(np.abs(values).max())[1])
        values[np.abs(values).argmax()] = np.nextafter(above, np.float32(0))
    return torch.from_numpy(values)


def encoded(codec: CodecName, tensor: torch.Tensor) -> bytearray:
    dtype: ComputeDtype = "float32" if tensor.dtype == torch.float32 else "bfloat16"
    room = bytearray(b"\xa5" * (encoded_bytes(codec, tensor.numel(), dtype) + 8))
    written = encode(codec, tensor, memoryview(room))
    assert room[written:] == b"\xa5" * 8
    return room[:written]


def in_blocks(tensor: torch.Tensor, block: int) -> torch.Tensor:
    whole = torch.zeros(math.ceil(tensor.numel() / block) * block, dtype=torch.float64)
    whole[: tensor.numel()] = tensor.double()
    return whole.view(-1, block)


@every_codec
@every_dtype
@given(count=counts)
@unhurried
def test_the_size_is_known_from_the_shape_alone(
    codec: CodecName, dtype: ComputeDtype, count: int
) -> None:
    values = torch.randn(count).to(DTYPES[dtype])
    payload = encoded(codec, values)
    assert len(payload) == encoded_bytes(codec, count, dtype)
    assert len(payload) % 4 == 0
    assert decode(codec, payload, (1, count), dtype).shape == (1, count)


def test_bytes_of_a_large_tensor_are_what_the_codecs_are_for() -> None:
    per_value = {c: encoded_bytes(c, 2**20, "float32") / 2**20 for c in GRADIENT_CODECS}
    assert per_value == pytest.approx(
        {"none": 4, "float16": 2, "bfloat16": 2, "int8": 1 + 2 / 256, "int4": 0.5 + 2 / 64,
         "topk": 16 * 3 / 256}, abs=1e-5,
    )  # fmt: skip


@given(tensors())
@unhurried
def test_none_gives_back_every_bit(values: torch.Tensor) -> None:
    assert decode("none", encoded("none", values), values.shape, "float32").equal(values)


@pytest.mark.parametrize("codec", SCALED)
@given(values=tensors())
@unhurried
def test_a_blocks_error_is_at_most_half_a_level(codec: CodecName, values: torch.Tensor) -> None:
    block, top = SCALED[codec]
    back = decode(codec, encoded(codec, values), values.shape, "float32")
    wanted, seen = in_blocks(values, block), in_blocks(back, block)
    largest = wanted.abs().amax(1)
    error = (wanted - seen).abs().amax(1)
    # A scale is the quotient to the nearest bfloat16.
    half_level = 0.5 * largest / top * (1 + 2**-8)
    tiny = largest < top * 2.0**-126 * (1 + 2**-8)
    huge = largest >= (1 - 2**-8) * 2.0**128 / (top + 1) * top
    assert ((error <= half_level * (1 + 1e-6)) | tiny | huge).all()
    assert (error[tiny] <= largest[tiny]).all()
    assert (error[huge] <= 4 * half_level[huge]).all()


@given(tensors())
@unhurried
def test_float16_keeps_eleven_digits_at_any_size(values: torch.Tensor) -> None:
    back = decode("float16", encoded("float16", values), values.shape, "float32")
    error = (values.double() - back.double()).abs()
    largest = float(values.double().abs().max())
    # Below 2**-28 of the largest, steps do not shrink any more; nor below those of float32.
    bound = (values.double().abs() * 2.0**-11).clamp(min=max(largest * 2.0**-38, 2.0**-149))
    assert (error <= bound).all() or largest > 65504 * 2.0**112


@given(tensors())
@unhurried
def test_bfloat16_keeps_eight_digits(values: torch.Tensor) -> None:
    back = decode("bfloat16", encoded("bfloat16", values), values.shape, "float32")
    wide = values.double()
    bound = (wide.abs() * 2.0**-8).clamp(min=2.0**-134)
    assert ((wide - back.double()).abs() <= bound).all()


@given(tensors())
@unhurried
def test_topk_keeps_the_largest_of_every_block_and_nothing_else(values: torch.Tensor) -> None:
    back = decode("topk", encoded("topk", values), values.shape, "float32")
    narrow = round_trip("bfloat16", values)
    wanted, seen = in_blocks(narrow, TOPK_BLOCK), in_blocks(back, TOPK_BLOCK)
    kept = seen != 0
    assert seen[kept].equal(wanted[kept])
    assert (kept.sum(1) <= TOPK_KEPT).all()
    left_out = torch.where(kept, 0.0, wanted.abs()).amax(1)
    smallest_kept = torch.where(kept, seen.abs(), math.inf).amin(1)
    assert (left_out <= smallest_kept).all()
    # Room for 16 is used where 16 are there.
    assert ((kept.sum(1) == TOPK_KEPT) | (left_out == 0)).all()


def test_of_equals_topk_keeps_the_first() -> None:
    payload = encoded("topk", torch.full((TOPK_BLOCK,), -3.0))
    assert bytes(payload[2 * TOPK_KEPT :]) == bytes(range(TOPK_KEPT))


@every_codec
@given(values=tensors())
@unhurried
def test_what_was_decoded_encodes_to_the_same_bytes_again(
    codec: CodecName, values: torch.Tensor
) -> None:
    payload = encoded(codec, values)
    once = decode(codec, payload, values.shape, "float32")
    if float(values.abs().max()) < 3e37:
        assert encoded(codec, once) == payload
    assert decode(codec, encoded(codec, once), values.shape, "float32").isfinite().all()


@every_codec
@every_dtype
@given(data=st.data())
@unhurried
def test_random_bytes_are_refused_or_decode_to_finite_values(
    codec: CodecName, dtype: ComputeDtype, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, 300))
    size = encoded_bytes(codec, count, dtype)
    payload = np.random.default_rng(data.draw(st.integers(0, 2**32))).bytes(size)
    try:
        values = decode(codec, payload, (count,), dtype)
    except CodecError:
        return
    assert values.isfinite().all()
    assert values.dtype == DTYPES[dtype]


@pytest.mark.parametrize("codec", SCALED)
@every_dtype
def test_the_largest_scale_and_level_decode_to_something_finite(
    codec: CodecName, dtype: ComputeDtype
) -> None:
    block, top = SCALED[codec]
    scale = torch.tensor((1 - 2.0**-8) * 2.0**128 / (top + 1)).to(torch.bfloat16)
    smallest_level = b"\x80" * block if codec == "int8" else b"\x00" * (block // 2)
    bits = struct.pack("<H", int(scale.view(torch.int16)))
    payload = (bits + smallest_level).ljust(encoded_bytes(codec, block, dtype), b"\0")
    assert decode(codec, payload, (block,), dtype).isfinite().all()
    above = struct.pack("<H", int(scale.view(torch.int16)) + 1) + payload[2:]
    with pytest.raises(CodecError, match="scale"):
        decode(codec, above, (block,), dtype)


@pytest.mark.parametrize(
    "scale", [0x7F80, 0x7FC0, 0xFF80, 0xBF80], ids=["inf", "nan", "-inf", "-1"]
)
@pytest.mark.parametrize("codec", SCALED)
def test_a_scale_that_is_no_size_is_refused(codec: CodecName, scale: int) -> None:
    payload = encoded(codec, torch.ones(600))
    payload[2:4] = struct.pack("<H", scale)
    with pytest.raises(CodecError, match="scale"):
        decode(codec, payload, (600,), "float32")


@every_codec
@every_dtype
@pytest.mark.parametrize("change", [-4, -1, 1, 4])
def test_another_length_is_refused(codec: CodecName, dtype: ComputeDtype, change: int) -> None:
    payload = bytes(encoded_bytes(codec, 256, dtype) + change)
    with pytest.raises(CodecError, match="bytes"):
        decode(codec, payload, (256,), dtype)


def test_places_that_do_not_ascend_are_refused() -> None:
    payload = encoded("topk", torch.randn(256))
    payload[33] = payload[32]
    with pytest.raises(CodecError, match="ascend"):
        decode("topk", payload, (256,), "float32")


def test_a_place_behind_the_end_is_refused() -> None:
    payload = encoded("topk", torch.randn(20))
    payload[47] = 255
    payload[30:32] = b"\x80\x3f"
    with pytest.raises(CodecError, match="behind its end"):
        decode("topk", payload, (20,), "float32")


@pytest.mark.parametrize("codec", ["int8", "float16", "bfloat16"])
def test_what_fills_a_tensor_up_is_zero(codec: CodecName) -> None:
    payload = encoded(codec, torch.randn(5))
    assert payload[-1] == 0
    payload[-1] = 1
    with pytest.raises(CodecError, match="zero"):
        decode(codec, payload, (5,), "float32")


@pytest.mark.parametrize("codec", LOSSY)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 299])
def test_what_is_not_finite_cannot_be_encoded(codec: CodecName, bad: float, place: int) -> None:
    values = torch.randn(300)
    values[place] = bad
    with pytest.raises(CodecError, match="infinities"):
        encoded(codec, values)


@every_codec
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 2.0**-126, -LARGEST, LARGEST])
@every_dtype
def test_blocks_of_one_value_come_back_as_near_as_can_be(
    codec: CodecName, value: float, dtype: ComputeDtype
) -> None:
    values = torch.full((512,), value)
    if dtype == "bfloat16":
        values = values.clamp(-3.38e38, 3.38e38).to(torch.bfloat16)
    back = round_trip(codec, values).float()
    assert back.isfinite().all()
    if codec == "topk":
        back = back[back != 0]
    error = (back - values[0].float()).abs()
    assert (error <= max(abs(value) * 0.15, 2.0**-120)).all()


@every_codec
def test_threads_do_not_show_in_the_bytes(codec: CodecName) -> None:
    before = torch.get_num_threads()
    values = torch.randn(3, 700, 520)
    try:
        seen = set()
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            payload = bytes(encoded(codec, values))
            back = decode(codec, payload, values.shape, "float32")
            seen.add((payload, back.numpy().tobytes()))
    finally:
        torch.set_num_threads(before)
    assert len(seen) == 1


@every_codec
def test_a_tensor_that_does_not_lie_in_one_piece_is_encoded_in_its_order(codec: CodecName) -> None:
    values = torch.randn(40, 30).t()
    assert encoded(codec, values) == encoded(codec, values.contiguous())


@every_codec
def test_a_tensor_without_values_takes_no_bytes_but_its_head(codec: CodecName) -> None:
    payload = encoded(codec, torch.empty(0, 8))
    assert decode(codec, payload, (0, 8), "float32").shape == (0, 8)


@pytest.mark.parametrize("activation", ACTIVATION_CODECS)
@pytest.mark.parametrize("gradient", GRADIENT_CODECS)
def test_a_border_passes_the_decoded_tensors_in_both_directions(
    activation: CodecName, gradient: CodecName
) -> None:
    x, slope = torch.randn(2, 3, 40, requires_grad=True), torch.randn(2, 3, 40)
    crossed = stage_boundary(activation, gradient)(x)
    assert crossed.detach().equal(round_trip(activation, x.detach()))
    crossed.backward(slope)
    assert x.grad is not None
    assert x.grad.equal(round_trip(gradient, slope))


def test_the_table_of_dtypes_has_their_sizes() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == DTYPE_BYTES
