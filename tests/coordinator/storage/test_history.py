"""Reading a run's database for people: beside the coordinator, without it, after a crash."""

from __future__ import annotations

import math
import sqlite3
from pathlib import Path

import pytest

from kits.coordinator.run import ANNA, one_start_at, step
from swarm_coordinator.storage.history import HistoryStep, history, steps_document
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.sqlite import open_read_only
from swarm_shared.base.types import Step


def write(path: Path, steps: int) -> None:
    one_start_at(path, PeerSeen(ANNA, "Anna's laptop"), *(step(n + 1) for n in range(steps)))


def test_a_loss_that_is_no_number_is_null_in_json() -> None:
    step = HistoryStep(Step(1), math.inf, 1, 1.0, 0.0)
    assert steps_document((step,))["steps"][0]["loss"] is None


def test_contributions_carry_the_volunteers_name(tmp_path: Path) -> None:
    write(tmp_path / "run.sqlite3", 3)
    (part,) = [p for p in history(tmp_path / "run.sqlite3").contributions if p.peer == ANNA]
    assert (part.name, part.steps, part.microbatches, part.tokens) == ("Anna's laptop", 3, 3, 48)
    assert (part.first_step, part.last_step) == (1, 3)


def test_reading_leaves_the_database_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write(path, 2)
    before = path.read_bytes()
    history(path)
    assert path.read_bytes() == before


def test_a_path_with_odd_characters_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a run? with #odd %20 names" / "run.sqlite3"
    path.parent.mkdir()
    write(path, 1)
    assert len(history(path).steps) == 1


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write(path, 1)
    connection = open_read_only(path)
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        connection.execute("DELETE FROM shares")
    connection.close()
