"""The seconds of its uplink that a peer reports for a microbatch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarm_client.pipeline.uplink_share import MIN_ACTIVATION_SHARE, UplinkShare


class Peer:
    """With a line of 100 bytes a second, and microbatches that send 30 on and 20 back."""

    def __init__(self, staleness: int = 0) -> None:
        self.now, self.own_up_bytes_per_second, self.sent_bytes = 0.0, 100.0, 0
        sizes = SimpleNamespace(output_bytes=30, input_gradient_bytes=20)
        self.holding: Any = SimpleNamespace(
            worker=SimpleNamespace(sizes=sizes), account=SimpleNamespace(staleness=staleness)
        )
        self.line = UplinkShare(self, lambda: self.sent_bytes, lambda: self.now)

    def step(self, seconds: float, averages_bytes: int) -> None:
        self.now += seconds
        self.sent_bytes += averages_bytes
        self.line.step_applied()

    @property
    def seconds(self) -> float:
        return self.line.microbatch_seconds(self.holding)


def test_a_line_that_has_held_nothing_up_is_not_what_limits_a_peer() -> None:
    peer = Peer()
    peer.own_up_bytes_per_second = 0.0
    assert peer.seconds == 0.0


def test_an_activation_and_a_gradient_take_their_bytes_over_the_line() -> None:
    assert Peer().seconds == pytest.approx(0.5)


def test_averages_that_go_up_meanwhile_leave_less_of_the_line() -> None:
    peer = Peer(staleness=1)
    peer.step(1.0, 1000)
    assert peer.seconds == pytest.approx(0.5), "nobody knows how long those were under way"
    peer.step(4.0, 240)
    assert peer.seconds == pytest.approx(50 / 40)
    peer.step(4.0, 0)
    assert peer.seconds == pytest.approx(0.5), "what counts is the last step"


def test_where_steps_keep_apart_averages_go_when_no_microbatch_does() -> None:
    peer = Peer(staleness=0)
    peer.step(1.0, 0)
    peer.step(4.0, 240)
    assert peer.seconds == pytest.approx(0.5)


def test_averages_that_seem_to_fill_a_line_leave_a_part_of_it() -> None:
    peer = Peer(staleness=1)
    peer.step(1.0, 0)
    peer.step(1.0, 100_000)
    assert peer.seconds == pytest.approx(0.5 / MIN_ACTIVATION_SHARE)
