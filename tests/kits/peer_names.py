"""Peer IDs that a reader can tell apart, in the form that messages are checked for."""

from __future__ import annotations

from swarm_shared.base.types import PeerId

_PREFIX = "12D3KooW"
_CHARACTERS = 52


def named(name: str) -> PeerId:
    """Return an ID that ends with `name`, which consists of base58 characters: shortened IDs show
    their end. IDs of names of one length have the order of the names."""
    return PeerId(_PREFIX + name.rjust(_CHARACTERS - len(_PREFIX), "1"))
