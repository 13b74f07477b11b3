"""Owner bindings of devices, as rows of the database."""

from __future__ import annotations

from swarm_coordinator.admission.device_owners import named_owner
from swarm_coordinator.storage.connection import Connection
from swarm_shared.base.types import PeerId
from swarm_shared.identity.owners import effective_bindings


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
