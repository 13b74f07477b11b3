"""The store: durable when it says so, append-only, whole after kill -9."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from swarm_coordinator.database import migrate, open_for_writing, schema_version
from swarm_coordinator.events import (
    AppliedStep,
    CheckpointRecord,
    EvaluationRecord,
    Note,
    RolledBack,
    RunFinished,
    StageShare,
    StoredStage,
)
from swarm_coordinator.history import history, steps_document
from swarm_coordinator.records import LinksSeen, PeerSeen
from swarm_coordinator.schema import MIGRATIONS
from swarm_coordinator.store import SqliteStore
from swarm_shared.errors import StorageError, VersionError
from swarm_shared.messages import LinkBytes
from swarm_shared.types import PeerId, StageIndex, Step, Version

ANNA, BERT = PeerId("12D3KooWAnna"), PeerId("12D3KooWBert")


def step(number: int, loss: float = 2.0) -> AppliedStep:
    return AppliedStep(
        step=Step(number), attempt=1, loss=loss, tokens=64, seconds=0.5, global_norm=1.5,
        learning_rate=1e-3,
        shares=(
            StageShare(ANNA, StageIndex(0), 3, 48), StageShare(BERT, StageIndex(0), 1, 16),
            StageShare(BERT, StageIndex(1), 4, 64),
        ),
    )  # fmt: skip


def checkpoint(version: int) -> CheckpointRecord:
    name = f"checkpoints/step-{version:08d}/stage-0.safetensors"
    return CheckpointRecord(Version(version), (StoredStage(StageIndex(0), name, 10, "ab" * 32),))


def write_all(path: Path, *records: object) -> None:
    store = SqliteStore.open(path)
    store.next_generation()

    async def main() -> None:
        for record in records:
            await store.write(record)  # type: ignore[arg-type]

    trio.run(main)
    store.close()


def test_a_new_store_begins_at_version_zero_of_generation_one(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "run.sqlite3")
    assert store.next_generation() == 1
    restored = store.restore()
    store.close()
    assert (restored.generation, restored.version, restored.finished) == (1, 0, False)
    assert restored.last_applied is None
    assert restored.checkpoint is None
    assert restored.heldout_loss is None


def test_every_start_gets_a_generation_of_its_own(tmp_path: Path) -> None:
    seen = []
    for _ in range(3):
        store = SqliteStore.open(tmp_path / "run.sqlite3")
        seen.append(store.next_generation())
        store.close()
    assert seen == [1, 2, 3]


def test_what_was_written_is_restored(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(
        path, step(1), step(2), checkpoint(2), step(3, 1.5),
        EvaluationRecord(Version(3), 1.75, 640), RunFinished(Version(3)),
    )  # fmt: skip
    store = SqliteStore.open(path)
    restored = store.restore()
    store.close()
    assert restored.version == 3
    assert restored.last_applied == step(3, 1.5)
    assert restored.checkpoint == checkpoint(2)
    assert restored.finished
    assert restored.heldout_loss == 1.75


def test_the_evaluation_of_a_former_end_is_not_that_of_a_run_whose_steps_were_raised(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, step(1), EvaluationRecord(Version(1), 1.75, 640), step(2))
    assert history(path).restored.heldout_loss is None


def test_a_rollback_supersedes_later_rows_and_deletes_none(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(
        path, step(1), step(2), checkpoint(2), step(3), checkpoint(3), RunFinished(Version(3)),
        RolledBack(Version(2), "every peer of stage 0 is gone"), step(3, 1.25),
    )  # fmt: skip
    found = history(path)
    assert [(s.step, s.loss) for s in found.steps] == [(1, 2.0), (2, 2.0), (3, 1.25)]
    assert found.restored.checkpoint == checkpoint(2)
    assert not found.restored.finished
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT count(*) FROM applied_steps").fetchone()[0] == 4
    connection.close()


def test_after_a_rollback_those_who_counted_since_are_known_to_be_of_the_new_history(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, step(1), step(2))
    assert not history(path).restored.rolled_back
    write_all(path, RolledBack(Version(1), "gone"))
    found = history(path).restored
    assert (found.rolled_back, found.on_branch) == (True, frozenset())
    write_all(path, step(2))
    assert history(path).restored.on_branch == {ANNA, BERT}


def test_a_rollback_without_steps_is_the_base_of_a_run_whose_database_was_lost(
    tmp_path: Path,
) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, checkpoint(7), RolledBack(Version(7), "the database was lost"))
    restored = history(path).restored
    assert restored.version == 7
    assert restored.checkpoint == checkpoint(7)


def test_the_same_step_cannot_be_applied_twice(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "run.sqlite3")
    store.next_generation()

    async def main() -> None:
        await store.write(step(1))
        with pytest.raises(StorageError, match="refused a change"):
            await store.write(step(1, 3.0))
        await store.write(step(2))

    trio.run(main)
    assert store.restore().version == 2
    store.close()


def test_a_bad_record_does_not_take_down_those_that_wait_with_it(tmp_path: Path) -> None:
    store = SqliteStore.open(tmp_path / "run.sqlite3")
    store.next_generation()
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
    store.close()


def test_a_number_that_sqlite_cannot_hold_is_an_error_and_the_writer_lives_on(
    tmp_path: Path,
) -> None:
    store = SqliteStore.open(tmp_path / "run.sqlite3")
    store.next_generation()

    async def main() -> None:
        with pytest.raises(StorageError):
            await store.write(EvaluationRecord(Version(1), 1.0, 2**70))
        await store.write(step(1))

    trio.run(main)
    store.close()


def test_a_loss_that_is_not_a_number_is_kept_as_such(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, step(1, float("nan")))
    found = history(path)
    assert steps_document(found.steps)["steps"] == [
        {"step": 1, "loss": None, "tokens": 64, "seconds": 0.5}
    ]


def test_posted_records_are_there_after_close(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    store = SqliteStore.open(path, clock=lambda: 1000.0)
    store.next_generation()
    store.post(PeerSeen(ANNA, "anna"))
    store.post(PeerSeen(ANNA))
    store.post(Note("hello", ANNA))
    store.close()
    found = history(path)
    assert [(p.peer, p.name, p.first_seen) for p in found.peers] == [(ANNA, "anna", 1000.0)]
    assert [(n.text, n.peer, n.written_at) for n in found.notes] == [("hello", ANNA, 1000.0)]


def test_link_bytes_add_up_over_a_volunteers_restarts(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"

    def seen(sent: int, received: int) -> LinksSeen:
        return LinksSeen(
            ANNA, (LinkBytes(remote=BERT, protocol="/stage", sent=sent, received=received),)
        )

    write_all(path, seen(100, 10), seen(250, 20), seen(30, 5))
    (link,) = history(path).links
    assert (link.reporter, link.remote, link.sent, link.received) == (ANNA, BERT, 280, 25)


def test_contributions_sum_the_live_steps(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, step(1), step(2), RolledBack(Version(1), "gone"), step(2))
    found = {(c.peer, c.stage): (c.steps, c.microbatches) for c in history(path).contributions}
    assert found == {(ANNA, 0): (2, 6), (BERT, 0): (2, 2), (BERT, 1): (2, 8)}


def test_history_reads_beside_a_running_writer(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    store = SqliteStore.open(path)
    store.next_generation()

    async def main() -> None:
        await store.write(step(1))
        assert len(history(path).steps) == 1
        await store.write(step(2))
        assert len(history(path).steps) == 2

    trio.run(main)
    store.close()
    assert len(history(path).steps) == 2


def test_a_file_that_is_no_database_is_named_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    path.write_bytes(b"this is no database at all" * 100)
    with pytest.raises(StorageError, match=r"run\.sqlite3 is damaged .*swarm-coordinator verify"):
        SqliteStore.open(path)
    with pytest.raises(StorageError, match="is damaged"):
        history(path)


def test_a_database_with_a_damaged_page_is_refused_at_the_start(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, *(step(number) for number in range(1, 200)))
    content = bytearray(path.read_bytes())
    assert len(content) > 5 * 4096
    content[2 * 4096 : -4096] = os.urandom(len(content) - 3 * 4096)
    path.write_bytes(content)
    with pytest.raises(StorageError, match="is damaged"):
        SqliteStore.open(path)


def test_a_database_of_a_newer_program_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    connection = sqlite3.connect(path)
    connection.execute(f"PRAGMA user_version = {len(MIGRATIONS) + 1}")
    connection.close()
    with pytest.raises(VersionError, match="update this program"):
        SqliteStore.open(path)
    with pytest.raises(VersionError):
        history(path)


def test_a_run_that_was_never_started_has_no_history(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="has not been started"):
        history(tmp_path / "run.sqlite3")


def test_a_migration_runs_once_and_keeps_what_is_there(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    write_all(path, step(1))
    connection = open_for_writing(path)
    more = (*MIGRATIONS, "ALTER TABLE peers ADD COLUMN country TEXT;")
    migrate(connection, path, more)
    migrate(connection, path, more)
    assert schema_version(connection) == len(more)
    assert connection.execute("SELECT count(*) FROM applied_steps").fetchone()[0] == 1
    connection.close()


def test_a_failing_migration_leaves_the_database_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    connection = open_for_writing(path)
    bad = (*MIGRATIONS, "CREATE TABLE more (id INTEGER); SELECT * FROM nowhere;")
    with pytest.raises(sqlite3.OperationalError):
        migrate(connection, path, bad)
    connection.close()
    connection = open_for_writing(path)
    assert schema_version(connection) == len(MIGRATIONS)
    tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master")}
    assert "more" not in tables
    connection.close()


def test_a_full_disk_is_one_sentence_and_earlier_steps_stay(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    store = SqliteStore.open(path)
    store.next_generation()
    # SQLite's own limit gives the same SQLITE_FULL as a disk without space.
    store._ask(lambda connection: connection.execute("PRAGMA max_page_count = 40").fetchall())

    written = 0

    async def write_until_it_fails() -> None:
        nonlocal written
        for number in range(1, 5000):
            await store.write(step(number))
            written = number

    with pytest.raises(StorageError, match="the disk is full"):
        trio.run(write_until_it_fails)
    store.close()
    assert written > 0
    assert history(path).restored.version == written


_WRITER = """
import sys, trio
from pathlib import Path
from swarm_coordinator.events import AppliedStep
from swarm_coordinator.store import SqliteStore
store = SqliteStore.open(Path(sys.argv[1]))
store.next_generation()
async def main():
    first = store.restore().version + 1
    for number in range(first, 10**9):
        await store.write(AppliedStep(number, 1, 2.0, 64, 0.5, 1.0, 1e-3, ()))
        print(number, flush=True)
trio.run(main)
"""


def test_nothing_acknowledged_is_lost_when_the_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "run.sqlite3"
    acknowledged = 0
    for more in (1, 40, 7):
        process = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(path)], stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        for _ in range(more):
            acknowledged = int(process.stdout.readline())
        process.send_signal(signal.SIGKILL)
        rest = process.stdout.read().split()
        process.wait()
        acknowledged = int(rest[-1]) if rest else acknowledged
        # Before any recovery by a writer: a reader must see it as well.
        found = history(path)
        assert found.restored.version >= acknowledged
        assert [s.step for s in found.steps] == list(range(1, found.restored.version + 1))
