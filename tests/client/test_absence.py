"""That the machine slept, or the program was stopped, is noticed and told apart. No clock waits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from swarm_client.control.status_document import Word
from swarm_client.control.status_sentence import Facts, say
from swarm_client.daemon.sleep_watch import (
    LOOK_SECONDS,
    Absence,
    AbsenceWatch,
    awake_or_asleep,
    duration_text,
)


class Clocks:
    def __init__(self) -> None:
        self.awake, self.always, self.calendar = 50.0, 100.0, 1_000_000.0
        self.found: list[Absence] = []
        self.watch = AbsenceWatch(
            self.found.append, lambda: self.calendar, lambda: self.awake, lambda: self.always
        )

    def pass_(self, awake: float = LOOK_SECONDS, asleep: float = 0.0, adjusted: float = 0) -> None:
        self.awake += awake
        self.always += awake + asleep
        self.calendar += awake + asleep + adjusted
        self.watch.look()


def test_a_machine_that_slept_is_told_from_a_program_that_was_stopped() -> None:
    clocks = Clocks()
    clocks.pass_()
    clocks.pass_(asleep=720.0)
    clocks.pass_(awake=LOOK_SECONDS + 95.0)
    clocks.pass_()
    slept, stopped = clocks.found
    assert (slept.slept, slept.seconds, slept.began) == (True, 720.0, 1_000_004.0)
    assert slept.sentence == "this machine slept for 12 min"
    assert (stopped.slept, stopped.seconds) == (False, 95.0)
    assert stopped.sentence == "this program was stopped for 2 min"


def test_a_busy_machine_and_a_clock_that_is_set_are_no_absence() -> None:
    clocks = Clocks()
    clocks.pass_(awake=LOOK_SECONDS + 9.0)
    clocks.pass_(adjusted=86_400.0)
    clocks.pass_(adjusted=-86_400.0)
    assert clocks.found == []


def test_the_clock_that_goes_on_in_sleep_goes_on() -> None:
    assert awake_or_asleep() <= awake_or_asleep()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(12.4, "12 s"), (90, "2 min"), (3599, "1 h"), (3600, "1 h"), (11_100, "3 h 5 min")],
)
def test_durations_are_said_for_people(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


@pytest.mark.parametrize("facts", [Facts(), Facts(attached=True), Facts(attached=True, getting=1)])
def test_why_it_was_away_is_said_until_a_stage_is_held_again(facts: Facts) -> None:
    saying = say(replace(facts, away="this machine slept for 12 min"), 0.0)
    assert saying.word is Word.SYNCING
    assert saying.sentence.endswith("; before that, this machine slept for 12 min")
    held = say(Facts(attached=True, stage=1, away="this machine slept"), 0.0)
    assert "slept" not in held.sentence
