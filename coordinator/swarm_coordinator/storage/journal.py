"""The journal: the order of a run's durable records, and a digest of each.

Owns the table `journal`: one row per start, step, rollback, checkpoint, evaluation and finish, in
the order in which they became durable. Each digest covers the previous one and the record's
content, so that `durability.journal_audit` finds a row that was changed, lost or invented after it
was written, which a database's own checks do not (SQLite has no checksums of its pages).

The journal is no protection against the organiser, who has the database and could rewrite all of
it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Literal

from swarm_coordinator.core.events import (
    AppliedStep,
    CheckpointRecord,
    EvaluationRecord,
    RolledBack,
    RunFinished,
)
from swarm_coordinator.storage.connection import Connection

JournalKind = Literal["begun", "start", "step", "rollback", "checkpoint", "evaluation", "finish"]
JournalRecord = AppliedStep | RolledBack | CheckpointRecord | EvaluationRecord | RunFinished


def append(
    connection: Connection,
    kind: JournalKind,
    row_id: int,
    generation: int,
    record: JournalRecord | None,
) -> None:
    """Write the journal's next row, in the transaction that writes the record itself."""
    sequence, before = connection.execute(
        "SELECT sequence, digest FROM journal ORDER BY sequence DESC LIMIT 1"
    ).fetchone()
    connection.execute(
        "INSERT INTO journal (sequence, kind, row_id, generation, digest) VALUES (?, ?, ?, ?, ?)",
        (
            sequence + 1,
            kind,
            row_id,
            generation,
            digest(before, kind, row_id, generation, record),
        ),
    )


def digest(
    before: str, kind: str, row_id: int, generation: int, record: JournalRecord | None
) -> str:
    """Return the digest of one row. Numbers are written exactly, and alike for both databases."""
    sha256 = hashlib.sha256()
    for part in (before, kind, str(row_id), str(generation), *_content(record)):
        content = part.encode("utf-8", "surrogatepass")
        sha256.update(len(content).to_bytes(8, "big"))
        sha256.update(content)
    return sha256.hexdigest()


def _content(record: JournalRecord | None) -> Iterator[str]:
    match record:
        case None:
            return
        case AppliedStep():
            yield from (str(record.step), str(record.attempt), str(record.tokens))
            yield from map(
                _exact,
                (record.loss, record.seconds, record.global_norm, record.learning_rate),
            )
            for share in sorted(record.shares, key=lambda share: (share.stage, share.peer)):
                yield f"{share.stage} {share.peer} {share.microbatches} {share.tokens}"
            if record.attempts:
                yield f"attempts {record.attempts}"
        case CheckpointRecord(version, stages):
            yield str(version)
            for stage in sorted(stages, key=lambda stage: stage.stage):
                yield f"{stage.stage} {stage.bytes} {stage.sha256} {stage.item}"
        case RolledBack(version, reason):
            yield from (str(version), reason)
        case EvaluationRecord(version, heldout_loss, tokens, sample):
            yield from (str(version), _exact(heldout_loss), str(tokens))
            if sample is not None:
                yield sample
        case RunFinished(version):
            yield str(version)


def _exact(number: float) -> str:
    # A loss that happens to be an integer is read back as a float.
    return repr(float(number))
