"""Reading a run's database for people: beside the coordinator, without it, after a crash."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path

import pytest
import trio

from swarm_coordinator.core.events import AppliedStep, StageShare
from swarm_coordinator.storage.history import HistoryStep, history, steps_document
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.sqlite import open_read_only
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.types import PeerId, StageIndex, Step


def write(path: Path, steps: int) -> None:
    store = SqliteStore.open(path, clock=lambda: 100.0)
    store.next_generation()
    store.post(PeerSeen(PeerId("anna"), "Anna's laptop"))

    async def main() -> None:
        for number in range(1, steps + 1):
            share = StageShare(PeerId("anna"), StageIndex(0), 2, 32)
            await store.write(
                AppliedStep(Step(number), 1, 3.0 / number, 32, 0.25, 1.0, 1e-3, (share,))
            )

    trio.run(main)
    store.close()


def test_the_document_has_the_form_that_reference_and_demo_write(tmp_path: Path) -> None:
    write(tmp_path / "run.sqlite3", 2)
    document = steps_document(history(tmp_path / "run.sqlite3").steps)
    assert json.loads(json.dumps(document)) == {
        "version": 1,
        "steps": [
            {"step": 1, "loss": 3.0, "tokens": 32, "seconds": 0.25},
            {"step": 2, "loss": 1.5, "tokens": 32, "seconds": 0.25},
        ],
    }


def test_a_loss_that_is_no_number_is_null_in_json() -> None:
    step = HistoryStep(Step(1), math.inf, 1, 1.0, 0.0)
    assert steps_document((step,))["steps"][0]["loss"] is None


def test_contributions_carry_the_volunteers_name(tmp_path: Path) -> None:
    write(tmp_path / "run.sqlite3", 3)
    (part,) = history(tmp_path / "run.sqlite3").contributions
    assert (part.name, part.microbatches, part.tokens) == ("Anna's laptop", 6, 96)
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
