"""A sleep of the machine and a stop of the program are detected and distinguished. No clock
waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm_client.control.status_document import DaemonState, InterruptionView
from swarm_client.control.status_sentence import StatusFacts, describe
from swarm_client.daemon.sleep_watch import (
    CHECK_SECONDS,
    SleepWatch,
    clock_through_sleep,
)


class Clocks:
    def __init__(self) -> None:
        self.awake, self.always, self.calendar = 50.0, 100.0, 1_000_000.0
        self.found: list[InterruptionView] = []
        self.watch = SleepWatch(
            self.found.append, lambda: self.calendar, lambda: self.awake, lambda: self.always
        )

    def pass_(self, awake: float = CHECK_SECONDS, asleep: float = 0.0, adjusted: float = 0) -> None:
        self.awake += awake
        self.always += awake + asleep
        self.calendar += awake + asleep + adjusted
        self.watch.check()


def test_a_machine_that_slept_is_distinguished_from_a_program_that_was_stopped() -> None:
    clocks = Clocks()
    clocks.pass_()
    clocks.pass_(asleep=720.0)
    clocks.pass_(awake=CHECK_SECONDS + 95.0)
    clocks.pass_()
    slept, stopped = clocks.found
    assert (slept.slept, slept.seconds, slept.began) == (True, 720.0, 1_000_004.0)
    assert slept.sentence == "this machine slept for 12 min"
    assert (stopped.slept, stopped.seconds) == (False, 95.0)
    assert stopped.sentence == "this program was stopped for 95 s"


def test_a_busy_machine_and_a_clock_that_is_set_are_no_absence() -> None:
    clocks = Clocks()
    clocks.pass_(awake=CHECK_SECONDS + 9.0)
    clocks.pass_(adjusted=86_400.0)
    clocks.pass_(adjusted=-86_400.0)
    assert clocks.found == []


def test_the_clock_that_goes_on_in_sleep_goes_on() -> None:
    assert clock_through_sleep() <= clock_through_sleep()


@pytest.mark.parametrize(
    "facts",
    [StatusFacts(), StatusFacts(attached=True), StatusFacts(attached=True, loading_stage=1)],
)
def test_why_it_was_away_is_shown_until_a_stage_is_held_again(facts: StatusFacts) -> None:
    described = describe(replace(facts, away="this machine slept for 12 min"), 0.0)
    assert described.state is DaemonState.SYNCING
    assert described.sentence.endswith("; before that, this machine slept for 12 min")
    held = describe(StatusFacts(attached=True, stage=1, away="this machine slept"), 0.0)
    assert "slept" not in held.sentence
