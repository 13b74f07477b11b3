"""Which checkpoint is evaluated, and when."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kits.coordinator import run as run_kit
from kits.coordinator.shell_world import make_run
from kits.runs.stage_files import put_model
from swarm_coordinator.core.events import EvaluationRecord, RolledBack
from swarm_coordinator.evaluation import process
from swarm_coordinator.evaluation.process import Evaluator, due
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_coordinator.status.document import Evaluation
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import Version

END = 100
STEPS = 40


def test_the_newest_checkpoint_is_due_every_so_many_steps_and_at_the_end() -> None:
    assert not due(9, 0, 10, END)
    assert due(12, 0, 10, END)
    assert not due(21, 12, 10, END)
    assert due(24, 12, 10, END)
    assert due(END, 96, 10, END)
    assert not due(END, END, 10, END)


@given(
    checkpoints=st.lists(st.integers(1, END), min_size=1, unique=True).map(sorted),
    every=st.integers(1, END),
)
def test_between_two_evaluations_are_at_least_so_many_steps_but_before_the_end(
    checkpoints: list[int], every: int
) -> None:
    evaluated = [0]
    for newest in checkpoints:
        if due(newest, evaluated[-1], every, END):
            assert newest == END or newest - evaluated[-1] >= every
            evaluated.append(newest)
        else:
            assert newest - evaluated[-1] < every
    assert (END in checkpoints) == (evaluated[-1] == END)


# ---------------------------------------------------------------- a run folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return make_run(tmp_path / "run", STEPS, evaluation__every_steps=10)


def stored(found: Evaluation | None) -> EvaluationRecord:
    """What the coordinator makes of a result."""
    assert found is not None
    assert found.heldout_loss is not None
    version = Version(found.version)
    return EvaluationRecord(version, found.heldout_loss, found.tokens, found.sample)


def test_each_checkpoint_is_evaluated_once_and_by_no_second_process_again(
    folder: RunFolder,
) -> None:
    evaluator = Evaluator(folder)
    assert evaluator.next() is None, "there is no database yet"
    run_kit.one_start(folder, put_model(folder, 10, 0.05))
    first = stored(evaluator.next())
    assert (first.version, math.isfinite(first.heldout_loss)) == (10, True)
    assert first.sample
    assert evaluator.next() is None
    run_kit.one_start(folder, first)
    assert Evaluator(folder).next() is None


def test_what_is_computed_again_after_a_roll_back_is_evaluated_again(folder: RunFolder) -> None:
    evaluator = Evaluator(folder)
    losses = {}
    for version in (10, 20, 30):
        run_kit.one_start(folder, put_model(folder, version, 0.01 * version))
        found = stored(evaluator.next())
        run_kit.one_start(folder, found)
        losses[version] = found.heldout_loss
    run_kit.one_start(folder, RolledBack(Version(10), "an owner lost an audit"))
    # The folder still has the checkpoints of the steps that do not count any more.
    assert evaluator.next() is None
    assert Evaluator(folder).next() is None
    run_kit.one_start(folder, put_model(folder, 20, 0.5))
    again = stored(evaluator.next())
    assert again.version == 20
    assert again.heldout_loss != losses[20]


def test_a_checkpoint_that_is_left_during_its_evaluation_has_no_result(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_kit.one_start(folder, put_model(folder, 10, 0.05), put_model(folder, 20, 0.05))
    evaluate = process.heldout_loss

    def and_roll_back(*arguments: object) -> object:
        found = evaluate(*arguments)
        run_kit.one_start(folder, RolledBack(Version(10), "a stage was lost"))
        return found

    monkeypatch.setattr(process, "heldout_loss", and_roll_back)
    assert Evaluator(folder).next() is None


def test_a_checkpoint_that_is_deleted_is_passed_over_and_a_damaged_one_is_not(
    folder: RunFolder,
) -> None:
    run_kit.one_start(folder, put_model(folder, 10, 0.05))
    checkpoints = run_kit.checkpoints_of(folder)
    (damaged, _) = checkpoints.stage_files(10)
    damaged.write_bytes(b"")
    with pytest.raises(StorageError, match="cannot be read as a stage's state"):
        Evaluator(folder).next()
    checkpoints.set_aside(10)
    assert Evaluator(folder).next() is None
