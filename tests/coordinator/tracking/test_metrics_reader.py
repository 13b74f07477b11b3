"""What is read of a run for trackers: each record once, in the order in which it became durable."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from kits.coordinator import run as run_kit
from swarm_coordinator.core.events import EvaluationRecord, RolledBack, RunFinished
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.store import open_store
from swarm_coordinator.tracking import journal_reader
from swarm_coordinator.tracking.journal_reader import Batch, Position
from swarm_coordinator.tracking.metrics_reader import Metrics, Rollback, read_metrics
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import Version

STEPS = 4


def said(batch: Batch[Metrics | Rollback]) -> list[tuple[object, ...]]:
    return [
        ("back to", one.version) if isinstance(one, Rollback) else (one.step, *one.values)
        for one in batch.records
    ]


STEP = ("loss", "learning_rate", "tokens", "seconds", "peers")


def test_each_read_gives_what_is_new_until_the_run_has_finished(
    place: DatabaseLocation,
) -> None:
    assert read_metrics(place, Position(), STEPS).records == ()
    store = open_store(place)
    store.next_generation()
    run_kit.write(store, *(run_kit.step(number) for number in range(1, 4)))
    first = read_metrics(place, Position(), STEPS)
    assert said(first) == [(1, *STEP), (2, *STEP), (3, *STEP)]
    assert isinstance(first.records[1], Metrics)
    assert first.records[1].values == {
        "loss": 2.5, "learning_rate": 1e-3, "tokens": 32, "seconds": 0.5, "peers": 2,
    }  # fmt: skip
    assert (first.complete, first.finished) == (True, False)
    run_kit.write(
        store, RolledBack(Version(2), "all were lost"), run_kit.step(3, attempt=2), run_kit.step(4),
        EvaluationRecord(Version(4), math.nan, 64), RunFinished(Version(4)),
    )  # fmt: skip
    second = read_metrics(place, first.position, STEPS)
    assert said(second) == [("back to", 2), (3, *STEP), (4, *STEP), (4, "heldout_loss")]
    assert second.finished
    assert not read_metrics(place, second.position, STEPS + 1).finished, "its steps were raised"
    assert read_metrics(place, second.position, STEPS).records == ()
    # Who reads everything now does not see the step that the rollback removed.
    steps = [(1, *STEP), (2, *STEP), ("back to", 2), (3, *STEP), (4, *STEP)]
    assert said(read_metrics(place, Position(), STEPS))[:-1] == steps
    store.close()


def test_a_long_history_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "run.sqlite"
    run_kit.one_start_at(place, *(run_kit.step(number) for number in range(1, 8)))
    whole = read_metrics(place, Position(), STEPS)
    monkeypatch.setattr(journal_reader, "ENTRIES_PER_READ", 2)
    parts = [read_metrics(place, Position(), STEPS)]
    while not parts[-1].complete:
        parts.append(read_metrics(place, parts[-1].position, STEPS))
    assert len(parts) > 3
    assert tuple(one for part in parts for one in part.records) == whole.records
    assert parts[-1].position == whole.position


def test_a_position_of_another_history_is_refused(
    new_place: Callable[[], DatabaseLocation],
) -> None:
    positions = []
    for attempt in (1, 2):
        place = new_place()
        run_kit.one_start_at(place, run_kit.step(1, attempt))
        positions.append(read_metrics(place, Position(), STEPS).position)
    assert positions[0].sequence == positions[1].sequence
    for other in (positions[0], Position(sequence=99, digest="ab")):
        with pytest.raises(StorageError, match="another history; name another place"):
            read_metrics(place, other, STEPS)
