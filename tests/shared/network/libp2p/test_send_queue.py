from __future__ import annotations

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.network.libp2p import send_queue
from swarm_shared.network.libp2p.noise_channel import MAX_PLAINTEXT_BYTES
from swarm_shared.network.libp2p.send_queue import CAPACITY_BYTES, MESSAGES_PER_WRITE, SendQueue
from swarm_shared.network.libp2p.yamux_frames import (
    HEADER_BYTES,
    MAX_FRAME_PAYLOAD_BYTES,
    Flag,
    FrameType,
    control_frame,
    data_header,
)

sizes = st.lists(st.integers(0, MAX_FRAME_PAYLOAD_BYTES), max_size=20)


def data_frame(stream_id: int, size: int = 1000) -> bytes:
    return data_header(stream_id, size) + bytes([stream_id]) * size


@given(sizes)
def test_frames_leave_whole_in_order_and_fit_messages(frame_sizes: list[int]) -> None:
    queue = SendQueue()
    frames = [data_frame(index, size) for index, size in enumerate(frame_sizes)]
    for frame in frames:
        queue.put(frame)
    sent = b""
    while messages := queue.next_messages():
        assert len(messages) <= MESSAGES_PER_WRITE
        assert all(0 < len(message) <= MAX_PLAINTEXT_BYTES for message in messages)
        sent += b"".join(messages)
    assert sent == b"".join(frames)
    assert queue.queued_bytes == 0


def test_credits_and_pings_overtake_and_what_ends_a_stream_keeps_its_turn() -> None:
    queue = SendQueue()
    queue.put(data_frame(1))
    queue.put_control(FrameType.WINDOW_UPDATE, Flag.FIN, 1, 0)
    queue.put_control(FrameType.WINDOW_UPDATE, Flag.NONE, 3, 7)
    queue.put_control(FrameType.PING, Flag.SYN, 0, 1)
    assert queue.next_messages() == [
        control_frame(FrameType.WINDOW_UPDATE, Flag.NONE, 3, 7)
        + control_frame(FrameType.PING, Flag.SYN, 0, 1)
        + data_frame(1)
        + control_frame(FrameType.WINDOW_UPDATE, Flag.FIN, 1, 0)
    ]


def test_the_number_of_waiting_control_frames_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(send_queue, "MAX_CONTROL_FRAMES", 3)
    queue = SendQueue()
    assert [queue.put_control(FrameType.PING, Flag.ACK, 0, n) for n in range(5)] == [True] * 3 + [
        False
    ] * 2
    assert queue.queued_bytes == 3 * HEADER_BYTES
    queue.next_messages()
    assert queue.put_control(FrameType.PING, Flag.ACK, 0, 0)


async def test_writers_wait_while_the_queue_is_full_and_get_their_turns() -> None:
    queue = SendQueue()
    turns: list[int] = []

    async def write(writer: int) -> None:
        for _ in range(20):
            await queue.take_turn()
            turns.append(writer)
            queue.put(data_frame(writer, MAX_FRAME_PAYLOAD_BYTES))

    async with trio.open_nursery() as nursery:
        for writer in range(5):
            nursery.start_soon(write, writer)
        while len(turns) < 100:
            await trio.testing.wait_all_tasks_blocked()
            assert queue.queued_bytes <= CAPACITY_BYTES
            queue.next_messages()
    # Trio shuffles those it wakes together, so that turns are fair but not strictly cyclic.
    settled = turns[MESSAGES_PER_WRITE:80]
    for start in range(len(settled) - 12):
        assert set(settled[start : start + 12]) == set(range(5))


async def test_a_writer_that_goes_away_while_it_waits_does_not_strand_the_others() -> None:
    queue = SendQueue()
    while queue.queued_bytes < CAPACITY_BYTES:
        queue.put(data_frame(9, MAX_FRAME_PAYLOAD_BYTES))
    woken: list[int] = []

    async def gives_up(number: int) -> None:
        await queue.take_turn()
        woken.append(number)
        queue.give_turns()

    async with trio.open_nursery() as nursery:
        for number in range(3 * MESSAGES_PER_WRITE):
            nursery.start_soon(gives_up, number)
        await trio.testing.wait_all_tasks_blocked()
        assert woken == []
        while queue.next_messages():
            pass
    assert sorted(woken) == list(range(3 * MESSAGES_PER_WRITE))
