"""Members and reducers that break the protocol of a round, under every codec."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest

from kits.averaging.memory_carrier import MemoryCarrier, MemoryChannel
from kits.averaging.memory_group import PIECE_ELEMENTS, A, B, C, Group, with_network
from swarm_client.averaging.all_reduce.codec import dtype_of, encode_piece, payload_sizes
from swarm_client.averaging.all_reduce.errors import RoundFailure
from swarm_client.averaging.all_reduce.frames import (
    HEADER_BYTES,
    Abort,
    FrameKind,
    Header,
    StreamHello,
)
from swarm_client.averaging.all_reduce.plan import plan_digest, round_tag
from swarm_shared.base.errors import LinkClosed
from swarm_shared.base.types import PeerId
from swarm_shared.run.codec_sizes import AVERAGE_CODECS, AverageCodec

every_codec = pytest.mark.parametrize("codec", AVERAGE_CODECS)

LOSSY_CODECS: tuple[AverageCodec, ...] = ("none", "float16", "int8")
"""Codecs whose bytes can decode to what is not finite."""


def frame(kind: FrameKind, payload: bytes = b"", **changes: Any) -> bytes:
    """A frame of member B, of the test's round."""
    fields = {"sender": 1, "tag": round_tag("round 1")[:8], "payload_bytes": len(payload)}
    return Header(kind, **{**fields, **changes}).encode() + payload


def honest_payload(codec: AverageCodec) -> bytes:
    """One piece of ones."""
    return bytes(encode_piece(np.ones(PIECE_ELEMENTS, dtype_of(codec)), codec).payload)


def payload_with_nan(codec: AverageCodec) -> bytes:
    """A piece whose first value, or first scale, is not a number."""
    width = {"none": "<f4", "float16": "<f2", "int8": "<f4"}[codec]
    nan = np.array([np.nan], width).tobytes()
    return nan + honest_payload(codec)[len(nan) :]


async def send_as_member(
    group: Group, carriers: dict[PeerId, MemoryCarrier], frames: list[bytes]
) -> None:
    """B opens its stream to the reducer A as it should, then sends `frames`."""
    spec = group.spec(B)
    with carriers[B].incoming(spec, round_tag(spec.round_id)):
        channel = await carriers[B].open(A)
        await channel.send(StreamHello(1, round_tag(spec.round_id), plan_digest(spec)).encode())
        await send_and_read_to_the_end(channel, frames)


ONLY_B_REDUCES = (0.0, 1.0)


async def send_as_reducer(
    group: Group, carriers: dict[PeerId, MemoryCarrier], frames: list[bytes]
) -> None:
    """B accepts the stream of the member A as it should, then sends `frames`."""
    spec = group.spec(B, shares=ONLY_B_REDUCES)
    with carriers[B].incoming(spec, round_tag(spec.round_id)) as arrivals:
        arrival = await arrivals.receive()
        await send_and_read_to_the_end(arrival.channel, [frame(FrameKind.ACCEPT), *frames])


async def send_and_read_to_the_end(channel: MemoryChannel, frames: list[bytes]) -> None:
    with suppress(LinkClosed):
        for content in frames:
            await channel.send(content)
    # A detects the violation, and aborts or closes.
    with suppress(LinkClosed):
        while (header := await read_header(channel)) and header.kind is not FrameKind.ABORT:
            await read(channel, header.payload_bytes)
    await channel.abort()


async def read_header(channel: MemoryChannel) -> Header | None:
    content = await read(channel, HEADER_BYTES)
    return Header.decode(content) if len(content) == HEADER_BYTES else None


async def read(channel: MemoryChannel, count: int) -> bytes:
    """Read so many bytes, fewer at the end of the stream."""
    content = b""
    while len(content) < count and (chunk := await channel.receive(count - len(content))):
        content += chunk
    return content


def round_with_a_dishonest_member(run: Any, codec: AverageCodec, frames: list[bytes]) -> Group:
    group = Group((A, B), 60_000, codec=codec)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.member, group.spec(A), carriers[A])
            tasks.start_soon(send_as_member, group, carriers, frames)

    run(lambda: with_network(group.names, body))
    return group


def round_with_a_dishonest_reducer(run: Any, codec: AverageCodec, frames: list[bytes]) -> Group:
    group = Group((A, B), 60_000, codec=codec)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            spec = group.spec(A, shares=ONLY_B_REDUCES)
            tasks.start_soon(group.member, spec, carriers[A])
            tasks.start_soon(send_as_reducer, group, carriers, frames)

    run(lambda: with_network(group.names, body))
    return group


def assert_violation_of_b(group: Group, complaint: str) -> None:
    failure = group.failures[A]
    assert (failure.failure, failure.culprit) == (RoundFailure.PROTOCOL, B)
    assert complaint in failure.reason


# ---------------------------------------------------------------------------- the form of a frame

Lie = Callable[[AverageCodec], bytes]

LIES: list[tuple[str, Lie, str]] = [
    ("another piece", lambda codec: frame(FrameKind.PIECE, honest_payload(codec), piece=1),
     "is due"),
    ("too short",
     lambda codec: frame(FrameKind.PIECE, bytes(payload_sizes(PIECE_ELEMENTS, codec)[0] - 1)),
     "is due"),
    ("too long",
     lambda codec: frame(FrameKind.PIECE, bytes(payload_sizes(PIECE_ELEMENTS, codec)[-1] + 1)),
     "is due"),
    ("beyond all memory", lambda codec: frame(FrameKind.PIECE, payload_bytes=2**32 - 1), "is due"),
    ("a sum", lambda codec: frame(FrameKind.SUM, honest_payload(codec)), "is due"),
    ("the end", lambda codec: frame(FrameKind.BYE), "is due"),
    ("another sender", lambda codec: frame(FrameKind.PIECE, honest_payload(codec), sender=0),
     "another member's name"),
    ("another round",
     lambda codec: frame(FrameKind.PIECE, honest_payload(codec), tag=b"12345678"),
     "another round"),
    ("another scale", lambda codec: frame(FrameKind.PIECE, honest_payload(codec), exponent=113),
     "scaled"),
    ("a full heartbeat", lambda codec: frame(FrameKind.HEARTBEAT, b"x"), "with a payload"),
    ("a long abort", lambda codec: frame(FrameKind.ABORT, payload_bytes=10**6), "abort frame of"),
    ("an unknown abort", lambda codec: frame(FrameKind.ABORT, b"\xff\x00\x00"),
     "names what does not exist"),
    ("an unknown kind", lambda codec: b"\x63" + frame(FrameKind.PIECE)[1:], "unknown kind"),
]  # fmt: skip


@every_codec
@pytest.mark.parametrize(
    ("lie", "complaint"), [pytest.param(lie, complaint, id=name) for name, lie, complaint in LIES]
)
def test_a_member_that_breaks_the_rules_is_named(
    run: Any, codec: AverageCodec, lie: Lie, complaint: str
) -> None:
    group = round_with_a_dishonest_member(run, codec, [lie(codec)])
    assert_violation_of_b(group, complaint)


SUM_LIES: list[tuple[str, Lie, str]] = [
    ("another piece", lambda codec: frame(FrameKind.SUM, honest_payload(codec), piece=1), "is due"),
    ("too long",
     lambda codec: frame(FrameKind.SUM, bytes(payload_sizes(PIECE_ELEMENTS, codec)[-1] + 1)),
     "is due"),
    ("a piece", lambda codec: frame(FrameKind.PIECE, honest_payload(codec)), "is due"),
    ("another scale", lambda codec: frame(FrameKind.SUM, honest_payload(codec), exponent=113),
     "scaled"),
]  # fmt: skip


@every_codec
@pytest.mark.parametrize(
    ("lie", "complaint"),
    [pytest.param(lie, complaint, id=name) for name, lie, complaint in SUM_LIES],
)
def test_a_reducer_that_breaks_the_rules_is_named(
    run: Any, codec: AverageCodec, lie: Lie, complaint: str
) -> None:
    group = round_with_a_dishonest_reducer(run, codec, [lie(codec)])
    assert_violation_of_b(group, complaint)


# ------------------------------------------------------------------------- the content of a frame


def payloads_that_encode_nothing() -> list[tuple[str, bytes]]:
    """Of permitted lengths; under the other codecs, all bytes of the right length decode."""
    payload = honest_payload("exact")
    wider = bytes([payload[0] + 1])
    return [
        ("a width without its bytes", wider + payload[1:]),
        ("bytes without their width", payload + b"x"),
        ("a width beyond the widest", b"\x08" + bytes(len(payload) - 1)),
        ("widths alone", payload[:4]),
    ]


UNDECODABLE = [pytest.param(payload, id=name) for name, payload in payloads_that_encode_nothing()]


@pytest.mark.parametrize("payload", UNDECODABLE)
def test_a_member_whose_bytes_encode_nothing_is_named(run: Any, payload: bytes) -> None:
    group = round_with_a_dishonest_member(run, "exact", [frame(FrameKind.PIECE, payload)])
    assert_violation_of_b(group, "sent a piece that its bytes do not make")


@pytest.mark.parametrize("payload", UNDECODABLE)
def test_a_reducer_whose_bytes_encode_nothing_is_named(run: Any, payload: bytes) -> None:
    group = round_with_a_dishonest_reducer(run, "exact", [frame(FrameKind.SUM, payload)])
    assert_violation_of_b(group, "sent a sum that its bytes do not make")


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_member_whose_piece_is_not_finite_is_named(run: Any, codec: AverageCodec) -> None:
    lie = frame(FrameKind.PIECE, payload_with_nan(codec))
    group = round_with_a_dishonest_member(run, codec, [lie])
    failure = group.failures[A]
    assert (failure.failure, failure.culprit) == (RoundFailure.NON_FINITE, B)


@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_reducer_whose_sum_is_not_finite_is_named(run: Any, codec: AverageCodec) -> None:
    lie = frame(FrameKind.SUM, payload_with_nan(codec))
    group = round_with_a_dishonest_reducer(run, codec, [lie])
    failure = group.failures[A]
    assert (failure.failure, failure.culprit) == (RoundFailure.NON_FINITE, B)


# ---------------------------------------------------------- credit and reported failures


@every_codec
def test_a_member_cannot_make_a_reducer_hold_more_than_its_window(
    run: Any, codec: AverageCodec
) -> None:
    # C has not come, so A can sum nothing; B goes on sending all the same.
    group = Group((A, B, C), 60_000, codec=codec)
    frames = [frame(FrameKind.PIECE, honest_payload(codec), piece=piece) for piece in range(12)]

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.member, group.spec(A), carriers[A])
            tasks.start_soon(send_as_member, group, carriers, frames)

    run(lambda: with_network(group.names, body))
    assert_violation_of_b(group, "more than its credit")


def test_a_failure_that_another_member_reports_keeps_its_reason_and_culprit(run: Any) -> None:
    group = Group((A, B, C), 60_000)
    payload = Abort(RoundFailure.STALLED, 2, "C is \x1b[31mslow").encode()

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.member, group.spec(A), carriers[A])
            tasks.start_soon(send_as_member, group, carriers, [frame(FrameKind.ABORT, payload)])

    run(lambda: with_network(group.names, body))
    failure = group.failures[A]
    assert (failure.failure, failure.culprit) == (RoundFailure.STALLED, C)
    assert failure.reason == "C is ?[31mslow"
