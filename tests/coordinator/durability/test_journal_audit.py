"""What a database's own checks do not see: rows that say something else than was written."""

from __future__ import annotations

import base64
import sqlite3
from pathlib import Path

import pytest

from kits.coordinator.run import MICROBATCHES, STAGES, one_start_at, step, write
from swarm_coordinator.core.events import (
    CheckpointRecord,
    EvaluationRecord,
    RolledBack,
    RunFinished,
    StoredStage,
)
from swarm_coordinator.durability.journal_audit import StepShape, check_database
from swarm_coordinator.storage.records import PeerSeen
from swarm_coordinator.storage.sqlite import check_pages, open_for_writing
from swarm_coordinator.storage.store import SqliteStore
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.identity.credentials import sign_owner_binding
from swarm_shared.identity.keys import Identity

SHAPE = StepShape(STAGES, MICROBATCHES)


def checkpoint(version: int) -> CheckpointRecord:
    return CheckpointRecord(
        Version(version), (StoredStage(StageIndex(0), f"checkpoint/{version}/0", 10, "ab" * 32),)
    )


def a_past(path: Path) -> sqlite3.Connection:
    """Three starts, a roll-back in the middle, and an end."""
    for records in (
        (step(1), step(2), checkpoint(2), step(3), step(4)),
        (RolledBack(Version(2), "every peer of stage 1 is gone"), step(3, 9, loss=float("nan"))),
        (
            step(4, 10, attempts=(10, 9)),
            checkpoint(4),
            EvaluationRecord(Version(4), 1.5, 10),
            EvaluationRecord(Version(4), 1.5, 10, "def f():"),
            RunFinished(Version(4)),
        ),
    ):
        one_start_at(path, *records)
    return sqlite3.connect(path, isolation_level=None)


def test_a_database_that_nobody_touched_is_found_whole(tmp_path: Path) -> None:
    connection = a_past(tmp_path / "run.sqlite3")
    assert check_pages(tmp_path / "run.sqlite3") == []
    assert check_database(connection, SHAPE) == []
    for newest in (0, 1, 5, 100):
        assert check_database(connection, SHAPE, newest) == []
    connection.close()


def test_an_empty_database_and_one_that_began_from_a_checkpoint_are_whole(tmp_path: Path) -> None:
    connection = open_for_writing(tmp_path / "empty.sqlite3")
    assert check_database(connection, SHAPE) == []
    connection.close()
    store = SqliteStore.open(tmp_path / "run.sqlite3")
    store.next_generation(above=10_000)
    write(store, checkpoint(7), RolledBack(Version(7), "the database is new"), step(8), step(9))
    store.close()
    connection = sqlite3.connect(tmp_path / "run.sqlite3")
    assert check_database(connection, SHAPE) == []
    connection.close()


DAMAGES: dict[str, tuple[str, str]] = {
    "a loss is another": (
        "UPDATE applied_steps SET loss = 9.9 WHERE step = 1", "row 1 is not what was written"
    ),
    "a norm lost its last bit": (
        "UPDATE applied_steps SET global_norm = global_norm * (1 + 3e-16) WHERE step = 2",
        "row 2 is not what was written",
    ),
    "a share has other tokens": (
        "UPDATE shares SET tokens = 17 WHERE applied_step = 6 AND peer = 1",
        "table applied_steps: row 6 is not what was written",
    ),
    "a stage has averaged in another attempt": (
        "UPDATE step_attempts SET attempt = 8 WHERE applied_step = 6 AND stage = 1",
        "table applied_steps: row 6 is not what was written",
    ),
    "a stage's attempt is gone": (
        "DELETE FROM step_attempts WHERE applied_step = 6",
        "table applied_steps: row 6 is not what was written",
    ),
    "a microbatch counts twice": (
        "UPDATE shares SET microbatches = 2 WHERE applied_step = 1 AND peer = 1 AND stage = 0",
        "step 1 counts 3 microbatches in stage 0, and every step has 2",
    ),
    "a stage of a step is gone": (
        "DELETE FROM shares WHERE applied_step = 5 AND stage = 1",
        "step 3 counts 0 microbatches in stage 1",
    ),
    "a step is gone": (
        "DELETE FROM shares WHERE applied_step = 2; DELETE FROM applied_steps WHERE id = 2",
        "1 step(s) between 1 and 4 are missing",
    ),
    "the first step is gone": (
        "DELETE FROM shares WHERE applied_step = 1; DELETE FROM applied_steps WHERE id = 1",
        "the steps before 2 are missing",
    ),
    "the last step is gone": (
        "DELETE FROM shares WHERE applied_step = 6; DELETE FROM applied_steps WHERE id = 6",
        "row 6 is missing",
    ),
    "a roll-back is taken back": (
        "UPDATE applied_steps SET superseded_by = 1 WHERE id = 5; "
        "UPDATE applied_steps SET superseded_by = NULL WHERE id = 3",
        "step 3 counts as it was before a roll-back",
    ),
    "a step is taken out": (
        "UPDATE applied_steps SET superseded_by = 1 WHERE id = 6",
        "step 4 does not count, and no roll-back took it out",
    ),
    "a checkpoint has another hash": (
        "UPDATE checkpoint_stages SET sha256 = 'cd' WHERE checkpoint = 2",
        "table checkpoints: row 2 is not what was written",
    ),
    "an evaluation is another": (
        "UPDATE evaluations SET heldout_loss = 1.4", "table evaluations: row 1 is not"
    ),
    "a text of the model is another": (
        "UPDATE evaluations SET sample = 'def g():' WHERE id = 2", "table evaluations: row 2 is not"
    ),
    "a step that nobody wrote": (
        "INSERT INTO applied_steps SELECT 99, 5, 11, loss, tokens, seconds, global_norm, "
        "learning_rate, generation, written_at, NULL FROM applied_steps WHERE id = 6",
        "row 99 has an unknown origin",
    ),
    "an entry of the journal is gone": (
        "DELETE FROM journal WHERE sequence = 4", "1 entries before"
    ),
    "the journal's end is gone": (
        "DELETE FROM journal WHERE sequence > 9", "has an unknown origin"
    ),
    "the journal is gone": ("DELETE FROM journal", "its beginning is missing"),
    "an entry of the journal is another's": (
        "UPDATE journal SET digest = (SELECT digest FROM journal WHERE sequence = 3) "
        "WHERE sequence = 2",
        "is not what was written",
    ),
    "a start is invented": (
        "INSERT INTO generations VALUES (7, 1.0)", "the last is 7, the journal's is 3"
    ),
    "a start is forgotten": (
        "UPDATE applied_steps SET generation = 2 WHERE generation = 3; "
        "UPDATE checkpoints SET generation = 2 WHERE generation = 3; "
        "DELETE FROM generations WHERE generation = 3",
        "the last is 2, the journal's is 3",
    ),
}  # fmt: skip


def test_whose_device_a_peer_is_follows_from_a_signature_alone(tmp_path: Path) -> None:
    owner, device, other = (Identity.generate() for _ in range(3))
    binding = base64.b64encode(sign_owner_binding(owner, device.peer_id)).decode()
    a_past(tmp_path / "run.sqlite3").close()
    store = SqliteStore.open(tmp_path / "run.sqlite3")
    write(
        store, PeerSeen(device.peer_id, None, None, binding), PeerSeen(other.peer_id, "o", "", "")
    )
    store.close()
    connection = sqlite3.connect(tmp_path / "run.sqlite3", isolation_level=None)
    assert check_database(connection, SHAPE) == []
    connection.execute("UPDATE owners SET owner = ? WHERE owner <> ''", (other.peer_id,))
    [finding] = check_database(connection, SHAPE)
    assert f"is bound to {owner.peer_id}, and the row names {other.peer_id}" in finding
    connection.execute("UPDATE owners SET owner = ?, binding = ?", (owner.peer_id, binding))
    [finding] = check_database(connection, SHAPE)
    assert f"{other.peer_id} shows the owner binding of {device.peer_id}" in finding
    connection.close()


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_row_that_was_changed_lost_or_invented_is_named(tmp_path: Path, damage: str) -> None:
    connection = a_past(tmp_path / "run.sqlite3")
    statement, expected = DAMAGES[damage]
    before = connection.total_changes
    connection.executescript(statement)
    assert connection.total_changes > before, "nothing was damaged"
    findings = check_database(connection, SHAPE)
    connection.close()
    assert any(expected in finding for finding in findings), findings


def test_a_thousand_wrong_rows_are_not_a_thousand_lines(tmp_path: Path) -> None:
    one_start_at(tmp_path / "run.sqlite3", *(step(number) for number in range(1, 200)))
    connection = sqlite3.connect(tmp_path / "run.sqlite3")
    connection.execute("UPDATE applied_steps SET loss = 1.0")
    findings = check_database(connection, SHAPE)
    connection.close()
    assert len(findings) == 21
    assert findings[-1] == "and more"


def test_a_start_reads_only_the_last_decisions_again(tmp_path: Path) -> None:
    connection = a_past(tmp_path / "run.sqlite3")
    connection.execute("UPDATE applied_steps SET loss = 9.0 WHERE id = 1")
    assert check_database(connection, SHAPE, newest=5) == []
    assert check_database(connection, SHAPE, newest=100) != []
    connection.execute("UPDATE applied_steps SET loss = 9.0 WHERE id = 6")
    assert check_database(connection, SHAPE, newest=5) != []
    connection.close()
