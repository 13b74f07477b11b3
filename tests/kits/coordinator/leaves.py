"""One leaf of the training data, fetched from a coordinator as a member does."""

from __future__ import annotations

from swarm_shared.data.sample_ranges import LeafId, check_leaf
from swarm_shared.identity.invite import Invite
from swarm_shared.network import Node
from swarm_shared.protocol import TransferHello
from swarm_shared.run.manifest import Manifest
from swarm_shared.transfer.leaf_transfer import LeafStream
from swarm_shared.transfer.source import TransferSource


async def fetch_leaf(
    node: Node, invite: Invite, manifest: Manifest, certificate: str, wanted: LeafId
) -> bytes:
    """Return the verified bytes."""
    source = TransferSource(invite.coordinator, invite.addresses)
    hello = TransferHello(run=invite.run_id, certificate=certificate)
    stream = await LeafStream.open(node, source, hello, manifest)
    try:
        (found,) = await stream.ask([wanted], content=True)
    finally:
        await stream.close()
    check_leaf(manifest, wanted, found.content, found.proof)
    return found.content
