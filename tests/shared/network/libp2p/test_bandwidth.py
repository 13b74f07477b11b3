"""Limits on bytes a second hold for all connections of a node together, on real sockets."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
import trio
import trio.testing
from trio.testing import MockClock

from kits.network.nodes import ANY_PORT, LIMITS, a_node, noise_bytes
from kits.waiting import until
from swarm_shared.network import FramedStream, FrameLimits, Node
from swarm_shared.network.libp2p.bandwidth import (
    BURST_SECONDS,
    PIECE_BYTES,
    Bandwidth,
    DirectionLimiter,
)

SINK = "/test/sink/1"
SINK_LIMITS = FrameLimits(max_header_bytes=10, max_payload_bytes=2**20)


async def sink(stream: FramedStream) -> None:
    while True:
        await stream.receive()


async def carried(sender: Node, receiver: Node, streams: int, mover: DirectionLimiter) -> float:
    """Bytes a second that `mover` lets pass while some streams send all they can."""
    receiver.serve(SINK, sink, SINK_LIMITS)
    payload = noise_bytes(64 * 1024)
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            stream = await sender.open_stream(
                receiver.peer_id, SINK, SINK_LIMITS, receiver.addresses
            )
            while True:
                await stream.send(b"", payload)

        for _ in range(streams):
            nursery.start_soon(send)
        await trio.sleep(1.0)  # handshakes, and what the bucket had saved
        begun, before = trio.current_time(), mover.bytes
        await trio.sleep(3.0)
        rate = (mover.bytes - before) / (trio.current_time() - begun)
        nursery.cancel_scope.cancel()
    return rate


@pytest.mark.parametrize("direction", ["sent", "received"])
@pytest.mark.parametrize("limit", [128 * 1024, 2 * 2**20])
async def test_a_limit_is_kept_within_a_tenth_of_what_is(direction: str, limit: int) -> None:
    async with a_node(None, ANY_PORT) as receiver, a_node() as sender:
        limited = sender.bandwidth.up if direction == "sent" else receiver.bandwidth.down
        limited.limit(limit)
        assert await carried(sender, receiver, 3, limited) == pytest.approx(limit, rel=0.1)


async def test_both_ends_count_the_same_bytes_and_those_of_the_encryption() -> None:
    async with a_node(None, ANY_PORT) as receiver, a_node() as sender:
        receiver.serve(SINK, sink, SINK_LIMITS)
        stream = await sender.open_stream(receiver.peer_id, SINK, SINK_LIMITS, receiver.addresses)
        async with stream:
            await stream.send(b"", noise_bytes(500_000))
        await until(lambda: receiver.bandwidth.down.bytes >= sender.bandwidth.up.bytes, 20)
        assert 500_000 < receiver.bandwidth.down.bytes == sender.bandwidth.up.bytes < 520_000


async def test_a_small_message_overtakes_what_another_connection_has_queued() -> None:
    async with (
        a_node(None, ANY_PORT) as bulk,
        a_node(None, ANY_PORT) as other,
        a_node() as sender,
    ):
        bulk.serve(SINK, sink, SINK_LIMITS)
        async with trio.open_nursery() as nursery:
            heavy = await sender.open_stream(bulk.peer_id, SINK, SINK_LIMITS, bulk.addresses)
            light = await sender.open_stream(other.peer_id, "/test/echo/1", LIMITS, other.addresses)
            sender.bandwidth.up.limit(128 * 1024)
            nursery.start_soon(heavy.send, b"", noise_bytes(2**20))
            await trio.testing.wait_all_tasks_blocked()
            before = sender.bandwidth.up.bytes
            await light.send(b"beat")
            await light.receive()
            # Not after the megabyte of the other one.
            assert sender.bandwidth.up.bytes - before < 16 * PIECE_BYTES
            nursery.cancel_scope.cancel()


def on_a_virtual_clock(main: Callable[[], Awaitable[None]]) -> None:
    trio.run(main, clock=MockClock(autojump_threshold=0))


def test_those_who_wait_hear_of_another_limit_at_once() -> None:
    async def main() -> None:
        direction = DirectionLimiter(trio.current_time)
        direction.limit(64 * 1024)
        for _ in range(2):
            await direction.consume(PIECE_BYTES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(direction.consume, PIECE_BYTES)
            await trio.testing.wait_all_tasks_blocked()
            begun = trio.current_time()
            direction.limit(None)
        assert trio.current_time() == begun
        assert direction.bytes == 3 * PIECE_BYTES

    on_a_virtual_clock(main)


def test_a_bucket_saves_no_more_than_a_moment() -> None:
    async def main() -> None:
        direction = DirectionLimiter(trio.current_time)
        direction.limit(2**20)
        await trio.sleep(3600)
        begun = trio.current_time()
        for _ in range(128):
            await direction.consume(PIECE_BYTES)
        assert trio.current_time() - begun == pytest.approx(2.0 - BURST_SECONDS, rel=0.02)

    on_a_virtual_clock(main)


async def test_before_it_has_sent_anything_a_node_expects_its_share_of_the_limit() -> None:
    bandwidth = Bandwidth()
    assert bandwidth.expected_up_bytes_per_second == 0.0, "nothing is known"
    bandwidth.up.limit(100_000)
    bandwidth.nodes = 2
    assert bandwidth.expected_up_bytes_per_second == 50_000.0
    assert bandwidth.own_up_bytes_per_second == 0.0, "nothing was measured"
