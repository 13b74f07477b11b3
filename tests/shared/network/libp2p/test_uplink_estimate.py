"""A line's rate is learnt from writers that it holds up, and from nothing else."""

from __future__ import annotations

import random
import statistics

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.network.nodes import ANY_PORT, a_node
from shared.network.libp2p.test_bandwidth import carried
from swarm_shared.network.libp2p.uplink_estimate import UplinkEstimate

BUFFER_BYTES = 1_000_000

SOCKET_BUFFER_BYTES = 600_000
PIECE_BYTES, TENSOR_PIECES = 64 * 1024, 4


class Line:
    """A socket with a buffer that a line empties; its writers advance the clock."""

    def __init__(self, bytes_per_second: float) -> None:
        self.now = 0.0
        self.rate = UplinkEstimate(lambda: self.now)
        self._bytes_per_second = bytes_per_second
        self._filled = 0.0

    def rest(self, seconds: float) -> None:
        self.now += seconds
        self._filled = max(0.0, self._filled - seconds * self._bytes_per_second)

    def write(self, size: int) -> None:
        begun = self.rate.begin()
        excess = self._filled + size - BUFFER_BYTES
        if excess > 0:
            self.rest(excess / self._bytes_per_second)
        self._filled += size
        self.rate.end(begun, size)


@given(
    st.floats(1e5, 1e7),
    st.lists(st.tuples(st.integers(10, 80), st.floats(0.0, 30.0)), min_size=6, max_size=20),
)
def test_a_line_that_is_full_now_and_then_is_known_within_a_few_percent(
    bytes_per_second: float, bursts: list[tuple[int, float]]
) -> None:
    line = Line(bytes_per_second)
    for pieces, pause in bursts:
        for _ in range(pieces):
            line.write(256 * 1024)
        line.rest(pause)
    if line.rate.bytes_per_second:
        assert line.rate.bytes_per_second == pytest.approx(bytes_per_second, rel=0.25)


def test_a_line_that_is_always_full_is_known_well() -> None:
    line = Line(2.5e6)
    for _ in range(200):
        line.write(256 * 1024)
    assert line.rate.bytes_per_second == pytest.approx(2.5e6, rel=0.01)


class SharedLine:
    """Sockets that share a line equally. Each has a buffer, and a queue of pieces to be written."""

    def __init__(self, bytes_per_second: float, sockets: int) -> None:
        self.now = 0.0
        self.rate = UplinkEstimate(lambda: self.now)
        self.queued = [0] * sockets
        """Pieces that wait for each socket, the one being written included."""
        self._bytes_per_second = bytes_per_second
        self._filled = [0.0] * sockets
        self._begun: list[float | None] = [None] * sockets

    def run(self, seconds: float) -> None:
        """Let the line send for a moment, then write what has room."""
        self.now += seconds
        busy = [number for number, filled in enumerate(self._filled) if filled > 0]
        for number in busy:
            sent = seconds * self._bytes_per_second / len(busy)
            self._filled[number] = max(0.0, self._filled[number] - sent)
        for number in range(len(self.queued)):
            self._write(number)

    def _write(self, number: int) -> None:
        while self.queued[number]:
            begun = self._begun[number]
            if begun is None:
                begun = self._begun[number] = self.rate.begin()
            if self._filled[number] + PIECE_BYTES > SOCKET_BUFFER_BYTES:
                return
            self._filled[number] += PIECE_BYTES
            self.queued[number] -= 1
            self._begun[number] = None
            self.rate.end(begun, PIECE_BYTES)


@given(st.integers(0, 2**32), st.floats(5e5, 2e6), st.integers(1, 4))
@settings(max_examples=10)
def test_a_line_whose_sockets_fill_in_turn_is_known_within_a_tenth(
    seed: int, bytes_per_second: float, sockets: int
) -> None:
    line, draw = SharedLine(bytes_per_second, sockets), random.Random(seed)
    estimates, sends_at = [], 0.0
    tensor_seconds = TENSOR_PIECES * PIECE_BYTES / bytes_per_second
    while line.now < 400 * tensor_seconds:
        if line.now >= sends_at and sum(line.queued) < 10 * TENSOR_PIECES:
            line.queued[draw.randrange(sockets)] += TENSOR_PIECES
            sends_at = line.now + draw.expovariate(1.4 / tensor_seconds)
        line.run(tensor_seconds / 40)
        estimates.append(line.rate.bytes_per_second / bytes_per_second)
    assert statistics.fmean(estimates[len(estimates) // 2 :]) == pytest.approx(1.0, abs=0.1)


def test_a_line_that_holds_nobody_up_stays_unknown() -> None:
    line = Line(1e8)
    for _ in range(200):
        line.write(256 * 1024)
        line.rest(0.1)
    assert line.rate.bytes_per_second == 0


def test_a_faster_line_is_believed_soon_and_a_slower_one_slowly() -> None:
    line = Line(1e6)
    for _ in range(100):
        line.write(256 * 1024)
    line._bytes_per_second = 4e6
    for _ in range(400):
        line.write(256 * 1024)
    assert line.rate.bytes_per_second > 3e6
    line._bytes_per_second = 1e6
    for _ in range(60):
        line.write(256 * 1024)
    assert 2e6 < line.rate.bytes_per_second < 4e6


def test_a_write_that_fails_counts_for_nothing() -> None:
    line = Line(1e6)
    for _ in range(50):
        begun = line.rate.begin()
        line.now += 1.0
        line.rate.end(begun, 0)
    assert line.rate.bytes_per_second == 0


async def test_what_a_volunteer_allows_itself_is_found_by_sending() -> None:
    limit = 512 * 1024
    async with a_node(None, ANY_PORT) as receiver, a_node() as sender:
        sender.bandwidth.up.limit(limit)
        await carried(sender, receiver, 2, sender.bandwidth.up)
        assert sender.bandwidth.up.max_bytes_per_second == pytest.approx(limit, rel=0.2)
        sender.bandwidth.up.limit(None)
        assert sender.bandwidth.up.max_bytes_per_second == 0
