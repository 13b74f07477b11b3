"""Progress of a download under a clock that the test sets."""

from __future__ import annotations

import pytest

from swarm_shared.transfer.download_meter import (
    LINE_SECONDS,
    WINDOW_SECONDS,
    DownloadMeter,
    DownloadProgress,
)

MB = 1_000_000


class Course:
    """A download of 100 MB."""

    def __init__(self) -> None:
        self.now = 50.0
        self.meter = DownloadMeter("stage 3", lambda: self.now)

    def arrives(self, after_seconds: float, received_mb: int) -> DownloadProgress:
        self.now += after_seconds
        self.meter.record(received_mb * MB, 100 * MB)
        return self.meter.progress


def test_the_rate_is_that_of_the_last_seconds_and_states_when_it_is_done() -> None:
    course = Course()
    assert str(course.arrives(0.0, 0)) == "stage 3: 0 B of 100 MB (0 %)"
    assert course.arrives(0.5, 9).bytes_per_second is None, "too short to tell"
    assert str(course.arrives(9.5, 50)) == "stage 3: 50 MB of 100 MB (50 %), 5 MB/s, 10 s left"
    for received in range(51, 61):
        slower = course.arrives(WINDOW_SECONDS / 5, received)
    assert slower.bytes_per_second == pytest.approx(0.5 * MB)


def test_what_an_earlier_attempt_left_counts_for_no_rate() -> None:
    course = Course()
    assert course.arrives(0.0, 80).received_bytes == 80 * MB
    assert course.arrives(2.0, 84).bytes_per_second == pytest.approx(2 * MB)


def test_the_rate_of_a_slow_link_is_that_of_its_last_piece_and_falls_until_the_next() -> None:
    course = Course()
    course.arrives(0.0, 0)
    course.now += WINDOW_SECONDS
    assert str(course.meter.progress) == "stage 3: 0 B of 100 MB (0 %)"
    course.arrives(WINDOW_SECONDS, 40)
    assert str(course.meter.progress) == "stage 3: 40 MB of 100 MB (40 %), 2 MB/s, 30 s left"
    course.now += 2 * WINDOW_SECONDS
    assert str(course.meter.progress) == "stage 3: 40 MB of 100 MB (40 %), 1 MB/s, 60 s left"


def test_a_download_that_begins_anew_is_measured_anew() -> None:
    course = Course()
    course.arrives(0.0, 0)
    course.arrives(2.0, 100)
    assert course.arrives(1.0, 0).bytes_per_second is None
    assert course.arrives(2.0, 10).bytes_per_second == pytest.approx(5 * MB)


def test_a_line_for_people_comes_seldom() -> None:
    course = Course()
    lines = []
    for second in range(41):
        course.arrives(1.0, second)
        lines.append(course.meter.due_line())
    assert [line for line in lines if line is not None] == [
        "downloading stage 3: 14 MB of 100 MB (14 %), 1 MB/s, 86 s left",
        "downloading stage 3: 29 MB of 100 MB (29 %), 1 MB/s, 71 s left",
    ]
    assert lines[int(LINE_SECONDS) - 1] is not None
