"""The tables of a run's database, and how they came to be what they are.

Owns the migrations, and nothing that opens or writes a database. They are spelt for SQLite;
`for_postgresql` says the same in PostgreSQL's words, so that both stores have one schema and one
number for it.

Rows are appended and never deleted. Two kinds of columns change afterwards: `superseded_by` points
from a step, checkpoint, evaluation or finish to the rollback that took it out of the run's history,
and a time ends a token, an allowance or a ban. Partial unique indices make the database itself
refuse a step that counts twice, or a second ban of the same peer.
"""

from __future__ import annotations

import re

_SCHEMA_1 = """
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

-- `sent` and `received` are the reporter's last word; the `_before` columns hold the sums of its
-- earlier starts, because a volunteer counts from zero again when its program starts again.
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
"""

_SCHEMA_2 = """
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
"""

# Every durable decision in the order in which it was made, with a digest of what it said, chained
# to the one before (`journal`): a row that is changed, lost or invented afterwards is found. A
# database that is older than this table begins its journal at the version it had.
_SCHEMA_3 = """
CREATE TABLE journal (
    sequence INTEGER PRIMARY KEY CHECK (sequence >= 0),
    kind TEXT NOT NULL,
    row_id INTEGER NOT NULL,
    generation INTEGER NOT NULL,
    digest TEXT NOT NULL
) STRICT;
INSERT INTO journal (sequence, kind, row_id, generation, digest)
SELECT 0, 'begun',
    (SELECT max(v) FROM (
        SELECT 0 AS v
        UNION ALL SELECT step FROM applied_steps WHERE superseded_by IS NULL
        UNION ALL SELECT version FROM rollbacks WHERE id = (SELECT max(id) FROM rollbacks)
    ) AS versions),
    (SELECT coalesce(max(generation), 0) FROM generations), '';
"""

_SCHEMA_4 = """
CREATE TABLE teams (
    peer INTEGER PRIMARY KEY REFERENCES peers,
    team TEXT NOT NULL -- empty: it said that it is in none any more
) STRICT;
"""

_SCHEMA_5 = """
CREATE TABLE owners (
    peer INTEGER PRIMARY KEY REFERENCES peers,
    owner TEXT NOT NULL, -- empty: it said that it is its own
    binding TEXT NOT NULL -- signed by the owner, in base64
) STRICT;
"""

# Only of steps whose stages have averaged in unlike attempts; otherwise all have in the step's.
_SCHEMA_6 = """
CREATE TABLE step_attempts (
    applied_step INTEGER NOT NULL REFERENCES applied_steps,
    stage INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    PRIMARY KEY (applied_step, stage)
) STRICT, WITHOUT ROWID;
"""

MIGRATIONS: tuple[str, ...] = (
    _SCHEMA_1, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4, _SCHEMA_5, _SCHEMA_6,
)  # fmt: skip
"""Migration i takes a database from format i to i + 1; never edit one that was released."""

TABLES = (
    "generations", "peers", "rollbacks", "applied_steps", "shares", "checkpoints",
    "checkpoint_stages", "evaluations", "finishes", "notes", "links", "tokens", "members",
    "allowances", "bans", "journal", "teams", "owners", "step_attempts",
)  # fmt: skip
"""All of the newest format, each after those that it refers to."""

_POSTGRESQL = (
    (r"\bid INTEGER PRIMARY KEY\b", "id BIGINT GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY"),
    (r"\bINTEGER\b", "BIGINT"),
    (r"\bREAL\b", "DOUBLE PRECISION"),
    (r"\) STRICT(, WITHOUT ROWID)?;", ");"),
)


def for_postgresql(script: str) -> str:
    """A migration in PostgreSQL's words: the four places in which the two differ."""
    for pattern, replacement in _POSTGRESQL:
        script = re.sub(pattern, replacement, script)
    return script
