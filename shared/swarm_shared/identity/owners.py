"""Grouping of member devices by their owner.

Owns the grouping alone, one rule for the coordinator, its dashboard and the ledger. Bindings are
checked in `swarm_shared.identity.credentials` before they come here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from swarm_shared.base.types import PeerId

_T = TypeVar("_T")


def effective_bindings(bound: Mapping[PeerId, PeerId]) -> dict[PeerId, PeerId]:
    """Return devices with their owners, without those whose owner is itself bound to another key.

    A chain has no first link that every reader would choose alike, so it counts as no binding.
    """
    return {device: owner for device, owner in bound.items() if owner not in bound}


def group_by_owner(
    peers: Iterable[PeerId], bound: Mapping[PeerId, PeerId]
) -> dict[PeerId, list[PeerId]]:
    """Return each owner with those of `peers` bound to it, in order; an unbound peer owns
    itself."""
    found: dict[PeerId, list[PeerId]] = {}
    for peer in sorted(peers):
        found.setdefault(bound.get(peer, peer), []).append(peer)
    return found


def owner_display(
    person: PeerId, devices: Sequence[PeerId], words: Mapping[PeerId, _T | None]
) -> _T | None:
    """Return an owner's name or team: the one of its own key, else the first device's that has one.

    When the owner's key takes part itself, only its value counts, even if that is None.
    """
    if person in words:
        return words[person]
    return next((words[one] for one in devices if words.get(one) is not None), None)
