"""The coordinator's garbage collection leaves no garbage, and is undone when the service ends."""

from __future__ import annotations

import gc
import sys
import weakref

import trio

from swarm_coordinator.server.gc_policy import (
    MAX_SKIPPED_COLLECTIONS,
    MIN_WORTHWHILE_OBJECTS,
    collect_garbage,
    low_latency,
    next_gc_backoff,
)
from swarm_coordinator.status.pacing import REST_FACTOR, with_duty_cycle


class Knot:
    """Refers to itself: only the collector frees it."""

    def __init__(self) -> None:
        self.itself = self


async def test_a_new_cycle_is_freed_within_a_moment() -> None:
    with low_latency():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collect_garbage)
            await trio.sleep(0)
            knot = weakref.ref(Knot())
            assert knot() is not None
            while knot() is not None:
                await trio.sleep(0.02)
            nursery.cancel_scope.cancel()


def test_what_lives_is_set_aside_only_while_the_service_runs() -> None:
    turn = sys.getswitchinterval()
    with low_latency():
        assert not gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert sys.getswitchinterval() == turn


def test_looks_that_find_nothing_become_rare_and_one_that_does_brings_them_back() -> None:
    left_out = [0]
    for _ in range(8):
        left_out.append(next_gc_backoff(left_out[-1], MIN_WORTHWHILE_OBJECTS - 1))
    assert left_out[:4] == [0, 1, 3, 7]
    assert left_out[-1] == MAX_SKIPPED_COLLECTIONS
    assert next_gc_backoff(MAX_SKIPPED_COLLECTIONS, MIN_WORTHWHILE_OBJECTS) == 0


def test_a_thread_with_much_to_do_rests_for_most_of_the_time() -> None:
    rested: list[float] = []
    readings = iter(range(100))  # one second of computing between two looks at the clock
    parts = with_duty_cycle("abcd", lambda: float(next(readings)), rested.append)
    assert "".join(parts) == "abcd"
    assert rested == [REST_FACTOR] * 3
