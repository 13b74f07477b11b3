"""The comparison of the demo's run with one process, on a small run in this process."""

from __future__ import annotations

import contextlib
import math
import sqlite3

import pytest

from kits.coordinator import run as run_kit
from swarm_coordinator.demo.churn import Kill
from swarm_coordinator.demo.reference_check import (
    COMPARED_STEPS,
    TABLE_ROWS,
    ComparedStep,
    compare_with_reference,
    remarks,
    require_equal,
    rows_shown,
    steps_to_compare,
    table_head,
    table_row,
    verdict,
)
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.storage.history import history
from swarm_shared.base.errors import SwarmError

KILL = Kill("volunteer-3", 4242, "was ended by SIGKILL", 13, "volunteer-5")


def compare(folder: RunFolder) -> list[ComparedStep]:
    shown: list[ComparedStep] = []
    manifest = load_manifest(folder)
    found = compare_with_reference(
        folder, manifest, history(folder.database), 2, 1, "cpu", shown.append
    )
    assert shown == found
    return found


def test_losses_that_one_process_has_too_are_equal_and_one_other_bit_is_an_error(
    folder: RunFolder,
) -> None:
    run_kit.one_start(folder, run_kit.step(1), run_kit.step(2))
    alone = [one.alone for one in compare(folder)]
    with contextlib.closing(sqlite3.connect(folder.database)) as connection:
        for step, loss in enumerate(alone, 1):
            connection.execute("UPDATE applied_steps SET loss = ? WHERE step = ?", (loss, step))
        connection.commit()
        require_equal(compare(folder), folder)

        wrong = math.nextafter(alone[1], math.inf)
        connection.execute("UPDATE applied_steps SET loss = ? WHERE step = 2", (wrong,))
        connection.commit()
    compared = compare(folder)
    assert [one.equal for one in compared] == [True, False]
    with pytest.raises(SwarmError) as error:
        require_equal(compared, folder)
    assert error.value.exit_code == 1
    text = str(error.value)
    assert "1 of 2 losses differ" in text
    assert f"first at step 2: {wrong!r} in the run, {alone[1]!r} alone" in text
    assert f"swarm-coordinator reference '{folder.path}'" in text


def test_a_loss_that_is_no_number_is_not_equal() -> None:
    assert not ComparedStep(1, math.nan, math.nan).equal


def test_the_table_shows_every_digit_and_marks_what_differs() -> None:
    near = ComparedStep(7, 2.5, math.nextafter(2.5, 3.0))
    assert table_row(near).split() == ["7", "2.5", "2.5000000000000004", "DIFFERENT"]
    equal = table_row(ComparedStep(7, 2.5, 2.5))
    assert equal.split() == ["7", "2.5", "2.5", "equal"]
    assert table_head().index("loss of one process") == equal.rindex("2.5")


@pytest.mark.parametrize("steps", [1, 3, 9, 10, 11, 40, 99])
def test_the_table_has_ten_steps_at_most_with_the_last_one(steps: int) -> None:
    shown = rows_shown(steps)
    assert len(shown) == min(steps, TABLE_ROWS)
    assert max(shown) == steps
    assert min(shown) >= 1


def test_the_step_of_the_newcomer_is_always_compared() -> None:
    assert steps_to_compare(5, None) == 5
    assert steps_to_compare(1000, None) == COMPARED_STEPS
    assert steps_to_compare(1000, 20) == COMPARED_STEPS
    assert steps_to_compare(1000, 77) == 77


@pytest.mark.parametrize(
    ("kill", "joined", "steps", "sentence"),
    [
        (None, None, 2, "All 2 losses are the same, to the bit."),
        (None, None, 9, "The first 2 losses are the same, to the bit."),
        (KILL, 18, 2, "killed after step 13 and volunteer-5 joined and computed from step 18 on."),
        (KILL, None, 2, "after step 13. (volunteer-5 was still starting when the run ended.)"),
        (KILL, 11, 2, "the run went back and computed step 11 and all later ones with volunteer-5"),
    ],
)
def test_the_verdict_says_in_spite_of_what(
    kill: Kill | None, joined: int | None, steps: int, sentence: str
) -> None:
    compared = [ComparedStep(1, 2.5, 2.5), ComparedStep(2, 2.0, 2.0)]
    assert sentence in verdict(compared, steps, kill, joined)


def test_the_table_names_the_kill_and_the_newcomer_before_their_steps() -> None:
    assert remarks(None, None) == {}
    assert list(remarks(KILL, None)) == [14]
    assert list(remarks(KILL, 18)) == [14, 18]
    assert "volunteer-3 is killed" in remarks(KILL, 18)[14]
    assert "volunteer-5 computes" in remarks(KILL, 18)[18]
    [(step, text)] = remarks(KILL, 11).items()
    assert (step, "goes back" in text) == (11, True)
