"""The order in which a device computes what waits for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.volunteer_rules.compute_order import (
    COMPUTATIONS_BEFORE_AUDIT,
    MOST_WEIGHTS_WAITING,
    ComputeOrder,
    Part,
)

FIRST, SECOND = Step(1), Step(2)
Item = tuple[Part, int, int, int]
"""Part, step, microbatch, and place among all that came."""


def filled(*items: tuple[Part, Step]) -> ComputeOrder[Part]:
    order: ComputeOrder[Part] = ComputeOrder()
    for part, step in items:
        order.add(part, step, MicrobatchIndex(0), part)
    return order


def taken(order: ComputeOrder[Part], memory_short: bool = False) -> list[Part]:
    found = []
    while order:
        found.append(order.take(memory_short=memory_short))
    return found


def test_what_other_peers_wait_for_goes_first_and_weights_when_nothing_else_waits() -> None:
    order = filled(
        (Part.WEIGHT_GRADIENTS, FIRST), (Part.FORWARD, FIRST), (Part.INPUT_GRADIENT, FIRST)
    )
    assert taken(order) == [Part.INPUT_GRADIENT, Part.FORWARD, Part.WEIGHT_GRADIENTS]


def test_weights_go_before_a_forward_when_they_hold_the_memory_that_it_needs() -> None:
    order = filled(
        (Part.WEIGHT_GRADIENTS, FIRST), (Part.FORWARD, FIRST), (Part.INPUT_GRADIENT, FIRST)
    )
    assert taken(order, memory_short=True) == [
        Part.INPUT_GRADIENT, Part.WEIGHT_GRADIENTS, Part.FORWARD,
    ]  # fmt: skip


def test_weights_go_before_a_forward_when_many_of_them_wait() -> None:
    """Their memory stays bounded while forwards keep coming."""
    order = filled((Part.FORWARD, FIRST), *[(Part.WEIGHT_GRADIENTS, FIRST)] * MOST_WEIGHTS_WAITING)
    before = [Part.WEIGHT_GRADIENTS, Part.FORWARD]
    assert taken(order) == [*before, *[Part.WEIGHT_GRADIENTS] * (MOST_WEIGHTS_WAITING - 1)]


def test_weights_of_the_step_that_ends_go_before_a_forward_of_the_next() -> None:
    order = filled((Part.FORWARD, SECOND), (Part.WEIGHT_GRADIENTS, FIRST))
    assert taken(order) == [Part.WEIGHT_GRADIENTS, Part.FORWARD]


def test_an_audit_waits_for_a_few_computations_and_no_longer() -> None:
    few = [Part.FORWARD] * COMPUTATIONS_BEFORE_AUDIT
    order = filled(*[(Part.AUDIT, FIRST)] * 2, *[(Part.FORWARD, FIRST)] * (2 * len(few) + 1))
    assert taken(order) == [*few, Part.AUDIT, *few, Part.AUDIT, Part.FORWARD]
    assert taken(filled((Part.AUDIT, FIRST), (Part.WEIGHT_GRADIENTS, FIRST))) == [
        Part.WEIGHT_GRADIENTS, Part.AUDIT,
    ]  # fmt: skip


def test_what_is_discarded_is_never_taken() -> None:
    order = filled((Part.FORWARD, FIRST), (Part.WEIGHT_GRADIENTS, FIRST))
    assert order.discard(lambda part: part is Part.FORWARD)
    assert not order.discard(lambda part: part is Part.FORWARD)
    assert taken(order) == [Part.WEIGHT_GRADIENTS]
    with pytest.raises(IndexError):
        order.take(memory_short=False)


@given(
    st.lists(st.tuples(st.sampled_from(Part), st.integers(1, 3), st.integers(0, 9)), max_size=30),
    st.randoms(use_true_random=False),
)
def test_each_is_taken_once_and_within_a_part_the_older_step_and_then_the_lower_microbatch(
    arrivals: list[tuple[Part, int, int]], rng
) -> None:
    order: ComputeOrder[Item] = ComputeOrder()
    waiting: list[Item] = []
    found: list[Item] = []
    for place, (part, step, microbatch) in enumerate(arrivals):
        item = (part, step, microbatch, place)
        order.add(part, Step(step), MicrobatchIndex(microbatch), item)
        waiting.append(item)
        while waiting and rng.random() < 0.4:
            found.append(_take_checked(order, waiting, rng.random() < 0.5))
    while waiting:
        found.append(_take_checked(order, waiting, False))
    assert not order
    assert len(set(found)) == len(arrivals)


def _take_checked(order: ComputeOrder[Item], waiting: list[Item], memory_short: bool) -> Item:
    forwards = [item for item in waiting if item[0] is Part.FORWARD]
    assert order.next_forward() == min(forwards, key=lambda item: item[1:], default=None)
    item = order.take(memory_short=memory_short)
    alike = [other for other in waiting if other[0] is item[0]]
    assert item == min(alike, key=lambda other: other[1:])
    waiting.remove(item)
    return item
