"""How long an average took, and how long it must take."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.wan.all_reduce.averaging import (
    bound_seconds,
    step_seconds,
)
from benchmarks.wan.mixes import Link
from swarm_shared.base.errors import SwarmError


def reduced(step: int, begin: float, end: float) -> list[Any]:
    return ["reduce", 0, step, -1, begin, end, 0.0]


def test_an_average_lasts_from_the_first_begin_to_the_last_end() -> None:
    other = ["forward", 0, 2, 0, 0.0, 9.0, 1.0]
    one, two = [reduced(1, 1.0, 2.0), reduced(2, 5.0, 6.0), other], [reduced(2, 5.5, 7.0)]
    assert step_seconds([one, two], 2, members=2) == pytest.approx(2.0)
    with pytest.raises(SwarmError, match="1 of 2 members"):
        step_seconds([one, two], 1, members=2)


@pytest.mark.parametrize(("members", "seconds"), [(2, 1.0), (4, 1.5)])
def test_the_bound_is_the_slower_direction_s(members: int, seconds: float) -> None:
    lines = [Link(up_mbit=8, down_mbit=80)] * members
    assert bound_seconds(1_000_000, lines) == pytest.approx(seconds)


def test_where_lines_are_unlike_the_thin_ones_send_their_vector_and_no_sums() -> None:
    lines = [Link(up_mbit=rate, down_mbit=80) for rate in (8, 80, 8, 80)]
    assert bound_seconds(1_000_000, lines) == pytest.approx(1.0)
    # What each sends beyond its vector are its sums, to two others more than with two members.
    lines = [Link(up_mbit=rate, down_mbit=80) for rate in (16, 8, 8, 8)]
    vectors = [bound_seconds(1_000_000, lines) * rate - 1 for rate in (2, 1, 1, 1)]
    assert sum(vectors) == pytest.approx(2)
