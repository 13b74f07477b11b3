"""SQL of admission: tokens (hashed), the peers they admitted, the allow-list, bans, and the owners
of devices.

Called by `storage.records` and `storage.store`. A row of admission is ended by a time in its last
column (revoked, removed, lifted) and never deleted, so that it stays known which peers had access.
"""

from __future__ import annotations

from swarm_coordinator.admission.book import (
    AdmissionBook,
    AdmissionRecord,
    MemberAdmitted,
    PeerAllowed,
    PeerBanned,
    PeerDisallowed,
    PeerUnbanned,
    TokenCreated,
    TokenRevoked,
)
from swarm_coordinator.admission.device_owners import named_owner
from swarm_coordinator.storage.connection import Connection
from swarm_shared.base.types import PeerId
from swarm_shared.identity.owners import effective_bindings


def insert_admission(connection: Connection, record: AdmissionRecord, now: float) -> None:
    """Write one record of admission."""
    match record:
        case TokenCreated(token, secret_sha256, note, uses, expires_at):
            connection.execute(
                "INSERT INTO tokens (id, secret_sha256, note, uses, expires_at, created_at) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                (token, secret_sha256, note, uses, expires_at, now),
            )
        case TokenRevoked(token):
            connection.execute(
                "UPDATE tokens SET revoked_at = ? WHERE id = ? AND revoked_at IS NULL",
                (now, token),
            )
        case MemberAdmitted(peer, token):
            connection.execute(
                "INSERT INTO members (token, peer, admitted_at) VALUES (?, ?, ?) "
                "ON CONFLICT DO NOTHING",
                (token, peer, now),
            )
        case PeerAllowed(peer):
            connection.execute(
                "INSERT INTO allowances (peer, added_at) VALUES (?, ?) ON CONFLICT DO NOTHING",
                (peer, now),
            )
        case PeerDisallowed(peer):
            connection.execute(
                "UPDATE allowances SET removed_at = ? WHERE peer = ? AND removed_at IS NULL",
                (now, peer),
            )
        case PeerBanned(peer, reason):
            # A second ban with another reason replaces the first: the peer receives the newer one.
            connection.execute(
                "UPDATE bans SET lifted_at = ? WHERE peer = ? AND lifted_at IS NULL", (now, peer)
            )
            connection.execute(
                "INSERT INTO bans (peer, reason, banned_at) VALUES (?, ?, ?)", (peer, reason, now)
            )
        case PeerUnbanned(peer):
            connection.execute(
                "UPDATE bans SET lifted_at = ? WHERE peer = ? AND lifted_at IS NULL", (now, peer)
            )


def read_admission(connection: Connection) -> AdmissionBook:
    """Rebuild the admission book from its rows."""
    book = AdmissionBook()
    for token, secret, note, uses, expires_at, created_at, revoked_at in connection.execute(
        "SELECT id, secret_sha256, note, uses, expires_at, created_at, revoked_at FROM tokens "
        "ORDER BY id"
    ):
        book.enter(TokenCreated(token, secret, note, uses, expires_at), created_at)
        if revoked_at is not None:
            book.enter(TokenRevoked(token), revoked_at)
    for token, peer, admitted_at in connection.execute(
        "SELECT token, peer, admitted_at FROM members ORDER BY admitted_at, peer"
    ):
        book.enter(MemberAdmitted(PeerId(peer), token), admitted_at)
    for peer, added_at in connection.execute(
        "SELECT peer, added_at FROM allowances WHERE removed_at IS NULL ORDER BY id"
    ):
        book.enter(PeerAllowed(PeerId(peer)), added_at)
    for peer, reason, banned_at in connection.execute(
        "SELECT peer, reason, banned_at FROM bans WHERE lifted_at IS NULL ORDER BY id"
    ):
        book.enter(PeerBanned(PeerId(peer), reason), banned_at)
    return book


def read_seen_since(connection: Connection, since: float) -> dict[PeerId, float]:
    """Return the peers that received a certificate at `since` or later, each with the Unix time of
    its latest one."""
    return {
        PeerId(peer): last_seen
        for peer, last_seen in connection.execute(
            "SELECT peer, last_seen FROM peers WHERE last_seen >= ? ORDER BY id", (since,)
        )
    }


# ---------------------------------------------------------------- owners of devices


def write_binding(connection: Connection, peer_row: int, device: PeerId, binding: str) -> None:
    """Store the binding of `device`; an empty one means that it is bound to no owner."""
    owner = named_owner(device, binding or None)
    connection.execute(
        "INSERT INTO owners (peer, owner, binding) VALUES (?, ?, ?) "
        "ON CONFLICT (peer) DO UPDATE SET owner = excluded.owner, binding = excluded.binding",
        (peer_row, owner or "", binding),
    )


def read_bindings(connection: Connection) -> dict[PeerId, tuple[PeerId, str]]:
    """Return owner and signed envelope by device, of all effective bindings."""
    rows = connection.execute(
        "SELECT p.peer, o.owner, o.binding FROM owners o JOIN peers p ON p.id = o.peer "
        "WHERE o.owner <> ''"
    ).fetchall()
    stands = effective_bindings({PeerId(peer): PeerId(owner) for peer, owner, _ in rows})
    return {PeerId(peer): (PeerId(owner), text) for peer, owner, text in rows if peer in stands}


def read_owners(connection: Connection) -> dict[PeerId, PeerId]:
    """Return the owner by device, of all effective bindings."""
    return {device: owner for device, (owner, _) in read_bindings(connection).items()}
