"""Text forms of the addresses that p2pd takes. No I/O."""

from __future__ import annotations

from collections.abc import Sequence

from swarm_shared.addresses.dial_order import CIRCUIT


def is_relayed(address: str) -> bool:
    return CIRCUIT in address


def without_peer_id(address: str, owner: str) -> str:
    """The address without `owner`'s peer ID, which may stand at its end."""
    return address.removesuffix(f"/p2p/{owner}")


def relayed_addresses(relays: Sequence[str]) -> list[str]:
    """The addresses of a p2pd that holds a slot at each of these relays (…/p2p/ID)."""
    return [f"{relay}{CIRCUIT}" for relay in relays]
