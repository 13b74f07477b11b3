"""What is read of a run's steps for traces: each step once, when its times are known."""

from __future__ import annotations

import pytest

from kits.coordinator import run as run_kit
from swarm_coordinator.core.events import Note, RolledBack, RunFinished
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.records import Record
from swarm_coordinator.storage.store import Store
from swarm_coordinator.tracking.journal_reader import Batch, Position
from swarm_coordinator.tracking.trace_reader import StepTrace, read_traces
from swarm_shared.base.types import Version

STEPS = 4


def read_all(place: DatabaseLocation, after: Position | None = None) -> Batch[StepTrace]:
    return read_traces(place, after or Position(), STEPS)


def test_a_step_has_what_is_recorded_of_it(place: DatabaseLocation, store: Store) -> None:
    run_kit.write(store, run_kit.step(1), run_kit.times(1))
    [trace] = read_all(place).records
    assert (trace.step, trace.attempt, trace.earlier, trace.seconds) == (1, 1, 0, 0.5)
    assert (trace.loss, trace.tokens, trace.global_norm, trace.learning_rate) == (3.0, 32, 1, 1e-3)
    assert (trace.peers, trace.stages) == (2, 2)
    assert trace.parts == run_kit.times(1).parts


def test_a_step_is_read_once_its_members_have_applied_it(
    place: DatabaseLocation, store: Store
) -> None:
    run_kit.write(store, run_kit.step(1), run_kit.times(1), run_kit.step(2))
    first = read_all(place)
    assert [one.step for one in first.records] == [1]
    assert first.complete, "there is nothing that could be read now"
    assert read_all(place, first.position) == Batch((), first.position, True, False)
    run_kit.write(store, run_kit.times(2))
    second = read_all(place, first.position)
    assert [(one.step, len(one.parts)) for one in second.records] == [(2, 7)]
    assert read_all(place, second.position).records == ()


@pytest.mark.parametrize(
    "later",
    [
        pytest.param((run_kit.step(2), run_kit.times(2)), id="another step"),
        pytest.param((RolledBack(Version(0), "all were lost"),), id="a rollback"),
        pytest.param((RunFinished(Version(1)),), id="the end of the run"),
        pytest.param((), id="another start of the coordinator"),
    ],
)
def test_a_step_whose_times_will_not_come_is_read_without_them(
    place: DatabaseLocation, store: Store, later: tuple[Record, ...]
) -> None:
    run_kit.write(store, run_kit.step(1))
    assert read_all(place).records == ()
    if later:
        run_kit.write(store, *later)
    else:
        store.next_generation()
    assert read_all(place).records[0].parts == ()


def test_events_belong_to_the_step_in_which_they_happened(
    place: DatabaseLocation, store: Store
) -> None:
    run_kit.write(
        store, Note("Anna was admitted", run_kit.ANNA), run_kit.step(1),
        Note("Bert was slow to apply step 1"), run_kit.times(1), Note("Bert is gone", run_kit.BERT),
        Note("Bert is back"), run_kit.step(2), run_kit.times(2), run_kit.step(3), run_kit.times(3),
        Note("not in a step yet"),
    )  # fmt: skip
    whole = read_all(place).records
    assert [[(event.text, event.peer) for event in trace.events] for trace in whole] == [
        [("Anna was admitted", run_kit.ANNA), ("Bert was slow to apply step 1", None)],
        [("Bert is gone", run_kit.BERT), ("Bert is back", None)],
        [],
    ]


def test_events_are_the_same_when_a_run_is_read_step_by_step(
    place: DatabaseLocation, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(1, 4):
        run_kit.write(
            store, Note(f"before {number}"), run_kit.step(number), Note(f"after {number}"),
            run_kit.times(number),
        )  # fmt: skip
    whole = read_all(place)
    assert [len(trace.events) for trace in whole.records] == [2, 2, 2]
    monkeypatch.setattr("swarm_coordinator.tracking.journal_reader.ENTRIES_PER_READ", 1)
    parts: list[StepTrace] = []
    position = Position()
    while not (batch := read_all(place, position)).complete:
        parts.extend(batch.records)
        position = batch.position
    assert tuple(parts) == whole.records


def test_a_step_that_was_given_up_is_read_and_its_repetition_is_known(
    place: DatabaseLocation, store: Store
) -> None:
    run_kit.write(
        store, run_kit.step(1), run_kit.times(1), run_kit.step(2), run_kit.times(2),
        RolledBack(Version(1), "all were lost"), run_kit.step(2, attempt=2), run_kit.times(2),
    )  # fmt: skip
    found = read_all(place).records
    assert [(one.step, one.attempt, one.earlier) for one in found] == [
        (1, 1, 0), (2, 1, 0), (2, 2, 1),
    ]  # fmt: skip
    assert all(one.parts for one in found), "times are of the row that they were written for"
