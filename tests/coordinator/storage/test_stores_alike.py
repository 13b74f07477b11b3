"""What every store does, whatever is behind it: durable when it says so, append-only."""

from __future__ import annotations

from dataclasses import replace

import pytest
import trio

from kits.coordinator.run import ANNA, BERT, one_start_at, step
from kits.peer_names import named
from swarm_coordinator.core.events import (
    AgreementRecord,
    AgreementsRecord,
    AppliedStep,
    CheckpointRecord,
    EvaluationRecord,
    HeldAccountRecord,
    HeldTimeRecord,
    Note,
    Restored,
    RolledBack,
    RunFinished,
    StateDigest,
    StateDigestsRecord,
    StoredStage,
)
from swarm_coordinator.storage.connection import DatabaseLocation
from swarm_coordinator.storage.database import open_for_reading
from swarm_coordinator.storage.history import history, steps_document
from swarm_coordinator.storage.records import (
    LinksReported,
    PeerSeen,
    read_newest_evaluation,
    read_restored,
)
from swarm_coordinator.storage.store import Store, open_store
from swarm_shared.base.errors import StorageError
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.protocol import LinkBytes


def restored(place: DatabaseLocation) -> Restored:
    """What another start of the coordinator finds."""
    store = open_store(place)
    found = store.restore()
    store.close()
    return found


def checkpoint(version: int) -> CheckpointRecord:
    name = f"checkpoints/step-{version:08d}/stage-0.safetensors"
    return CheckpointRecord(Version(version), (StoredStage(StageIndex(0), name, 10, "ab" * 32),))


def test_a_new_store_begins_at_version_zero_of_generation_one(place: DatabaseLocation) -> None:
    store = open_store(place)
    assert store.next_generation() == 1
    restored = store.restore()
    store.close()
    assert (restored.generation, restored.version, restored.finished) == (1, 0, False)
    assert restored.last_applied is None
    assert restored.checkpoint is None
    assert restored.heldout_loss is None


def test_a_step_is_read_back_with_the_attempt_of_each_of_its_stages(
    place: DatabaseLocation,
) -> None:
    apart = replace(step(2), attempt=5, attempts=(5, 3))
    for written in (step(1), apart):
        one_start_at(place, written)
        assert restored(place).last_applied == written
    assert [apart.attempt_of(StageIndex(stage)) for stage in (0, 1)] == [5, 3]
    assert [step(1).attempt_of(StageIndex(stage)) for stage in (0, 1)] == [1, 1]


def test_every_start_gets_a_generation_of_its_own(place: DatabaseLocation) -> None:
    assert [one_start_at(place) for _ in range(3)] == [1, 2, 3]


def test_what_was_written_is_restored(place: DatabaseLocation) -> None:
    one_start_at(
        place, step(1), step(2), checkpoint(2), step(3, loss=1.5),
        EvaluationRecord(Version(3), 1.75, 640), RunFinished(Version(3)),
    )  # fmt: skip
    found = restored(place)
    assert found.version == 3
    assert found.last_applied == step(3, loss=1.5)
    assert found.checkpoint == checkpoint(2)
    assert found.finished
    assert found.heldout_loss == 1.75


def test_the_evaluation_of_a_former_end_is_not_that_of_a_run_whose_steps_were_raised(
    place: DatabaseLocation,
) -> None:
    one_start_at(place, step(1), EvaluationRecord(Version(1), 1.75, 640), step(2))
    assert history(place).restored.heldout_loss is None


def test_an_evaluation_by_the_organiser_is_kept_beside_that_of_the_swarm(
    place: DatabaseLocation,
) -> None:
    swarm = EvaluationRecord(Version(2), 1.75, 640)
    own = [EvaluationRecord(Version(v), 1.5 + v, 64, f"def s{v}():\n\N{SNOWMAN}") for v in (1, 2)]
    one_start_at(place, step(1), own[0], step(2), swarm, own[1])
    with open_for_reading(place) as connection:
        assert read_newest_evaluation(connection) == own[1]
        assert read_restored(connection).heldout_loss == swarm.heldout_loss
    one_start_at(place, RolledBack(Version(1), "every peer of stage 0 is gone"))
    with open_for_reading(place) as connection:
        assert read_newest_evaluation(connection) == own[0]


def test_a_rollback_supersedes_later_rows_and_deletes_none(place: DatabaseLocation) -> None:
    again = step(3, loss=1.25)
    one_start_at(
        place, step(1), step(2), checkpoint(2), step(3), checkpoint(3), RunFinished(Version(3)),
        RolledBack(Version(2), "every peer of stage 0 is gone"), again,
    )  # fmt: skip
    found = history(place)
    assert [s.loss for s in found.steps] == [s.loss for s in (step(1), step(2), again)]
    assert found.restored.checkpoint == checkpoint(2)
    assert not found.restored.finished
    assert found.restored.recomputed == 3
    with open_for_reading(place) as connection:
        assert connection.execute("SELECT count(*) FROM applied_steps").fetchone()[0] == 4


def test_after_a_rollback_those_who_counted_since_are_known_to_be_of_the_new_history(
    place: DatabaseLocation,
) -> None:
    one_start_at(place, step(1), step(2))
    assert not history(place).restored.rolled_back
    one_start_at(place, RolledBack(Version(1), "gone"))
    found = history(place).restored
    assert (found.rolled_back, found.on_current_history) == (True, frozenset())
    one_start_at(place, step(2))
    assert history(place).restored.on_current_history == {ANNA, BERT}


def test_a_rollback_without_steps_is_the_base_of_a_run_whose_database_was_lost(
    place: DatabaseLocation,
) -> None:
    one_start_at(place, checkpoint(7), RolledBack(Version(7), "the database was lost"))
    found = restored(place)
    assert (found.version, found.checkpoint) == (7, checkpoint(7))


def test_the_same_step_cannot_be_applied_twice(store: Store) -> None:

    async def main() -> None:
        await store.write(step(1))
        with pytest.raises(StorageError, match="refused a change"):
            await store.write(step(1, loss=3.0))
        await store.write(step(2))

    trio.run(main)
    assert store.restore().version == 2


def test_a_bad_record_does_not_take_down_those_that_wait_with_it(store: Store) -> None:
    outcomes: dict[str, object] = {}

    async def write(name: str, record: AppliedStep) -> None:
        try:
            await store.write(record)
            outcomes[name] = "written"
        except StorageError as error:
            outcomes[name] = error

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            for number in range(1, 20):
                nursery.start_soon(write, str(number), step(number))
            nursery.start_soon(write, "again", step(1))

    trio.run(main)
    assert len([o for o in outcomes.values() if o == "written"]) == 19
    assert len([o for o in outcomes.values() if isinstance(o, StorageError)]) == 1
    assert store.restore().version == 19


def test_a_loss_that_is_not_a_number_is_kept_as_such(place: DatabaseLocation) -> None:
    one_start_at(place, step(1, loss=float("nan")))
    found = history(place)
    assert steps_document(found.steps)["steps"] == [
        {"step": 1, "loss": None, "tokens": 32, "seconds": 0.5}
    ]


def test_posted_records_are_there_after_close(place: DatabaseLocation) -> None:
    store = open_store(place, clock=lambda: 1000.0)
    store.next_generation()
    store.post(PeerSeen(ANNA, "anna"))
    store.post(PeerSeen(ANNA))
    store.post(Note("hello", ANNA))
    store.close()
    found = history(place)
    assert found.names == {ANNA: "anna"}
    assert [(n.text, n.written_at) for n in found.notes] == [("hello", 1000.0)]
    with open_for_reading(place) as connection:
        rows = connection.execute(
            "SELECT p.peer, p.first_seen FROM notes n JOIN peers p ON p.id = n.peer"
        ).fetchall()
    assert rows == [(ANNA, 1000.0)]


def test_link_bytes_add_up_over_a_volunteers_restarts(place: DatabaseLocation) -> None:

    def seen(sent: int, received: int) -> LinksReported:
        return LinksReported(
            {ANNA: (LinkBytes(remote=BERT, protocol="/stage", sent=sent, received=received),)}
        )

    one_start_at(place, seen(100, 10), seen(250, 20), seen(30, 5))
    (link,) = history(place).links
    assert (link.reporter, link.remote, link.sent, link.received) == (ANNA, BERT, 280, 25)


def test_contributions_sum_the_live_steps(place: DatabaseLocation) -> None:
    one_start_at(place, step(1), step(2), RolledBack(Version(1), "gone"), step(2))
    found = {(c.peer, c.stage): c.microbatches for c in history(place).contributions}
    assert found == {(ANNA, 0): 2, (BERT, 0): 2, (BERT, 1): 4}


def test_history_reads_beside_a_running_writer(place: DatabaseLocation, store: Store) -> None:

    async def main() -> None:
        await store.write(step(1))
        assert len(history(place).steps) == 1
        await store.write(step(2))
        assert len(history(place).steps) == 2

    trio.run(main)
    assert len(history(place).steps) == 2


def account(name: str, seconds: float) -> HeldAccountRecord:
    return HeldAccountRecord(
        named(name), seconds, seconds / 2, "it lies", ((named("x"), 5.0), (named("y"), 95.0))
    )


def test_held_seconds_age_while_no_coordinator_runs(place: DatabaseLocation) -> None:
    """A clock that was set back prolongs nothing."""
    now = [1000.0]
    store = open_store(place, lambda: now[0])
    store.next_generation()
    for record in (account("a", 10.0), account("a", 100.0), account("b", 40.0)):
        store.post(HeldTimeRecord((record,)))
    for now[0], left in (
        (990.0, {"a": (100.0, 50.0), "b": (40.0, 20.0)}),
        (1010.0, {"a": (90.0, 40.0), "b": (30.0, 10.0)}),
        (1060.0, {"a": (40.0, 0.0)}),
        (1100.0, {}),
    ):
        found = store.restore().held_time
        ages = {o.account: (o.leaks_for_seconds, o.refused_for_seconds) for o in found}
        assert ages == {named(name): seconds for name, seconds in left.items()}
        assert {o.refused_because for o in found} <= {"it lies"}
        if now[0] == 1010.0:
            assert found[0].disputes == ((named("y"), 85.0),)
    store.close()


def test_agreements_are_restored_until_they_are_forgotten(place: DatabaseLocation) -> None:
    def agreement(other: str, cells: int, device: str = "cpu") -> AgreementRecord:
        return AgreementRecord(StageIndex(0), named("a"), device, named(other), "cpu", cells)

    one_start_at(
        place,
        AgreementsRecord((agreement("b", 1), agreement("c", 2), agreement("b", 4, "cuda"))),
        AgreementsRecord((agreement("b", 3), agreement("c", 0))),
    )
    assert restored(place).agreements == (agreement("b", 3), agreement("b", 4, "cuda"))


def test_the_digests_of_the_runs_version_are_restored(store: Store) -> None:
    def digests(version: int) -> StateDigestsRecord:
        found = ((0, f"a{version}"), (0, f"b{version}"), (1, f"c{version}"))
        return StateDigestsRecord(
            Version(version),
            tuple(StateDigest(StageIndex(stage), digest) for stage, digest in found),
        )

    for number in (1, 2):
        store.post(step(number))
        store.post(digests(number))
    assert store.restore().state_digests == digests(2).digests
    store.post(step(3))
    assert store.restore().state_digests == (), "no holder has reported those of version 3"
    store.post(digests(3))
    store.post(RolledBack(Version(3), "to where it is"))
    assert store.restore().state_digests == (), "they may be of the history that was given up"


def test_a_run_that_was_never_started_has_no_history(place: DatabaseLocation) -> None:
    with pytest.raises(StorageError, match="has not been started"):
        history(place)


def test_a_text_with_a_nul_character_keeps_no_other_row_out(place: DatabaseLocation) -> None:
    store = open_store(place)
    store.next_generation()
    links = {
        ANNA: (LinkBytes(remote=BERT, protocol="/\0", sent=1, received=2),),
        BERT: (LinkBytes(remote=ANNA, protocol="/good", sent=3, received=4),),
    }
    store.post(PeerSeen(ANNA, "anna\0"))
    store.post(LinksReported(links))
    store.close()
    with open_for_reading(place) as connection:
        names = connection.execute("SELECT peer, name FROM peers ORDER BY name").fetchall()
        protocols = connection.execute("SELECT protocol FROM links WHERE sent = 3").fetchall()
    assert {peer for peer, _ in names} == {ANNA, BERT}
    assert [name.rstrip("\0\N{REPLACEMENT CHARACTER}") for _, name in names if name] == ["anna"]
    assert [tuple(row) for row in protocols] == [("/good",)]
