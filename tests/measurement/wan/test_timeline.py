"""Where the seconds of a step went, from what volunteers wrote down."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.wan.timeline.account import (
    KINDS,
    Event,
    account,
    gaps,
    machine_account,
    travels,
)


def compute(what: str, step: int, microbatch: int, end: float, seconds: float) -> Event:
    return Event(what, 0, step, microbatch, end - seconds - 0.01, end, seconds)


def close(step: int, told: float, averaged: float, applying: float, applied: float) -> list[Event]:
    return [
        Event("prepare", 0, step, -1, told, told + 0.01, 0.0),
        Event("norm", 0, step, -1, averaged - 0.01, averaged, 0.0),
        Event("apply", 0, step, -1, applying, applied, 0.0),
    ]


STEP = [
    *close(1, 9.0, 9.2, 9.5, 10.0),
    compute("forward", 2, 0, 12.0, 1.0),
    compute("forward", 2, 1, 13.0, 1.0),
    compute("backward", 2, 0, 15.0, 1.5),
    compute("backward", 2, 1, 17.0, 1.5),
    *close(2, 18.0, 18.5, 19.5, 20.0),
]
"""From 10 to 20: nothing until 11, then with two pauses of half a second until 17."""


def test_every_second_of_a_step_is_accounted_for() -> None:
    seconds = account(STEP, 2)
    assert seconds == pytest.approx(
        {
            "computing": 5.0, "filling": 1.0, "between": 1.0, "draining": 1.0,
            "averaging": 0.5, "deciding": 1.0, "applying": 0.5,
        }
    )  # fmt: skip
    assert sum(seconds.values()) == pytest.approx(10.0)


def test_work_on_the_next_step_fills_a_close() -> None:
    ahead = [compute("forward", 3, 0, 19.0, 1.2)]
    seconds = account([*STEP, *ahead], 2)
    assert seconds["computing"] == pytest.approx(6.2)
    assert seconds["draining"] == pytest.approx(0.8)
    assert seconds["averaging"] == pytest.approx(0.0)
    assert sum(seconds.values()) == pytest.approx(10.0)


def test_what_was_computed_before_a_step_began_is_not_counted_in_it() -> None:
    early = [compute("forward", 2, 2, 10.4, 0.9)]
    seconds = account([*STEP, *early], 2)
    assert seconds["computing"] == pytest.approx(5.4)
    assert (seconds["filling"], seconds["between"]) == pytest.approx((0.0, 1.6))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["forward", "backward"]), st.sampled_from([2, 3]),
            st.floats(9.0, 21.0), st.floats(0.0, 3.0),
        ),
        max_size=12,
    )
)  # fmt: skip
def test_whatever_was_computed_the_parts_are_the_whole_step(
    work: list[tuple[str, int, float, float]],
) -> None:
    ends = [*close(1, 9.0, 9.2, 9.5, 10.0), *close(2, 18.0, 18.5, 19.5, 20.0)]
    events = [compute(what, step, i, end, took) for i, (what, step, end, took) in enumerate(work)]
    seconds = account([*ends, *events], 2)
    assert sum(seconds.values()) == pytest.approx(10.0)
    assert min(seconds.values()) >= 0.0
    assert machine_account([*ends, *events], [2]) == {kind: seconds[kind] for kind in KINDS}


def test_gaps_are_what_the_spans_leave() -> None:
    assert gaps([(1.0, 2.0), (3.0, 5.0)], 0.0, 5.0) == [(0.0, 1.0), (2.0, 3.0)]
    assert gaps([], 1.0, 2.0) == [(1.0, 2.0)]


def test_a_tensor_is_under_way_from_one_machine_s_hands_to_the_next_one_s() -> None:
    sender = [
        Event("send", 1, 2, 0, 10.0, 14.0, 0.0),
        Event("send", 1, 2, 1, 11.0, 16.0, 0.0),
        Event("send", 1, 9, 1, 11.0, 16.0, 0.0),
        Event("apply", 0, 2, -1, 20.0, 20.1, 0.0),
    ]
    last = [
        Event("forward", 1, 2, 0, 10.25, 13.5, 1.0),
        Event("forward", 1, 2, 1, 11.5, 15.0, 1.0),
        Event("apply", 1, 2, -1, 20.0, 20.1, 0.0),
    ]
    found = travels([sender, last], 0, [2])
    assert sorted(found.activation) == pytest.approx([0.25, 0.5])
    assert sorted(found.gradient) == pytest.approx([0.5, 1.0])
