"""Records as rows: how each is inserted, and how a run is read back from its live rows.

Owns the SQL of everything that is written, and of what a restart begins from. Connections,
transactions and errors are the callers' (`store` writes, `history` reads).
"""

from __future__ import annotations

import math
import sqlite3
from dataclasses import dataclass

from swarm_coordinator.admission_book import AdmissionRecord
from swarm_coordinator.admission_records import insert_admission
from swarm_coordinator.events import (
    AppliedStep,
    CheckpointRecord,
    EvaluationRecord,
    Note,
    Restored,
    RolledBack,
    RunFinished,
    StageShare,
    StoredStage,
)
from swarm_shared.messages import LinkBytes
from swarm_shared.types import PeerId, StageIndex, Step, Version


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A peer was let in, or its session ended."""

    peer: PeerId
    name: str | None = None


@dataclass(frozen=True, slots=True)
class LinksSeen:
    """A peer's own count of bytes over its links, as of now."""

    reporter: PeerId
    links: tuple[LinkBytes, ...]


Record = (
    AppliedStep | RolledBack | CheckpointRecord | EvaluationRecord | RunFinished
    | Note | PeerSeen | LinksSeen | AdmissionRecord
)  # fmt: skip


def insert(connection: sqlite3.Connection, record: Record, generation: int, now: float) -> None:
    match record:
        case AppliedStep():
            _insert_step(connection, record, generation, now)
        case RolledBack():
            _insert_rollback(connection, record, generation, now)
        case CheckpointRecord():
            _insert_checkpoint(connection, record, generation, now)
        case EvaluationRecord(version, heldout_loss, tokens):
            connection.execute(
                "INSERT INTO evaluations (version, heldout_loss, tokens, written_at) "
                "VALUES (?, ?, ?, ?)",
                (version, heldout_loss, tokens, now),
            )
        case RunFinished(version):
            connection.execute(
                "INSERT INTO finishes (version, written_at) VALUES (?, ?)", (version, now)
            )
        case Note(text, peer):
            row = None if peer is None else _peer_row(connection, peer, now)
            connection.execute(
                "INSERT INTO notes (peer, text, written_at) VALUES (?, ?, ?)", (row, text, now)
            )
        case PeerSeen(peer, name):
            connection.execute(
                "INSERT INTO peers (peer, name, first_seen, last_seen) VALUES (?1, ?2, ?3, ?3) "
                "ON CONFLICT (peer) DO UPDATE SET last_seen = ?3, name = coalesce(?2, name)",
                (peer, name, now),
            )
        case LinksSeen():
            _insert_links(connection, record, now)
        case _:
            insert_admission(connection, record, now)


def _peer_row(connection: sqlite3.Connection, peer: PeerId, now: float) -> int:
    connection.execute(
        "INSERT INTO peers (peer, first_seen, last_seen) VALUES (?1, ?2, ?2) "
        "ON CONFLICT (peer) DO NOTHING",
        (peer, now),
    )
    return int(connection.execute("SELECT id FROM peers WHERE peer = ?", (peer,)).fetchone()[0])


def _insert_step(
    connection: sqlite3.Connection, record: AppliedStep, generation: int, now: float
) -> None:
    cursor = connection.execute(
        "INSERT INTO applied_steps (step, attempt, loss, tokens, seconds, global_norm, "
        "learning_rate, generation, written_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
        (record.step, record.attempt, record.loss, record.tokens, record.seconds,
         record.global_norm, record.learning_rate, generation, now),
    )  # fmt: skip
    row = cursor.lastrowid
    connection.executemany(
        "INSERT INTO shares (applied_step, peer, stage, microbatches, tokens) "
        "VALUES (?, ?, ?, ?, ?)",
        [
            (row, _peer_row(connection, share.peer, now), share.stage, share.microbatches,
             share.tokens)
            for share in record.shares
        ],
    )  # fmt: skip


def _insert_rollback(
    connection: sqlite3.Connection, record: RolledBack, generation: int, now: float
) -> None:
    row = connection.execute(
        "INSERT INTO rollbacks (version, reason, generation, written_at) VALUES (?, ?, ?, ?)",
        (record.version, record.reason, generation, now),
    ).lastrowid
    for table, column in (
        ("applied_steps", "step"), ("checkpoints", "version"), ("evaluations", "version"),
        ("finishes", "version"),
    ):  # fmt: skip
        connection.execute(
            f"UPDATE {table} SET superseded_by = ? WHERE {column} > ? AND superseded_by IS NULL",
            (row, record.version),
        )


def _insert_checkpoint(
    connection: sqlite3.Connection, record: CheckpointRecord, generation: int, now: float
) -> None:
    row = connection.execute(
        "INSERT INTO checkpoints (version, generation, written_at) VALUES (?, ?, ?)",
        (record.version, generation, now),
    ).lastrowid
    connection.executemany(
        "INSERT INTO checkpoint_stages (checkpoint, stage, item, bytes, sha256) "
        "VALUES (?, ?, ?, ?, ?)",
        [(row, stage.stage, stage.item, stage.bytes, stage.sha256) for stage in record.stages],
    )


def _insert_links(connection: sqlite3.Connection, record: LinksSeen, now: float) -> None:
    reporter = _peer_row(connection, record.reporter, now)
    connection.executemany(
        "INSERT INTO links (reporter, remote, protocol, sent, received, written_at) "
        "VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (reporter, remote, protocol) DO UPDATE SET "
        "sent_before = sent_before + iif(excluded.sent < sent, sent, 0), "
        "received_before = received_before + iif(excluded.received < received, received, 0), "
        "sent = excluded.sent, received = excluded.received, written_at = excluded.written_at",
        [
            (reporter, link.remote, link.protocol, link.sent, link.received, now)
            for link in record.links
        ],
    )


# ---------------------------------------------------------------- what a restart begins from


def read_restored(connection: sqlite3.Connection) -> Restored:
    """The run as its live rows tell it; also used by commands that only read."""
    generation = connection.execute(
        "SELECT coalesce(max(generation), 0) FROM generations"
    ).fetchone()[0]
    last = _last_applied(connection)
    # A run whose database was lost goes on from a checkpoint: the rollback row is then its base.
    base = connection.execute("SELECT version FROM rollbacks ORDER BY id DESC LIMIT 1").fetchone()
    version = max(last.step if last else 0, base[0] if base else 0)
    # Of this version: a run whose steps were raised has an evaluation of its former end.
    evaluation = connection.execute(
        "SELECT heldout_loss FROM evaluations WHERE superseded_by IS NULL AND version = ? "
        "ORDER BY id DESC LIMIT 1",
        (version,),
    ).fetchone()
    finished = connection.execute(
        "SELECT 1 FROM finishes WHERE superseded_by IS NULL AND version = ?", (version,)
    ).fetchone()
    checkpoints = read_checkpoints(connection)
    return Restored(
        generation=int(generation),
        version=Version(version),
        last_applied=last,
        checkpoint=checkpoints[0] if checkpoints else None,
        finished=finished is not None,
        heldout_loss=number(evaluation[0]) if evaluation else None,
    )


def read_checkpoints(connection: sqlite3.Connection) -> list[CheckpointRecord]:
    """Checkpoints that belong to the run's history, the newest first, the last word per version."""
    found: dict[int, CheckpointRecord] = {}
    for row, version in connection.execute(
        "SELECT id, version FROM checkpoints WHERE superseded_by IS NULL "
        "ORDER BY version DESC, id DESC"
    ).fetchall():
        if version in found:
            continue
        stages = connection.execute(
            "SELECT stage, item, bytes, sha256 FROM checkpoint_stages WHERE checkpoint = ? "
            "ORDER BY stage",
            (row,),
        ).fetchall()
        found[version] = CheckpointRecord(
            Version(version), tuple(StoredStage(StageIndex(s), i, b, h) for s, i, b, h in stages)
        )
    return list(found.values())


def _last_applied(connection: sqlite3.Connection) -> AppliedStep | None:
    row = connection.execute(
        "SELECT id, step, attempt, loss, tokens, seconds, global_norm, learning_rate "
        "FROM applied_steps WHERE superseded_by IS NULL ORDER BY step DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    shares = connection.execute(
        "SELECT p.peer, s.stage, s.microbatches, s.tokens FROM shares s "
        "JOIN peers p ON p.id = s.peer WHERE s.applied_step = ? ORDER BY s.stage, s.peer",
        (row[0],),
    ).fetchall()
    _, step, attempt, loss, tokens, seconds, global_norm, learning_rate = row
    return AppliedStep(
        step=Step(step),
        attempt=attempt,
        loss=number(loss),
        tokens=tokens,
        seconds=seconds,
        global_norm=number(global_norm),
        learning_rate=learning_rate,
        shares=tuple(StageShare(PeerId(p), StageIndex(s), m, t) for p, s, m, t in shares),
    )


def number(value: float | None) -> float:
    """SQLite has no NaN: it stores NULL."""
    return math.nan if value is None else float(value)
