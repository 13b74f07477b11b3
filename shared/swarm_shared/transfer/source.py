"""Where an item can be fetched from."""

from __future__ import annotations

from dataclasses import dataclass

from swarm_shared.base.types import PeerId


@dataclass(frozen=True, slots=True)
class TransferSource:
    """A peer that holds the item."""

    peer: PeerId
    addresses: tuple[str, ...] = ()
