"""The tables of a run's database.

Owns the schema and its version number; opens and writes no database. The schema is written in
SQLite's dialect; `for_postgresql` translates it, so that both stores have one schema and one
version number.

Rows of the run's history are appended and never deleted; the oldest links, notes and idle peers are
(`storage.retention`). Two kinds of columns change afterwards: `superseded_by` points
from a step, checkpoint, evaluation or finish to the rollback that removed it from the run's
history, and a time ends a token, an allowance or a ban. Partial unique indices make the database
itself refuse a step that counts twice, or a second ban of the same peer.
"""

from __future__ import annotations

import re

from swarm_shared.base.errors import VersionError

SCHEMA_VERSION = 12
"""Version of the schema below; a database of another version is refused. To be raised with every
change of the tables. SQLite keeps it in `user_version`, PostgreSQL in the table `swarm_format`."""

SCHEMA = """
CREATE TABLE generations (
    generation INTEGER PRIMARY KEY,
    started_at REAL NOT NULL
) STRICT;

CREATE TABLE peers (
    id INTEGER PRIMARY KEY,
    peer TEXT NOT NULL UNIQUE,
    name TEXT,
    first_seen REAL NOT NULL,
    last_seen REAL NOT NULL
) STRICT;

CREATE TABLE rollbacks (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL CHECK (version >= 0),
    reason TEXT NOT NULL,
    generation INTEGER NOT NULL REFERENCES generations,
    written_at REAL NOT NULL
) STRICT;

CREATE TABLE applied_steps (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL CHECK (step >= 1),
    attempt INTEGER NOT NULL,
    loss REAL, -- NULL: not a number, the training has diverged
    tokens INTEGER NOT NULL,
    seconds REAL NOT NULL,
    global_norm REAL,
    learning_rate REAL NOT NULL,
    generation INTEGER NOT NULL REFERENCES generations,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;
CREATE UNIQUE INDEX one_live_row_per_step ON applied_steps (step) WHERE superseded_by IS NULL;

CREATE TABLE shares (
    applied_step INTEGER NOT NULL REFERENCES applied_steps,
    peer INTEGER NOT NULL REFERENCES peers,
    stage INTEGER NOT NULL,
    microbatches INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    PRIMARY KEY (applied_step, stage, peer)
) STRICT, WITHOUT ROWID;

CREATE TABLE checkpoints (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL CHECK (version >= 0),
    generation INTEGER NOT NULL REFERENCES generations,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;

CREATE TABLE checkpoint_stages (
    checkpoint INTEGER NOT NULL REFERENCES checkpoints,
    stage INTEGER NOT NULL,
    item TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    sha256 TEXT NOT NULL,
    PRIMARY KEY (checkpoint, stage)
) STRICT, WITHOUT ROWID;

CREATE TABLE evaluations (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    heldout_loss REAL,
    tokens INTEGER NOT NULL,
    sample TEXT,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;

CREATE TABLE finishes (
    id INTEGER PRIMARY KEY,
    version INTEGER NOT NULL,
    written_at REAL NOT NULL,
    superseded_by INTEGER REFERENCES rollbacks
) STRICT;

CREATE TABLE notes (
    id INTEGER PRIMARY KEY,
    peer INTEGER REFERENCES peers,
    text TEXT NOT NULL,
    written_at REAL NOT NULL
) STRICT;

-- `sent` and `received` are the reporter's newest counts; the `_before` columns hold the sums of
-- its earlier starts, because a volunteer counts from zero again when its program restarts.
CREATE TABLE links (
    reporter INTEGER NOT NULL REFERENCES peers,
    remote TEXT NOT NULL,
    protocol TEXT NOT NULL,
    sent INTEGER NOT NULL,
    received INTEGER NOT NULL,
    sent_before INTEGER NOT NULL DEFAULT 0,
    received_before INTEGER NOT NULL DEFAULT 0,
    written_at REAL NOT NULL,
    PRIMARY KEY (reporter, remote, protocol)
) STRICT, WITHOUT ROWID;

CREATE TABLE tokens (
    id INTEGER PRIMARY KEY,
    secret_sha256 TEXT NOT NULL UNIQUE,
    note TEXT NOT NULL,
    uses INTEGER CHECK (uses >= 1), -- NULL: any number of peers
    expires_at REAL,
    created_at REAL NOT NULL,
    revoked_at REAL
) STRICT;

CREATE TABLE members (
    token INTEGER NOT NULL REFERENCES tokens,
    peer TEXT NOT NULL,
    admitted_at REAL NOT NULL,
    PRIMARY KEY (token, peer)
) STRICT, WITHOUT ROWID;

CREATE TABLE allowances (
    id INTEGER PRIMARY KEY,
    peer TEXT NOT NULL,
    added_at REAL NOT NULL,
    removed_at REAL
) STRICT;
CREATE UNIQUE INDEX one_live_allowance_per_peer ON allowances (peer) WHERE removed_at IS NULL;

CREATE TABLE bans (
    id INTEGER PRIMARY KEY,
    peer TEXT NOT NULL,
    reason TEXT NOT NULL,
    banned_at REAL NOT NULL,
    lifted_at REAL
) STRICT;
CREATE UNIQUE INDEX one_live_ban_per_peer ON bans (peer) WHERE lifted_at IS NULL;

-- Every durable record in the order in which it was written, with a digest of its content that is
-- chained to the one before (`journal`): a row changed, lost or invented afterwards is found.
CREATE TABLE journal (
    sequence INTEGER PRIMARY KEY CHECK (sequence >= 0),
    kind TEXT NOT NULL,
    row_id INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    digest TEXT NOT NULL
) STRICT;
INSERT INTO journal (sequence, kind, row_id, generation, digest) VALUES (0, 'begun', 0, 0, '');

CREATE TABLE teams (
    peer INTEGER PRIMARY KEY REFERENCES peers,
    team TEXT NOT NULL -- empty: the peer has left its team
) STRICT;

CREATE TABLE owners (
    peer INTEGER PRIMARY KEY REFERENCES peers,
    owner TEXT NOT NULL, -- empty: the peer is bound to no owner
    binding TEXT NOT NULL -- signed by the owner, in base64
) STRICT;

-- Only of steps whose stages averaged in different attempts; otherwise all averaged in the step's.
CREATE TABLE step_attempts (
    applied_step INTEGER NOT NULL REFERENCES applied_steps,
    stage INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    PRIMARY KEY (applied_step, stage)
) STRICT, WITHOUT ROWID;

-- When the parts of an applied step happened; none if the coordinator ended before the last member
-- had applied it.
CREATE TABLE step_times (
    applied_step INTEGER PRIMARY KEY REFERENCES applied_steps,
    parts TEXT NOT NULL, -- JSON: name, stage, began, ended; seconds from the step's `written_at`
    written_at REAL NOT NULL
) STRICT;

CREATE TABLE standings (
    owner TEXT PRIMARY KEY,
    passed INTEGER NOT NULL,
    lost INTEGER NOT NULL,
    vested_step INTEGER NOT NULL,
    audited_work INTEGER NOT NULL,
    unvested_since INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

-- What peers and owners have held up. Durations are seconds from `written_at` on, so that a clock
-- that is set back prolongs none of them.
CREATE TABLE held_accounts (
    account TEXT PRIMARY KEY,
    leaks_for REAL NOT NULL,
    refused_for REAL NOT NULL,
    refused_because TEXT NOT NULL,
    ends_with_self_test INTEGER NOT NULL, -- 1 if a passed self-test ends the refusal
    disputes TEXT NOT NULL, -- JSON: the other peer and the seconds until it has leaked away
    written_at REAL NOT NULL,
    forgotten_at REAL NOT NULL
) STRICT, WITHOUT ROWID;

-- Audited cells in which two machines of a stage computed the same bits. A peer with another device
-- is another machine.
CREATE TABLE agreements (
    stage INTEGER NOT NULL,
    peer TEXT NOT NULL,
    device TEXT NOT NULL,
    other TEXT NOT NULL,
    other_device TEXT NOT NULL,
    cells INTEGER NOT NULL,
    PRIMARY KEY (stage, peer, device, other, other_device)
) STRICT, WITHOUT ROWID;

-- Of the newest version only.
CREATE TABLE state_digests (
    stage INTEGER NOT NULL,
    digest TEXT NOT NULL,
    version INTEGER NOT NULL,
    PRIMARY KEY (stage, digest) -- its columns first: older quick_checks misread other orders
) STRICT, WITHOUT ROWID;

CREATE TABLE verdicts (
    id INTEGER PRIMARY KEY,
    step INTEGER NOT NULL,
    microbatch INTEGER, -- null: the average of the stage
    stage INTEGER NOT NULL,
    peer TEXT NOT NULL,
    owner TEXT NOT NULL,
    audited TEXT NOT NULL,
    reason TEXT NOT NULL,
    void_after INTEGER NOT NULL,
    evidence TEXT, -- JSON of `swarm_shared.trust.evidence.Evidence`; NULL for a check of sums
    statements TEXT NOT NULL, -- of a check of sums: signed, in base64, separated by spaces
    written_at REAL NOT NULL
) STRICT;
"""

TABLES = tuple(re.findall(r"CREATE TABLE (\w+)", SCHEMA))
"""All tables, each after those that it refers to."""

_POSTGRESQL = (
    (r"\bid INTEGER PRIMARY KEY\b", "id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    (r"\) STRICT(, WITHOUT ROWID)?;", ");"),
)


def for_postgresql(script: str) -> str:
    """Translate the schema to PostgreSQL's dialect; the two differ in four places."""
    for pattern, replacement in _POSTGRESQL:
        script = re.sub(pattern, replacement, script)
    return script


def check_version(found: int, database: object) -> None:
    """VersionError for a database of another schema version."""
    if found != SCHEMA_VERSION:
        raise VersionError(
            f"the run's database {database} has schema version {found} and this swarm-coordinator "
            f"needs {SCHEMA_VERSION}; use the release that wrote it, or make a new run with "
            "`swarm-coordinator init`"
        )
