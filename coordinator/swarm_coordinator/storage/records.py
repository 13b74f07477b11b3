"""SQL of a run's records: inserting each kind, and rebuilding the run from the rows that count.

Owns the statements, and the numbering of generations. Connections, transactions and errors belong
to the callers: `storage.store` writes, `storage.history` reads.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from swarm_coordinator.admission.book import AdmissionRecord
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
    StageShare,
    StandingRecord,
    StandingsRecord,
    StateDigest,
    StateDigestsRecord,
    StepTimesRecord,
    StoredStage,
    VerdictRecord,
)
from swarm_coordinator.storage import journal
from swarm_coordinator.storage.admission_rows import insert_admission, write_binding
from swarm_coordinator.storage.connection import Connection
from swarm_coordinator.storage.retention import prune
from swarm_shared.base.types import MAX_EXACT_INTEGER, PeerId, Version
from swarm_shared.protocol import LinkBytes
from swarm_shared.trust.evidence import Evidence


@dataclass(frozen=True, slots=True)
class PeerSeen:
    """A peer was admitted, or its session ended."""

    peer: PeerId
    name: str | None = None
    team: str | None = None
    """The peer's team. None: unchanged; empty: the peer is in no team."""
    binding: str | None = None
    """Signed and verified binding to an owner. None: unchanged; empty: bound to no owner."""


@dataclass(frozen=True, slots=True)
class LinksReported:
    """Bytes that peers counted over their links, by reporter."""

    links: Mapping[PeerId, tuple[LinkBytes, ...]]


@dataclass(frozen=True, slots=True)
class RowsPruned:
    """The oldest rows beyond the limits of `storage.retention` are deleted."""


_ON_BRANCH_STEPS = 200
"""Number of last steps read for `on_current_history`. A peer that has the run's version but counted
in none of them fetches its state anew."""

Record = (
    AppliedStep | RolledBack | CheckpointRecord | EvaluationRecord | RunFinished
    | StandingsRecord | AgreementsRecord | HeldTimeRecord | StateDigestsRecord | StepTimesRecord
    | VerdictRecord | Note | PeerSeen | LinksReported | RowsPruned | AdmissionRecord
)  # fmt: skip


_EPOCH_UNIX_SECONDS = 1_767_225_600
"""2026-01-01 00:00 UTC."""

LARGEST_GENERATION = 2**29 - 1
"""Upper bound of generations. Numbers of attempts and leases are generation * 2**24 and must stay
below 2**53."""
_STARTS_LEFT = 2**20
"""Generations above the largest floor: a clock that is set to a later century when a backup is
restored must not use up what all later starts need."""


def generation_floor(unix_seconds: float) -> int:
    """Return a generation above every earlier one, for a run whose earlier ones are not known.

    A lost or restored database may know too few starts. A start takes longer than a second, so the
    seconds since a fixed day exceed the number of starts of any run that was never restored. They
    reach the bound in 2042.
    """
    latest = LARGEST_GENERATION - _STARTS_LEFT
    return min(latest, max(0, int(unix_seconds) - _EPOCH_UNIX_SECONDS))


def insert_generation(connection: Connection, now: float, above: int = 0) -> int:
    """Write and return the generation of this start, above all earlier ones and above `above`."""
    generation = max(read_generation(connection), above) + 1
    connection.execute(
        "INSERT INTO generations (generation, started_at) VALUES (?, ?)", (generation, now)
    )
    journal.append(connection, "start", generation, generation, None)
    return generation


def insert(connection: Connection, record: Record, generation: int, now: float) -> None:
    """Write one record and, if it belongs to the run's history, its journal entry."""
    if isinstance(record, journal.JournalRecord):
        kind, row = _insert_journaled(connection, record, generation, now)
        journal.append(connection, kind, row, generation, record)
        return
    match record:
        case StandingsRecord(standings):
            _upsert(connection, "standings", ("owner",), map(asdict, standings))
        case AgreementsRecord(agreements):
            keys = ("stage", "peer", "device", "other", "other_device")
            _upsert(connection, "agreements", keys, map(asdict, agreements))
            connection.execute("DELETE FROM agreements WHERE cells = 0")
        case HeldTimeRecord(accounts):
            rows = (_held_account_row(account, now) for account in accounts)
            _upsert(connection, "held_accounts", ("account",), rows)
        case StateDigestsRecord():
            _write_digests(connection, record)
        case StepTimesRecord(step, parts):
            connection.execute(
                "INSERT INTO step_times (applied_step, parts, written_at) "
                "SELECT id, ?, ? FROM applied_steps WHERE step = ? AND superseded_by IS NULL",
                (json.dumps(parts), now, step),
            )
        case VerdictRecord():
            values = {field.name: getattr(record, field.name) for field in fields(record)}
            del values["claim"]
            evidence = record.evidence
            values["evidence"] = None if evidence is None else evidence.model_dump_json()
            values["statements"] = " ".join(record.statements)
            _insert_row(connection, "verdicts", **values, written_at=now)
        case Note(text, peer):
            peer_row = None if peer is None else _peer_row(connection, peer, now)
            _insert_row(connection, "notes", peer=peer_row, text=text, written_at=now)
        case PeerSeen(peer, name, team, binding):
            connection.execute(
                "INSERT INTO peers (peer, name, first_seen, last_seen) VALUES (?, ?, ?, ?) "
                "ON CONFLICT (peer) DO UPDATE SET last_seen = excluded.last_seen, "
                "name = coalesce(excluded.name, peers.name)",
                (peer, name, now, now),
            )
            if team is not None:
                connection.execute(
                    "INSERT INTO teams (peer, team) VALUES (?, ?) "
                    "ON CONFLICT (peer) DO UPDATE SET team = excluded.team",
                    (_peer_row(connection, peer, now), team),
                )
            if binding is not None:
                write_binding(connection, _peer_row(connection, peer, now), peer, binding)
        case LinksReported():
            _insert_links(connection, record, now)
        case RowsPruned():
            prune(connection)
        case _:
            insert_admission(connection, record, now)


def _insert_journaled(
    connection: Connection, record: journal.JournalRecord, generation: int, now: float
) -> tuple[journal.JournalKind, int]:
    """Write a record of the run's history; return its kind and the number of its row."""
    match record:
        case AppliedStep():
            return "step", _insert_step(connection, record, generation, now)
        case RolledBack():
            return "rollback", _insert_rollback(connection, record, generation, now)
        case CheckpointRecord():
            return "checkpoint", _insert_checkpoint(connection, record, generation, now)
        case EvaluationRecord():
            values = asdict(record)
            return "evaluation", _insert_row(connection, "evaluations", **values, written_at=now)
        case RunFinished(version):
            return "finish", _insert_row(connection, "finishes", version=version, written_at=now)


def _insert_row(connection: Connection, table: str, **values: object) -> int:
    """Insert a row into a table that numbers its rows; return its number."""
    marks = ", ".join("?" * len(values))
    row = connection.execute(
        f"INSERT INTO {table} ({', '.join(values)}) VALUES ({marks}) RETURNING id",
        tuple(values.values()),
    ).fetchone()
    return int(row[0])


def _upsert(
    connection: Connection, table: str, keys: Sequence[str], rows: Iterable[Mapping[str, object]]
) -> None:
    """Insert rows, all with the same columns; those with the keys of an old row replace it."""
    written = list(rows)
    if written:
        values = [column for column in written[0] if column not in keys]
        connection.executemany(
            f"INSERT INTO {table} ({', '.join(written[0])}) "
            f"VALUES ({', '.join('?' * len(written[0]))}) ON CONFLICT ({', '.join(keys)}) "
            f"DO UPDATE SET {', '.join(f'{column} = excluded.{column}' for column in values)}",
            [tuple(row.values()) for row in written],
        )


_PEER_ROW_ID = "(SELECT id FROM peers WHERE peer = ?)"


def _insert_missing_peers(connection: Connection, peers: Iterable[PeerId], now: float) -> None:
    """Insert a row for each peer that has none."""
    connection.executemany(
        "INSERT INTO peers (peer, first_seen, last_seen) VALUES (?, ?, ?) "
        "ON CONFLICT (peer) DO NOTHING",
        [(peer, now, now) for peer in peers],
    )


def _peer_row(connection: Connection, peer: PeerId, now: float) -> int:
    _insert_missing_peers(connection, (peer,), now)
    return int(connection.execute("SELECT id FROM peers WHERE peer = ?", (peer,)).fetchone()[0])


def _insert_step(connection: Connection, record: AppliedStep, generation: int, now: float) -> int:
    row = _insert_row(
        connection, "applied_steps",
        step=record.step, attempt=record.attempt, loss=record.loss, tokens=record.tokens,
        seconds=record.seconds, global_norm=record.global_norm,
        learning_rate=record.learning_rate, generation=generation, written_at=now,
    )  # fmt: skip
    # A large run has thousands of shares: executemany prepares each statement once.
    _insert_missing_peers(connection, dict.fromkeys(share.peer for share in record.shares), now)
    connection.executemany(
        "INSERT INTO shares (applied_step, peer, stage, microbatches, tokens) "
        f"VALUES (?, {_PEER_ROW_ID}, ?, ?, ?)",
        [
            (row, share.peer, share.stage, share.microbatches, share.tokens)
            for share in record.shares
        ],
    )
    connection.executemany(
        "INSERT INTO step_attempts (applied_step, stage, attempt) VALUES (?, ?, ?)",
        [(row, stage, attempt) for stage, attempt in enumerate(record.attempts)],
    )
    return row


def _insert_rollback(
    connection: Connection, record: RolledBack, generation: int, now: float
) -> int:
    row = _insert_row(
        connection, "rollbacks",
        version=record.version, reason=record.reason, generation=generation, written_at=now,
    )  # fmt: skip
    for table, column in (
        ("applied_steps", "step"), ("checkpoints", "version"), ("evaluations", "version"),
        ("finishes", "version"),
    ):  # fmt: skip
        connection.execute(
            f"UPDATE {table} SET superseded_by = ? WHERE {column} > ? AND superseded_by IS NULL",
            (row, record.version),
        )
    connection.execute("DELETE FROM state_digests")
    return row


def _insert_checkpoint(
    connection: Connection, record: CheckpointRecord, generation: int, now: float
) -> int:
    row = _insert_row(
        connection, "checkpoints",
        version=record.version, generation=generation, written_at=now,
    )  # fmt: skip
    connection.executemany(
        "INSERT INTO checkpoint_stages (checkpoint, stage, item, bytes, sha256) "
        "VALUES (?, ?, ?, ?, ?)",
        [(row, stage.stage, stage.item, stage.bytes, stage.sha256) for stage in record.stages],
    )
    return row


def _held_account_row(account: HeldAccountRecord, now: float) -> dict[str, object]:
    return {
        "account": account.account,
        "leaks_for": account.leaks_for_seconds,
        "refused_for": account.refused_for_seconds,
        "refused_because": account.refused_because,
        "ends_with_self_test": int(account.ends_with_self_test),
        "disputes": json.dumps(dict(account.disputes)),
        "written_at": now,
        "forgotten_at": now + max(account.leaks_for_seconds, account.refused_for_seconds),
    }


def _write_digests(connection: Connection, record: StateDigestsRecord) -> None:
    connection.execute("DELETE FROM state_digests")
    connection.executemany(
        "INSERT INTO state_digests (version, stage, digest) VALUES (?, ?, ?)",
        [(record.version, stage, digest) for stage, digest in record.digests],
    )


def _insert_links(connection: Connection, record: LinksReported, now: float) -> None:
    _insert_missing_peers(connection, record.links, now)
    connection.executemany(
        "INSERT INTO links (reporter, remote, protocol, sent, received, written_at) "
        f"VALUES ({_PEER_ROW_ID}, ?, ?, ?, ?, ?) "
        "ON CONFLICT (reporter, remote, protocol) DO UPDATE SET "
        f"{_sum_of_earlier_starts('sent')}, {_sum_of_earlier_starts('received')}, "
        "sent = excluded.sent, received = excluded.received, written_at = excluded.written_at",
        [
            (reporter, link.remote, link.protocol, link.sent, link.received, now)
            for reporter, links in record.links.items()
            for link in links
        ],
    )


def _sum_of_earlier_starts(count: str) -> str:
    """SQL that adds the last count to those of earlier starts when it begins anew.

    What is beyond MAX_EXACT_INTEGER is no count, and no further one is added: a reporter that makes
    numbers up could have the sum overflow, which refuses the rows of all in its commit.
    """
    return (
        f"{count}_before = links.{count}_before + CASE WHEN excluded.{count} < links.{count} "
        f"AND links.{count}_before <= {MAX_EXACT_INTEGER} THEN links.{count} ELSE 0 END"
    )


# ---------------------------------------------------------------- reading back


def read_generation(connection: Connection) -> int:
    """Return the generation of the newest start; 0 before the first one."""
    row = connection.execute("SELECT coalesce(max(generation), 0) FROM generations").fetchone()
    return int(row[0])


def read_restored(connection: Connection) -> Restored:
    """Rebuild the run's progress from the rows that count."""
    last = _last_applied(connection)
    # A run whose database was lost continues from a checkpoint; the rollback row is then its base.
    base = connection.execute("SELECT version FROM rollbacks ORDER BY id DESC LIMIT 1").fetchone()
    version = max(last.step if last else 0, base[0] if base else 0)
    # Only of this version: a run whose steps were raised has an evaluation of its former end.
    evaluation = connection.execute(
        "SELECT heldout_loss FROM evaluations WHERE superseded_by IS NULL AND version = ? "
        "AND sample IS NULL ORDER BY id DESC LIMIT 1",
        (version,),
    ).fetchone()
    finished = connection.execute(
        "SELECT 1 FROM finishes WHERE superseded_by IS NULL AND version = ?", (version,)
    ).fetchone()
    recomputed = connection.execute(
        "SELECT coalesce(max(step), 0) FROM applied_steps WHERE superseded_by IS NOT NULL"
    ).fetchone()
    on_current_history = connection.execute(
        "SELECT DISTINCT p.peer FROM applied_steps a JOIN shares s ON s.applied_step = a.id "
        "JOIN peers p ON p.id = s.peer WHERE a.superseded_by IS NULL AND a.step > ?",
        (max(base[0], version - _ON_BRANCH_STEPS) if base else version,),
    ).fetchall()
    return Restored(
        generation=read_generation(connection),
        version=Version(version),
        last_applied=last,
        checkpoint=next(iter(read_checkpoints(connection).values()), None),
        finished=finished is not None,
        heldout_loss=float_or_nan(evaluation[0]) if evaluation else None,
        rolled_back=base is not None,
        recomputed=Version(recomputed[0]),
        on_current_history=frozenset(PeerId(peer) for (peer,) in on_current_history),
        standings=read_standings(connection),
        agreements=read_agreements(connection),
        state_digests=tuple(
            StateDigest(*row)
            for row in connection.execute(
                "SELECT stage, digest FROM state_digests WHERE version = ? ORDER BY stage, digest",
                (version,),
            )
        ),
    )


def read_newest_evaluation(connection: Connection) -> EvaluationRecord | None:
    """The organiser's newest evaluation of a checkpoint of the run's history."""
    row = connection.execute(
        "SELECT version, heldout_loss, tokens, sample FROM evaluations "
        "WHERE superseded_by IS NULL AND sample IS NOT NULL ORDER BY id DESC LIMIT 1"
    ).fetchone()
    if row is None:
        return None
    return EvaluationRecord(Version(row[0]), float_or_nan(row[1]), row[2], row[3])


def _columns(record: type[Any]) -> str:
    """Return the columns of a table whose rows are records, in the order of the record's fields."""
    return ", ".join(field.name for field in fields(record))


def read_agreements(connection: Connection) -> tuple[AgreementRecord, ...]:
    """Return the pairs of machines that have computed the same bits, in the order of their keys."""
    rows = connection.execute(
        f"SELECT {_columns(AgreementRecord)} FROM agreements "
        "ORDER BY stage, peer, device, other, other_device"
    )
    return tuple(AgreementRecord(*row) for row in rows)


def read_held_time(connection: Connection, now: float) -> tuple[HeldAccountRecord, ...]:
    """Return what is left of the held seconds of peers and owners, in the order of their keys."""
    accounts: list[HeldAccountRecord] = []
    rows = connection.execute(
        "SELECT account, leaks_for, refused_for, refused_because, ends_with_self_test, disputes, "
        "written_at FROM held_accounts ORDER BY account"
    )
    for account, leaks_for, refused_for, because, self_test, disputes, written_at in rows:
        age = max(0.0, now - written_at)
        if age < max(leaks_for, refused_for):
            disputes_left = tuple(
                (PeerId(other), seconds - age)
                for other, seconds in json.loads(disputes).items()
                if seconds > age
            )
            leaks_for, refused_for = max(0.0, leaks_for - age), max(0.0, refused_for - age)
            accounts.append(
                HeldAccountRecord(
                    PeerId(account), leaks_for, refused_for, because, disputes_left, bool(self_test)
                )
            )
    return tuple(accounts)


def read_standings(connection: Connection) -> tuple[StandingRecord, ...]:
    """Return the standings of all owners, in the order of their keys."""
    rows = connection.execute(f"SELECT {_columns(StandingRecord)} FROM standings ORDER BY owner")
    return tuple(StandingRecord(*row) for row in rows)


def read_verdicts(connection: Connection) -> tuple[VerdictRecord, ...]:
    """Return all verdicts with their evidence, the oldest first."""
    rows = connection.execute(
        "SELECT step, microbatch, stage, peer, owner, audited, reason, void_after, evidence, "
        "statements FROM verdicts ORDER BY id"
    )
    return tuple(
        replace(
            VerdictRecord(*values),
            evidence=None if evidence is None else Evidence.model_validate_json(evidence),
            statements=tuple(statements.split()),
        )
        for *values, evidence, statements in rows
    )


def read_checkpoints(connection: Connection) -> dict[Version, CheckpointRecord]:
    """Return the checkpoints of the run's history, the newest first, the last record per
    version."""
    rows = connection.execute(
        "SELECT version, max(id) FROM checkpoints WHERE superseded_by IS NULL "
        "GROUP BY version ORDER BY version DESC"
    ).fetchall()
    return {
        version: CheckpointRecord(version, read_stored_stages(connection, row))
        for version, row in rows
    }


def read_stored_stages(connection: Connection, checkpoint: int) -> tuple[StoredStage, ...]:
    """Return the stages of the checkpoint with this row."""
    rows = connection.execute(
        f"SELECT {_columns(StoredStage)} FROM checkpoint_stages WHERE checkpoint = ? "
        "ORDER BY stage",
        (checkpoint,),
    )
    return tuple(StoredStage(*row) for row in rows)


def _last_applied(connection: Connection) -> AppliedStep | None:
    row = connection.execute(
        "SELECT id FROM applied_steps WHERE superseded_by IS NULL ORDER BY step DESC LIMIT 1"
    ).fetchone()
    return None if row is None else read_step(connection, row[0])


def read_step(connection: Connection, row_id: int) -> AppliedStep | None:
    """Return one applied step, whether it counts or was rolled back; None if there is no such
    row."""
    row = connection.execute(
        "SELECT step, attempt, loss, tokens, seconds, global_norm, learning_rate "
        "FROM applied_steps WHERE id = ?",
        (row_id,),
    ).fetchone()
    if row is None:
        return None
    shares = connection.execute(
        "SELECT p.peer, s.stage, s.microbatches, s.tokens FROM shares s "
        "JOIN peers p ON p.id = s.peer WHERE s.applied_step = ? ORDER BY s.stage, s.peer",
        (row_id,),
    ).fetchall()
    attempts = connection.execute(
        "SELECT attempt FROM step_attempts WHERE applied_step = ? ORDER BY stage", (row_id,)
    ).fetchall()
    step, attempt, loss, tokens, seconds, global_norm, learning_rate = row
    return AppliedStep(
        step=step,
        attempt=attempt,
        loss=float_or_nan(loss),
        tokens=tokens,
        seconds=seconds,
        global_norm=float_or_nan(global_norm),
        learning_rate=learning_rate,
        shares=tuple(StageShare(*share) for share in shares),
        attempts=tuple(attempt for (attempt,) in attempts),
    )


def float_or_nan(value: float | None) -> float:
    """Convert NULL to NaN, which SQLite cannot store."""
    return math.nan if value is None else float(value)
