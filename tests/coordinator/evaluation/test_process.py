"""Which checkpoint is evaluated, and when."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from swarm_coordinator.evaluation.process import due

END = 100


def test_the_newest_checkpoint_is_due_every_so_many_steps_and_at_the_end() -> None:
    assert due([], 0, 10, END) is None
    assert due([9, 5], 0, 10, END) is None
    assert due([12, 9], 0, 10, END) == 12
    assert due([21, 12], 12, 10, END) is None
    assert due([24, 21], 12, 10, END) == 24
    assert due([END, 96], 96, 10, END) == END
    assert due([END, 96], END, 10, END) is None


def test_after_a_roll_back_what_is_computed_again_is_evaluated_again() -> None:
    assert due([20], 40, 10, END) is None, "it was evaluated on the way to 40"
    assert due([30, 20], 20, 10, END) == 30


@given(
    checkpoints=st.lists(st.integers(1, END), min_size=1, unique=True),
    every=st.integers(1, END),
)
def test_between_two_evaluations_are_at_least_so_many_steps_but_before_the_end(
    checkpoints: list[int], every: int
) -> None:
    evaluated: list[int] = [0]
    for count in range(1, len(checkpoints) + 1):
        there = sorted(checkpoints)[:count]
        version = due(there, evaluated[-1], every, END)
        if version is not None:
            assert version == there[-1]
            evaluated.append(version)
        else:
            assert there[-1] - evaluated[-1] < every
    distances = [b - a for a, b in itertools.pairwise(evaluated) if b != END]
    assert all(distance >= every for distance in distances)
    if END in checkpoints:
        assert evaluated[-1] == END
