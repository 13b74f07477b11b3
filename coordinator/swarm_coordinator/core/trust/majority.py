"""Majorities of owners: which of several stated values is the right one.

Pure functions. Each owner has one vote, however many devices it has: an identity costs nothing. Its
vote is what more than half of its devices state. A value with more than half of the votes is
decided; without one, the vote of the device that has been attached longest counts, so that a
joining peer replaces nothing. `AuditBook.voters` determines which owners vote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

from swarm_shared.base.types import PeerId

ValueT = TypeVar("ValueT", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Statement(Generic[ValueT]):
    """A value that one device states."""

    peer: PeerId
    owner: PeerId
    since: float
    """Number of the session in which the device is attached; infinite if it has left."""
    value: ValueT


@dataclass(frozen=True, slots=True)
class Decision(Generic[ValueT]):
    """The value that counts."""

    value: ValueT
    owners: frozenset[PeerId]
    """The voters that voted for the value."""
    voters: frozenset[PeerId]
    """The voters that have stated something."""

    @property
    def has_majority(self) -> bool:
        """Whether more than half of the voters agree."""
        return 2 * len(self.owners) > len(self.voters)


def decide(
    statements: Iterable[Statement[ValueT]], voters: Collection[PeerId]
) -> Decision[ValueT] | None:
    """The value that counts among these owners; None if none of them has stated anything."""
    of_owner: dict[PeerId, list[Statement[ValueT]]] = {}
    for statement in statements:
        if statement.owner in voters:
            of_owner.setdefault(statement.owner, []).append(statement)
    if not of_owner:
        return None
    voted = frozenset(of_owner)
    votes = {
        owner: vote[0]
        for owner, stated in of_owner.items()
        if (vote := _value_of_most([statement.value for statement in stated])) is not None
    }
    majority = _value_of_most(list(votes.values()), voters=len(voted))
    if majority is None:
        eldest = min(
            (statement for stated in of_owner.values() for statement in stated),
            key=lambda statement: (statement.since, statement.peer),
        )
        majority = (eldest.value,)
    value = majority[0]
    return Decision(value, frozenset(o for o, vote in votes.items() if vote == value), voted)


def _value_of_most(values: list[ValueT], voters: int | None = None) -> tuple[ValueT] | None:
    """The value, in a tuple, that more than half of the voters state; None without one.

    `voters`: their number, by default that of the values.
    """
    if not values:
        return None
    value, count = Counter(values).most_common(1)[0]
    return (value,) if 2 * count > (len(values) if voters is None else voters) else None
