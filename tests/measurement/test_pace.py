"""A paced process takes as long as its pace demands, and no longer."""

from __future__ import annotations

import math

import pytest

from benchmarks.instruments.pace import PACE_VARIABLE, Pace, pace_from_environment
from swarm_shared.base.errors import ConfigurationError


class Time:
    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


def test_what_is_done_sooner_waits_for_its_share_of_the_time() -> None:
    time = Time()
    pace = Pace(10.0, 30.0, lambda: time.now, time.sleep)  # three seconds a microbatch
    time.now += 0.25
    pace.keep(100.0, 1 / 3)
    assert time.slept == [pytest.approx(0.75)]
    pace.keep(time.now - 5.0, 1.0)
    assert len(time.slept) == 1  # what took longer anyway does not wait


def test_without_a_pace_nothing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PACE_VARIABLE, raising=False)
    pace_from_environment(1e12, lambda: 0.0).keep(0.0, 1.0)


@pytest.mark.parametrize("text", ["fast", "0", "-1", "nan"])
def test_a_pace_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(PACE_VARIABLE, text)
    with pytest.raises(ConfigurationError, match=PACE_VARIABLE):
        pace_from_environment(1.0, lambda: math.inf)
