"""How many rows a run keeps of what any admitted peer can add to: links, notes, idle peers and held
seconds.

In mode `open` one machine makes any number of identities. Each leaves a row of `peers`, and each of
them can report links and cause notes. Owns the limits and the deletion of the oldest rows beyond
them. What the run's history rests on (steps, shares, checkpoints, the journal) is never deleted.
"""

from __future__ import annotations

from swarm_coordinator.storage.connection import Connection
from swarm_shared.protocol import MAX_LINKS

MAX_LINK_ROWS = 200_000
"""Rows of links of all reporters together: some forty megabytes."""
MAX_NOTES = 20_000
MAX_IDLE_PEERS = 10_000
"""Peers in no applied step that are remembered; those not seen for longest are deleted."""
MAX_HELD_ACCOUNTS = 10_000
"""Accounts of held seconds; those that are forgotten first are deleted."""


def prune(connection: Connection) -> None:
    """Delete the oldest rows beyond the limits."""
    (rows,) = connection.execute("SELECT count(*) FROM links").fetchone()
    if rows > MAX_LINKS:
        _prune_links(connection, "PARTITION BY reporter", MAX_LINKS)
        _prune_links(connection, "", MAX_LINK_ROWS)
    connection.execute(
        "DELETE FROM notes WHERE id <= (SELECT max(id) FROM notes) - ?", (MAX_NOTES,)
    )
    connection.execute(
        "DELETE FROM held_accounts WHERE account NOT IN (SELECT account FROM held_accounts "
        "ORDER BY forgotten_at DESC, account LIMIT ?)",
        (MAX_HELD_ACCOUNTS,),
    )
    _prune_peers(connection)


def _prune_links(connection: Connection, group: str, limit: int) -> None:
    connection.execute(
        "DELETE FROM links WHERE (reporter, remote, protocol) IN ("
        "SELECT reporter, remote, protocol FROM (SELECT reporter, remote, protocol, "
        f"row_number() OVER ({group} ORDER BY written_at DESC, reporter, remote, protocol) "
        "AS place FROM links) AS placed WHERE place > ?)",
        (limit,),
    )


def _prune_peers(connection: Connection) -> None:
    """Delete peers in no step. The owner of a device in a step stays."""
    (rows,) = connection.execute("SELECT count(*) FROM peers").fetchone()
    if rows <= MAX_IDLE_PEERS:
        return  # which of them counted in a step is read from all shares
    idle = connection.execute(
        "WITH counted AS (SELECT DISTINCT peer FROM shares) "
        "SELECT id FROM peers WHERE id NOT IN (SELECT peer FROM counted) AND peer NOT IN "
        "(SELECT owner FROM owners WHERE peer IN (SELECT peer FROM counted)) "
        # A row numbered anew must not have the number of a deleted one.
        "AND id < (SELECT max(id) FROM peers) ORDER BY last_seen DESC, id DESC"
    ).fetchall()
    removed = [(row,) for (row,) in idle[MAX_IDLE_PEERS:]]
    connection.executemany("UPDATE notes SET peer = NULL WHERE peer = ?", removed)
    for table, column in (
        ("links", "reporter"), ("teams", "peer"), ("owners", "peer"), ("peers", "id"),
    ):  # fmt: skip
        connection.executemany(f"DELETE FROM {table} WHERE {column} = ?", removed)
