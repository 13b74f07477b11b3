"""Whose device a member is: rows of people out of rows of peers.

Owns the grouping alone, one rule for the coordinator, its pages and the ledger. That a binding
holds is checked in `credentials`, before it comes here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from swarm_shared.base.types import PeerId

_T = TypeVar("_T")


def effective_bindings(bound: Mapping[PeerId, PeerId]) -> dict[PeerId, PeerId]:
    """Devices to their owners, without those whose owner is itself bound to somebody.

    A chain has no first link that everybody finds alike, so it counts as no binding.
    """
    return {device: owner for device, owner in bound.items() if owner not in bound}


def group_by_owner(
    peers: Iterable[PeerId], bound: Mapping[PeerId, PeerId]
) -> dict[PeerId, list[PeerId]]:
    """Each person with those of `peers` that are theirs, in order; who is not bound is one."""
    found: dict[PeerId, list[PeerId]] = {}
    for peer in sorted(peers):
        found.setdefault(bound.get(peer, peer), []).append(peer)
    return found


def owner_display(
    person: PeerId, devices: Sequence[PeerId], words: Mapping[PeerId, _T | None]
) -> _T | None:
    """A person's name or team: what the owner's own key says, else the first device that says one.

    An owner that takes part is asked alone: its word is `None` when it gives none.
    """
    if person in words:
        return words[person]
    return next((words[one] for one in devices if words.get(one) is not None), None)
