"""The run's time, which does not depend on how a machine's clock is set."""

from __future__ import annotations

import time

import pytest

from swarm_shared.base.clock import RunClock, clock_through_sleep


def test_before_it_is_learned_the_time_is_that_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time", lambda: 123.0)
    assert RunClock()() == 123.0


def test_what_was_learned_goes_on_whatever_the_machine_is_set_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 10.0
    clock = RunClock(lambda: now)
    clock.learn(1_000_000.0)
    monkeypatch.setattr(time, "time", lambda: 5.0)
    now = 70.0
    assert clock() == 1_000_060.0
    clock.learn(2_000_000.0)
    assert clock() == 2_000_000.0


def test_the_clock_that_counts_sleep_never_goes_back() -> None:
    first = clock_through_sleep()
    assert clock_through_sleep() >= first
