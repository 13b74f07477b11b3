from __future__ import annotations

import itertools
import struct
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.errors import FrameError
from swarm_shared.protocol.framing import (
    PREFIX_BYTES,
    Frame,
    FrameDecoder,
    FrameLimits,
    encode_frame,
)

LIMITS = FrameLimits(max_header_bytes=200, max_payload_bytes=100_000)

payloads = st.one_of(st.binary(max_size=300), st.integers(0, 90_000).map(lambda n: b"\xa5" * n))
frames = st.lists(st.tuples(st.binary(max_size=200), payloads), max_size=5)


def joined(header: bytes, payload: bytes) -> bytes:
    return b"".join(encode_frame(header, payload))


def decoded(pieces: list[bytes]) -> list[tuple[bytes, bytes]]:
    decoder = FrameDecoder(LIMITS)
    found: list[Frame] = []
    for piece in pieces:
        found += decoder.feed(piece)
    decoder.finish()
    return [(frame.header, bytes(frame.payload)) for frame in found]


@given(frames, st.lists(st.integers(0, 500_000), max_size=20))
def test_frames_come_out_the_same_however_the_bytes_are_cut(
    sent: list[tuple[bytes, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(joined(header, payload) for header, payload in sent)
    places = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    pieces = [stream[start:end] for start, end in itertools.pairwise(places)]
    assert decoded(pieces) == sent
    assert decoded([stream]) == sent


@given(st.binary(max_size=200), payloads, st.data())
def test_a_truncated_frame_is_refused(header: bytes, payload: bytes, data: st.DataObject) -> None:
    stream = joined(header, payload)
    end = data.draw(st.integers(1, len(stream) - 1))
    decoder = FrameDecoder(LIMITS)
    assert decoder.feed(stream[:end]) == []
    assert 0 < decoder.missing_bytes <= len(stream) - end
    with pytest.raises(FrameError, match="inside a frame"):
        decoder.finish()


@pytest.mark.parametrize(
    ("header_bytes", "payload_bytes"), [(201, 0), (0, 100_001), (2**32 - 1, 2**64 - 1)]
)
def test_a_frame_that_is_too_long_is_refused_at_its_first_bytes(
    header_bytes: int, payload_bytes: int
) -> None:
    prefix = struct.pack(">IQ", header_bytes, payload_bytes)
    decoder = FrameDecoder(LIMITS)
    assert decoder.feed(prefix[:-1]) == []
    with pytest.raises(FrameError, match="allowed"):
        decoder.feed(prefix[-1:])
    with pytest.raises(FrameError, match="allowed"):
        decoder.feed(joined(b"a good frame", b""))


def test_frames_up_to_the_limits_are_taken() -> None:
    header, payload = bytes(LIMITS.max_header_bytes), bytes(LIMITS.max_payload_bytes)
    assert decoded([joined(header, payload)]) == [(header, payload)]


def test_memory_grows_with_what_arrives_and_not_with_what_is_announced() -> None:
    decoder = FrameDecoder(FrameLimits(max_payload_bytes=2**40))
    tracemalloc.start()
    try:
        decoder.feed(struct.pack(">IQ", 10, 2**40) + bytes(10) + bytes(1000))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


def test_a_large_payload_is_passed_on_without_a_copy() -> None:
    first, second = bytearray(100_000), memoryview(bytearray(200_000))
    head, *parts = encode_frame(b"header", [first, b"", second])
    assert bytes(head) == struct.pack(">IQ", 6, 300_000) + b"header"
    assert [memoryview(part).nbytes for part in parts] == [100_000, 200_000]
    first[0] = 7
    assert memoryview(parts[0])[0] == 7


def test_a_small_frame_is_one_piece() -> None:
    pieces = encode_frame(b"header", [b"pay", memoryview(b"load")])
    assert pieces == [struct.pack(">IQ", 6, 7) + b"header" + b"payload"]


def test_the_elements_of_a_view_are_counted_in_bytes() -> None:
    numbers = memoryview(struct.pack("4d", 1, 2, 3, 4)).cast("d")
    [piece] = encode_frame(b"", numbers)
    assert len(piece) == PREFIX_BYTES + 32


def test_the_received_payload_can_be_changed_in_place() -> None:
    [frame] = FrameDecoder(LIMITS).feed(joined(b"", b"abc"))
    frame.payload[0] = ord("x")
    assert frame.payload == b"xbc"
    assert frame.size_bytes == PREFIX_BYTES + 3
