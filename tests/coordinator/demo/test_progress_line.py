from __future__ import annotations

import io
from collections.abc import Sequence

import pytest

from swarm_coordinator.demo.progress_line import (
    PLAIN_INTERVAL_SECONDS,
    Progress,
    ProgressDisplay,
    eta_seconds,
    progress_line,
    tokens_per_second,
)
from swarm_coordinator.storage.history import HistoryStep
from swarm_shared.base.types import Step


def steps(seconds: Sequence[float]) -> list[HistoryStep]:
    return [
        HistoryStep(Step(number), 5.0 - number / 10, 1000, duration, 0.0)
        for number, duration in enumerate(seconds, 1)
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_line_shows_step_loss_rate_peers_and_time_left() -> None:
    line = progress_line(Progress(12, steps([2.0, 2.0]), (2, 3)))
    assert line.startswith("step 2/12 [###.")
    for part in ("loss 4.800", "500 tokens/s", "peers 2+3", "ETA 20 s"):
        assert part in line


def test_before_the_first_step_the_line_says_what_is_awaited() -> None:
    line = progress_line(Progress(12, [], (), "waiting for volunteers"))
    assert "step 0/12" in line
    assert "waiting for volunteers" in line
    assert "loss" not in line
    assert "ETA" not in line


def test_one_slow_step_does_not_move_the_estimate() -> None:
    assert eta_seconds(Progress(10, steps([30.0, 1.0, 1.0, 1.0]), (1,))) == pytest.approx(6.0)


def test_throughput_is_all_tokens_over_all_seconds() -> None:
    assert tokens_per_second(steps([3.0, 1.0])) == pytest.approx(2 * 1000 / 4)
    assert tokens_per_second([]) == 0.0


def test_the_rate_forgets_the_slow_start() -> None:
    line = progress_line(Progress(20, steps([100.0] + [0.5] * 10), (1,)))
    assert " 2,000 tokens/s " in line


def test_a_terminal_sees_one_line_in_place_and_a_newline_at_the_end() -> None:
    stream = Terminal()
    with ProgressDisplay(stream, lambda: 0.0) as display:
        display.show(Progress(3, steps([1.0]), (1, 1)))
        display.show(Progress(3, steps([1.0, 1.0]), (1, 1)))
    text = stream.getvalue()
    assert text.count("\r") == 3
    assert text.count("\n") == 1
    assert text.endswith("\n")


def test_elsewhere_lines_are_plain_rare_and_never_repeated() -> None:
    stream, now = io.StringIO(), [0.0]
    with ProgressDisplay(stream, lambda: now[0]) as display:
        for number in range(1, 100):
            now[0] += 0.1
            display.show(Progress(100, steps([0.1] * number), (1, 1)))
        display.show(Progress(100, steps([0.1] * 100), (1, 1)))
        display.show(Progress(100, steps([0.1] * 100), (1, 1)))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 + 9.9 // PLAIN_INTERVAL_SECONDS
    assert lines[-1].startswith("step 100/100")
    assert "\r" not in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


def test_a_line_of_its_own_stays_above_the_progress_which_is_drawn_again() -> None:
    stream = Terminal()
    now = Progress(3, steps([1.0]), (1, 1))
    with ProgressDisplay(stream, lambda: 0.0) as display:
        display.show(now)
        display.write_line("anna was killed")
        display.show(now)
        before, after = stream.getvalue().split("\ranna was killed\x1b[K\n")
        assert before.count("step 1/3") == after.count("\rstep 1/3") == 1
    plain = io.StringIO()
    ProgressDisplay(plain, lambda: 0.0).write_line("anna was killed")
    assert plain.getvalue() == "anna was killed\n"


def test_a_display_that_was_shown_nothing_writes_nothing() -> None:
    for stream in (io.StringIO(), Terminal()):
        with ProgressDisplay(stream, lambda: 0.0):
            pass
        assert stream.getvalue() == ""
