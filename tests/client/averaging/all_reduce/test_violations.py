"""Members and reducers that break the protocol of a round, under every codec."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import anyio
import numpy as np
import pytest

from kits.averaging.memory_carrier import MemoryCarrier, MemoryChannel
from kits.averaging.memory_group import PIECE_ELEMENTS, A, B, C, Group
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
    with carriers[B].incoming(spec):
        channel = await carriers[B].open(A)
        await channel.send(StreamHello(1, spec.tag, plan_digest(spec)).encode())
        await send_and_read_to_the_end(channel, frames)


ONLY_B_REDUCES = (0.0, 1.0)


async def send_as_reducer(
    group: Group, carriers: dict[PeerId, MemoryCarrier], frames: list[bytes]
) -> None:
    """B accepts the stream of the member A as it should, then sends `frames`."""
    spec = group.spec(B, shares=ONLY_B_REDUCES)
    with carriers[B].incoming(spec) as arrivals:
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


MEMBER, REDUCER = "a member", "a reducer"
by_either = pytest.mark.parametrize("liar", [MEMBER, REDUCER])


def round_with(run: Any, liar: str, codec: AverageCodec, frames: list[bytes]) -> Group:
    """A round of A and B, which sends `frames` in the place of its pieces or of its sums."""
    group = Group((A, B), 60_000, codec=codec)
    send = send_as_member if liar == MEMBER else send_as_reducer

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            spec = group.spec(A, shares=None if liar == MEMBER else ONLY_B_REDUCES)
            tasks.start_soon(group.member, spec, carriers[A])
            tasks.start_soon(send, group, carriers, frames)

    run(group, body)
    return group


def assert_violation_of_b(group: Group, complaint: str) -> None:
    failure = group.failures[A]
    assert (failure.failure, failure.culprit) == (RoundFailure.PROTOCOL, B)
    assert complaint in failure.reason


# ---------------------------------------------------------------------------- the form of a frame

Lie = Callable[[AverageCodec], bytes]


def piece(codec: AverageCodec, **changes: Any) -> bytes:
    return frame(FrameKind.PIECE, honest_payload(codec), **changes)


def total(codec: AverageCodec, **changes: Any) -> bytes:
    return frame(FrameKind.SUM, honest_payload(codec), **changes)


def zeros(kind: FrameKind, codec: AverageCodec, *, longer_by: int) -> bytes:
    """Bytes that are one less than the shortest payload, or one more than the longest."""
    sizes = payload_sizes(PIECE_ELEMENTS, codec)
    return frame(kind, bytes((sizes[-1] if longer_by > 0 else sizes[0]) + longer_by))


LIES: list[tuple[str, str, Lie, str]] = [
    (MEMBER, "another piece", lambda codec: piece(codec, piece=1), "is due"),
    (MEMBER, "too short", lambda codec: zeros(FrameKind.PIECE, codec, longer_by=-1), "is due"),
    (MEMBER, "too long", lambda codec: zeros(FrameKind.PIECE, codec, longer_by=1), "is due"),
    (MEMBER, "beyond all memory", lambda _: frame(FrameKind.PIECE, payload_bytes=2**32 - 1),
     "is due"),
    (MEMBER, "a sum", total, "is due"),
    (MEMBER, "the end", lambda _: frame(FrameKind.BYE), "is due"),
    (MEMBER, "another sender", lambda codec: piece(codec, sender=0), "another member's name"),
    (MEMBER, "another round", lambda codec: piece(codec, tag=b"12345678"), "another round"),
    (MEMBER, "another scale", lambda codec: piece(codec, exponent=113), "scaled"),
    (MEMBER, "heartbeats at the speed of the line", lambda _: 1000 * frame(FrameKind.HEARTBEAT),
     "heartbeats in 0 s"),
    (MEMBER, "a full heartbeat", lambda _: frame(FrameKind.HEARTBEAT, b"x"), "with a payload"),
    (MEMBER, "a short abort", lambda _: frame(FrameKind.ABORT, b"\x00"), "abort frame of"),
    (MEMBER, "a long abort", lambda _: frame(FrameKind.ABORT, payload_bytes=10**6),
     "abort frame of"),
    (MEMBER, "an unknown abort", lambda _: frame(FrameKind.ABORT, b"\xff\x00\x00"),
     "names what does not exist"),
    (MEMBER, "a culprit that is no member", lambda _: frame(FrameKind.ABORT, b"\x00\x00\x02"),
     "names what does not exist"),
    (MEMBER, "an unknown kind", lambda _: b"\x63" + frame(FrameKind.PIECE)[1:], "unknown kind"),
    (REDUCER, "another piece", lambda codec: total(codec, piece=1), "is due"),
    (REDUCER, "too long", lambda codec: zeros(FrameKind.SUM, codec, longer_by=1), "is due"),
    (REDUCER, "a piece", piece, "is due"),
    (REDUCER, "another scale", lambda codec: total(codec, exponent=113), "scaled"),
]  # fmt: skip


@every_codec
@pytest.mark.parametrize(
    ("liar", "lie", "complaint"),
    [pytest.param(liar, lie, words, id=f"{name} of {liar}") for liar, name, lie, words in LIES],
)
def test_a_peer_that_breaks_the_rules_is_named(
    run: Any, codec: AverageCodec, liar: str, lie: Lie, complaint: str
) -> None:
    assert_violation_of_b(round_with(run, liar, codec, [lie(codec)]), complaint)


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


KINDS = {MEMBER: FrameKind.PIECE, REDUCER: FrameKind.SUM}


@by_either
@pytest.mark.parametrize("payload", UNDECODABLE)
def test_a_peer_whose_bytes_encode_nothing_is_named(run: Any, liar: str, payload: bytes) -> None:
    group = round_with(run, liar, "exact", [frame(KINDS[liar], payload)])
    what = "piece" if liar == MEMBER else "sum"
    assert_violation_of_b(group, f"sent a {what} whose bytes are not what its codec writes")


@by_either
@pytest.mark.parametrize("codec", LOSSY_CODECS)
def test_a_peer_whose_numbers_are_not_finite_is_named(
    run: Any, liar: str, codec: AverageCodec
) -> None:
    group = round_with(run, liar, codec, [frame(KINDS[liar], payload_with_nan(codec))])
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

    run(group, body)
    assert_violation_of_b(group, "more than its credit")


def test_a_failure_that_another_member_reports_keeps_its_reason_and_culprit(run: Any) -> None:
    group = Group((A, B, C), 60_000)
    payload = Abort(RoundFailure.STALLED, 2, "C is \x1b[31mslow").encode()

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.member, group.spec(A), carriers[A])
            tasks.start_soon(send_as_member, group, carriers, [frame(FrameKind.ABORT, payload)])

    run(group, body)
    failure = group.failures[A]
    assert (failure.failure, failure.culprit) == (RoundFailure.STALLED, C)
    assert failure.reason == "C is ?[31mslow"


@every_codec
def test_a_member_that_says_goodbye_before_its_sums_is_named(run: Any, codec: AverageCodec) -> None:
    group = Group((A, B, C), PIECE_ELEMENTS, codec=codec)
    only_a_reduces = (1.0, 0.0, 0.0)

    async def body(carriers: dict[PeerId, MemoryCarrier]) -> None:
        spec = group.spec(B, shares=only_a_reduces)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(group.member, group.spec(A, shares=only_a_reduces), carriers[A])
            channel = await carriers[B].open(A)
            await channel.send(StreamHello(1, spec.tag, plan_digest(spec)).encode())
            frames = [frame(FrameKind.PIECE, honest_payload(codec)), frame(FrameKind.BYE)]
            tasks.start_soon(send_and_read_to_the_end, channel, frames)
            await anyio.wait_all_tasks_blocked()
            # The sum is complete, and sent, only now.
            tasks.start_soon(group.member, group.spec(C, shares=only_a_reduces), carriers[C])

    run(group, body)
    assert_violation_of_b(group, "goodbye before")
