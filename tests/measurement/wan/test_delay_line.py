"""Which packet leaves when: paths, jitter and loss, with time and random numbers given."""

from __future__ import annotations

import random

import pytest

from benchmarks.wan.links.delay_line import JITTER_SECONDS, Access, DelayLine

A, B, C = b"aaaa", b"bbbb", b"cccc"


def taken(line: DelayLine, now: float) -> list[tuple[float, bytes]]:
    found = []
    while (packet := line.take_due(now)) is not None:
        found.append(packet)
    return found


def line_of(**machines: Access) -> DelayLine:
    addresses = {"a": A, "b": B, "c": C}
    return DelayLine(
        {addresses[name]: access for name, access in machines.items()}, random.Random(5).random
    )


def test_a_packet_waits_for_the_delays_of_both_ends() -> None:
    line = line_of(a=Access(0.02), b=Access(0.005))
    line.accept(10.0, A, B, b"there")
    line.accept(11.0, B, A, b"back")
    assert line.next_due() == pytest.approx(10.025)
    assert taken(line, 10.02) == []
    assert [packet for _, packet in taken(line, 10.03)] == [b"there"]
    assert taken(line, 12.0) == [(pytest.approx(11.025), b"back")]
    assert line.next_due() is None


def test_what_has_a_shorter_way_leaves_first() -> None:
    line = line_of(a=Access(0.0), b=Access(0.5), c=Access(0.1))
    line.accept(0.0, A, B, b"far")
    line.accept(0.1, A, C, b"near")
    assert [packet for _, packet in taken(line, 1.0)] == [b"near", b"far"]


def test_jitter_swings_to_both_sides_and_never_reorders() -> None:
    line = line_of(a=Access(0.05, jitter_seconds=0.04), b=Access(0.0))
    count = 2000
    for index in range(count):
        line.accept(index * 0.003, A, B, index.to_bytes(4, "big"))
    packets = taken(line, count)
    assert [int.from_bytes(packet, "big") for _, packet in packets] == list(range(count))
    delays = [due - index * 0.003 for index, (due, _) in enumerate(packets)]
    assert 0.01 <= min(delays) < 0.02
    assert 0.08 < max(delays) <= 0.09


def test_jitter_of_packets_far_apart_has_the_delay_as_its_mean() -> None:
    line = line_of(a=Access(0.05, jitter_seconds=0.04), b=Access(0.0))
    for index in range(2000):
        line.accept(index * 10 * JITTER_SECONDS, A, B, b"x")
    delays = [due % (10 * JITTER_SECONDS) for due, _ in taken(line, 1e9)]
    assert sum(delays) / len(delays) == pytest.approx(0.05, abs=0.002)


def test_packets_are_lost_in_either_direction_of_a_lossy_line_and_in_no_other() -> None:
    line = line_of(a=Access(loss=0.25), b=Access(), c=Access())
    for source, target in ((A, B), (B, A), (B, C)):
        for _ in range(1000):
            line.accept(0.0, source, target, source + target)
    packets = [packet for _, packet in taken(line, 1.0)]
    assert packets.count(B + C) == 1000
    for lossy in (A + B, B + A):
        assert 700 < packets.count(lossy) < 800
    assert line.lost == 3000 - len(packets)


def test_packets_of_strangers_go_nowhere() -> None:
    line = line_of(a=Access())
    line.accept(0.0, A, B, b"x")
    line.accept(0.0, C, A, b"x")
    assert (line.refused, line.next_due()) == (2, None)
