"""Which machines are alike, as agreements to the bit have shown."""

from __future__ import annotations

import pytest

from swarm_coordinator.core.trust import arithmetic_classes
from swarm_coordinator.core.trust.arithmetic_classes import (
    AGREED_CELLS,
    DEVIATION_SECONDS,
    ArithmeticClasses,
    Machine,
    groups,
    restored_classes,
)
from swarm_shared.base.types import PeerId, StageIndex


def machine(name: str, stage: int = 0, device: str = "cpu") -> Machine:
    return Machine(StageIndex(stage), PeerId(name), device)


A, B, C = machine("a"), machine("b"), machine("c")


def agree(
    known: ArithmeticClasses, one: Machine, other: Machine, cells: int = AGREED_CELLS
) -> None:
    for _ in range(cells):
        known.note_agreement(one, other)


def test_two_machines_are_alike_once_they_have_agreed_in_several_cells() -> None:
    known = ArithmeticClasses()
    agree(known, A, B, AGREED_CELLS - 1)
    assert not known.alike(A, B)
    assert known.has_agreed(B, A)
    known.note_agreement(B, A)
    assert known.alike(A, B)
    assert known.alike(B, A)


def test_chance_agreements_of_unlike_machines_do_not_add_up() -> None:
    known = ArithmeticClasses()
    for _ in range(3):
        agree(known, A, B, AGREED_CELLS - 1)
        known.note_difference(B, A)
    assert not known.alike(A, B)


def test_likeness_does_not_carry_over_from_one_pair_to_the_next() -> None:
    """Otherwise one that computes like both could make two unlike honest machines seem alike."""
    known = ArithmeticClasses()
    agree(known, A, B)
    agree(known, B, C)
    assert not known.alike(A, C)


@pytest.mark.parametrize("other", [machine("a", stage=1), machine("a", device="cuda")])
def test_another_stage_or_device_is_another_machine(other: Machine) -> None:
    known = ArithmeticClasses()
    agree(known, A, B)
    assert not known.alike(other, B)


def test_what_has_changed_is_stored_and_restored_and_what_is_forgotten_with_it() -> None:
    known = ArithmeticClasses()
    agree(known, B, A)
    agree(known, A, C, 2)
    stored = known.take_changed()
    assert not known.take_changed()
    assert restored_classes(stored).cells == known.cells
    known.forget(PeerId("b"))
    assert not known.alike(A, B)
    (gone,) = known.take_changed()
    assert (gone.peer, gone.other, gone.cells) == ("a", "b", 0)


def test_pairs_without_end_are_bounded_and_those_that_agreed_in_most_cells_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arithmetic_classes, "MAX_PAIRS", 16)
    known = ArithmeticClasses()
    agree(known, A, B)
    for number in range(100):
        known.note_agreement(A, machine(f"x{number}"))
        assert len(known.cells) <= 16
    assert known.alike(A, B)
    assert {r.cells for r in known.take_changed() if r.other.startswith("x")} == {0, 1}


def test_an_owner_deviates_again_only_within_half_a_day() -> None:
    known = ArithmeticClasses()
    assert not known.deviates_again(PeerId("a"), 100.0)
    assert not known.deviates_again(PeerId("b"), 100.0)
    assert known.deviates_again(PeerId("a"), 100.0 + DEVIATION_SECONDS)
    assert not known.deviates_again(PeerId("b"), 101.0 + DEVIATION_SECONDS)
    assert set(known.deviated_at) == {"a", "b"}
    assert not known.deviates_again(PeerId("c"), 1e6)
    assert set(known.deviated_at) == {"c"}


def test_groups_are_shown_by_stage_with_every_machine_that_is_alike_to_one_of_them() -> None:
    known = ArithmeticClasses()
    lone = machine("d")
    agree(known, A, B)
    agree(known, C, B)
    agree(known, lone, A, AGREED_CELLS - 1)
    agree(known, machine("a", 1), machine("d", 1))
    assert groups(known.take_changed()) == [[A, B, C], [machine("a", 1), machine("d", 1)]]
