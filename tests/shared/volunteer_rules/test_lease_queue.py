"""The trainer's leases: what starts, in which order, how much at once, and what goes back."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from swarm_shared.base.errors import ProtocolError
from swarm_shared.base.types import MAX_EXACT_INTEGER, MicrobatchIndex, Step
from swarm_shared.protocol import Lease, LeasedMicrobatch, LeaseResult
from swarm_shared.volunteer_rules.lease_queue import (
    MAX_IN_FLIGHT,
    MAX_WAITING,
    LeaseQueue,
    StartedMicrobatch,
    handed_back,
)


def lease_of(
    *microbatches: int, step: int = 1, number: int = 1, window: int = 2, most: int = 2
) -> Lease:
    return Lease(
        step=Step(step), lease=number, window=window, max_window=most,
        microbatches=tuple(
            LeasedMicrobatch(microbatch=MicrobatchIndex(m), accumulate=()) for m in microbatches
        ),
    )  # fmt: skip


class LeaseQueueMachine(RuleBasedStateMachine):
    """Every microbatch has a number of its own, so that each one's end can be counted."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = LeaseQueue()
        self.now = 0.0
        self.oldest = 1
        self.numbers = 0
        self.most = 1
        self.waiting: dict[int, int] = {}
        """Step of each microbatch that has neither started nor gone back."""
        self.running: list[StartedMicrobatch] = []
        self.refusing = self.leaving = False

    def _returned(self, results: list[LeaseResult]) -> None:
        for result in results:
            assert not result.ok
            del self.waiting[result.microbatch]

    @rule(count=st.integers(1, 4), ahead=st.integers(-1, 1), window=st.integers(0, 4))
    def take(self, count: int, ahead: int, window: int) -> None:
        step = max(1, self.oldest + ahead)
        new = range(self.numbers, self.numbers + count)
        self.numbers += count
        self.waiting.update(dict.fromkeys(new, step))
        self.most = max(1, window, 4)
        self._returned(self.queue.take(lease_of(*new, step=step, window=window, most=4)))

    @rule(seconds=st.floats(0.0, 2.0), holds_a_stage=st.booleans())
    def start(self, seconds: float, holds_a_stage: bool) -> None:
        self.now += seconds
        begun = self.queue.start(Step(self.oldest) if holds_a_stage else None, self.now)
        if holds_a_stage:
            self.waiting = {m: s for m, s in self.waiting.items() if s >= self.oldest}
        assert begun or self.running or not self.waiting, "with nothing in flight one starts"
        for one in begun:
            step = self.waiting.pop(one.leased.microbatch)
            assert step == one.lease.step
            assert all(step <= other for other in self.waiting.values())
        self.running += begun

    @precondition(lambda self: self.running)
    @rule(position=st.integers(0, 7), ok=st.booleans())
    def finish(self, position: int, ok: bool) -> None:
        one = self.running.pop(position % len(self.running))
        self.queue.finished(one, self.now, ok=ok)

    @rule()
    def step_applied(self) -> None:
        self.oldest += 1

    @rule()
    def pause(self) -> None:
        self._returned(self.queue.pause())
        self.refusing = True

    @rule()
    def resume(self) -> None:
        self.queue.resume()
        self.refusing = self.leaving

    @precondition(lambda self: self.numbers > 20)
    @rule()
    def leave(self) -> None:
        self._returned(self.queue.leave())
        self.refusing = self.leaving = True

    @invariant()
    def no_more_run_than_the_window_allows(self) -> None:
        assert len(self.running) <= self.most

    @invariant()
    def nothing_waits_while_leases_are_refused(self) -> None:
        assert not (self.refusing and self.waiting)


TestLeaseQueue = LeaseQueueMachine.TestCase


def started(queue: LeaseQueue, oldest: int | None = 1) -> list[int]:
    step = None if oldest is None else Step(oldest)
    return [one.leased.microbatch for one in queue.start(step, 0.0)]


def test_what_an_older_step_lacks_is_started_first() -> None:
    queue = LeaseQueue()
    queue.take(lease_of(5, 6, step=2))
    queue.take(lease_of(7, step=1))
    assert started(queue) == [7, 5]


def test_a_microbatch_of_a_step_that_is_over_is_dropped_but_not_without_a_stage() -> None:
    queue = LeaseQueue()
    queue.take(lease_of(5, step=1))
    assert started(queue, oldest=2) == []
    queue.take(lease_of(6, step=1))
    assert started(queue, oldest=None) == [6]


def test_a_volunteer_that_leaves_accepts_no_lease_when_a_pause_ends() -> None:
    queue = LeaseQueue()
    queue.pause()
    queue.leave()
    queue.resume()
    assert [(r.ok, r.reason) for r in queue.take(lease_of(1))] == [(False, "")]
    assert queue.pause() == []
    queue.resume()
    assert [(r.ok, r.reason) for r in queue.take(lease_of(2))] == [(False, "")]
    assert started(queue) == []


def test_a_hand_back_names_its_lease_and_cuts_a_long_reason() -> None:
    lease = lease_of(4, step=3, number=9)
    result = handed_back(lease, lease.microbatches[0], "x" * 1000)
    assert (result.step, result.microbatch, result.lease, result.ok) == (3, 4, 9, False)
    assert result.reason == "x" * 500


def test_no_more_wait_than_a_step_has() -> None:
    queue = LeaseQueue()
    queue.take(lease_of(*range(MAX_WAITING)))
    with pytest.raises(ProtocolError, match=f"{MAX_WAITING} wait already"):
        queue.take(lease_of(0))


def test_no_window_starts_more_than_a_peer_can_hold() -> None:
    queue = LeaseQueue()
    huge = MAX_EXACT_INTEGER
    queue.take(lease_of(*range(MAX_IN_FLIGHT + 1), window=huge, most=huge))
    assert len(queue.start(None, 0.0)) == MAX_IN_FLIGHT
