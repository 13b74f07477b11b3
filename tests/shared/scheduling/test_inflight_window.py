"""A trainer's window is twice what its pipelines carry, whatever their delay."""

from __future__ import annotations

import heapq

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.scheduling.inflight_window import BURSTS_KEPT, GAIN, InFlightWindow, SendRecord


def drive(
    window: InFlightWindow, service: float, delay: float, count: int, most: int = 64
) -> float:
    """Microbatches per second through one device with `delay` seconds of way, the last half."""
    now, free_at, sent = 0.0, 0.0, 0
    returns: list[tuple[float, int, SendRecord]] = []
    ended: list[float] = []
    while len(ended) < count:
        while sent < count and window.in_flight < window.size(2, most):
            free_at = max(now, free_at) + service
            heapq.heappush(returns, (free_at + delay, sent, window.sent(now)))
            sent += 1
        now, _, send_record = heapq.heappop(returns)
        window.returned(send_record, now)
        ended.append(now)
    middle = count // 3
    # What is sent last drains through an emptying pipeline: leave it out.
    last = count - most
    return (last - middle) / (ended[last] - ended[middle])


@given(service=st.floats(0.01, 1.0), trips=st.floats(0.0, 12.0))
def test_any_delay_is_filled_and_no_more_than_twice_the_need_is_under_way(
    service: float, trips: float
) -> None:
    window = InFlightWindow()
    rate = drive(window, service, trips * service, 200)
    assert rate == pytest.approx(1 / service, rel=0.02)
    # One is in service, `trips` are on their way.
    need = (1 + trips) * (1 + 1e-9)  # as exact as sums of floats are
    assert window.size(1, 1000) <= GAIN * need + 1


def test_between_its_bounds_only() -> None:
    window = InFlightWindow()
    assert window.size(3, 16) == 3
    drive(window, 0.1, 5.0, 300)
    assert window.size(3, 16) == 16
    assert window.size(200, 300) == 200


def test_a_pipeline_that_changes_is_measured_anew() -> None:
    window = InFlightWindow()
    drive(window, 0.1, 2.0, 100)
    assert window.size(1, 1000) >= 2 * 21
    for _ in range(BURSTS_KEPT):
        drive(window, 0.1, 0.0, 100)
    assert window.size(1, 1000) <= 3


def test_the_best_of_the_kept_bursts_counts() -> None:
    window = InFlightWindow()
    burst = [window.sent(0.0) for _ in range(4)]
    for sent in burst:
        window.returned(sent, 1.0)
    window.returned(window.sent(2.0), 3.0)
    # Four a second once, and a second for the way each time.
    assert window.size(1, 1000) == GAIN * 4


def test_what_fails_is_not_measured_and_leaves_its_place() -> None:
    window = InFlightWindow()
    window.sent(0.0)
    kept = window.sent(0.0)
    window.failed()
    assert window.in_flight == 1
    assert window.size(1, 1000) == 1
    window.returned(kept, 1.0)
    assert window.in_flight == 0
    assert window.size(1, 1000) == 2
