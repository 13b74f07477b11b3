"""Seconds by which peers have held up the run, remembered across steps, sessions and devices.

Values only; `swarm_coordinator.core.rules.held_up` decides what is charged and what follows. Each
peer and each owner has a leaky bucket. Charges are intervals of time: what several devices of one
owner hold up at the same time counts once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar

from swarm_coordinator.core.events import HeldAccountRecord
from swarm_shared.base.types import PeerId

HELD_BUDGET_SECONDS = 120.0
"""Held seconds after which a peer is not waited for any more."""

REFUSED_AT_SECONDS = 180.0
"""Held seconds after which a peer is refused for REFUSED_FOR_SECONDS."""

REFUSED_FOR_SECONDS = 3600.0
"""Duration of a refusal in seconds."""

LEAK_SECONDS = 3600.0 / HELD_BUDGET_SECONDS
"""Seconds in which one held second is forgotten: the budget within an hour."""

MAX_SECONDS_PER_CHARGE = 40.0
"""Held seconds that a single event can cost: an accident within a large step is one accident."""

MAX_DISPUTED_SECONDS = 60.0
"""Held seconds that the accusations of one peer can cost another one, and itself: a single accuser
cannot spend the budget of the accused."""

MAX_DISPUTED_WITH_ALL_SECONDS = REFUSED_AT_SECONDS / 2
"""Held seconds that all accusations together can cost a peer: a minority of a stage that works
together has no other peer refused. One that accuses others is excluded and rests all the same."""

MAX_ACCOUNTS = 10_000
"""Number of peers and owners with an account; those with the fewest seconds, held and of a refusal
that is left, are dropped first."""

MAX_DISPUTES = 64
"""Number of other parties that an account remembers; the least are dropped first."""

PARTNER_SECONDS = 3600.0
"""Seconds for which the other end of a computation that was not finite, or of an average that
failed, is remembered."""

FIRST_REST_SECONDS = 60.0
"""Refusal in seconds of a peer that has held up a second step alone within an hour, doubled with
each further one; at least FIRST_REST_STEPS steps."""

FIRST_REST_STEPS = 4

KeyT = TypeVar("KeyT")
ValueT = TypeVar("ValueT")


@dataclass(slots=True)
class Leaking:
    """A number of seconds that are forgotten over time."""

    empty_at: float = -math.inf
    """When all of them are forgotten."""

    def at(self, now: float) -> float:
        """The seconds that are not forgotten yet."""
        return max(0.0, self.empty_at - now) / LEAK_SECONDS

    def add(self, seconds: float, now: float) -> None:
        self.empty_at = max(self.empty_at, now) + seconds * LEAK_SECONDS


@dataclass(slots=True)
class HeldAccount:
    """What one peer, or one owner, has held up."""

    held: Leaking = field(default_factory=Leaking)
    charged_until: float = -math.inf
    """End of the last interval that was charged."""
    disputes: dict[PeerId, Leaking] = field(default_factory=dict)
    """The seconds of failed attempts for which this peer named another one, or was named by it."""
    disputed: Leaking = field(default_factory=Leaking)
    """The part of the held seconds that was charged for disputes."""
    not_finite_with: dict[PeerId, float] = field(default_factory=dict)
    """The other ends of computations that were not finite, and when the latest one was."""
    at_odds_with: dict[PeerId, float] = field(default_factory=dict)
    """The other parties of averages that failed between the two, and when the latest one did."""
    alone_at: tuple[float, ...] = ()
    """The last times at which the peer alone held up a step that others could end without it."""
    refused_until: float = -math.inf
    refused_because: str = ""
    """The reason of a refusal, as part of a sentence; empty if it is for held seconds."""
    ends_with_self_test: bool = False
    """Whether a passed self-test ends the refusal. Stored with it: nothing else tells a refusal for
    a first lost audit from one for withheld inputs after a restart of the coordinator."""

    def record_not_finite(self, other: PeerId, now: float) -> None:
        """Remember the other end of a computation that was not finite."""
        _remember(self.not_finite_with, other, now)

    def partners(self, now: float) -> int:
        """Number of peers with which a computation was not finite within an hour."""
        return sum(now - at < PARTNER_SECONDS for at in self.not_finite_with.values())

    def record_at_odds(self, other: PeerId, now: float) -> None:
        """Remember the other party of an average that failed between the two."""
        _remember(self.at_odds_with, other, now)

    def parties(self, now: float) -> set[PeerId]:
        """The owners with which an average failed within an hour."""
        return {other for other, at in self.at_odds_with.items() if now - at < PARTNER_SECONDS}

    def record_alone(self, now: float) -> None:
        """Remember a step that the peer held up alone."""
        self.alone_at = (*self.alone_at[-MAX_DISPUTES:], now)

    def times_alone(self, now: float) -> int:
        """Number of steps within an hour that the peer held up alone."""
        return sum(now - at < PARTNER_SECONDS for at in self.alone_at)

    def charge(self, since: float, until: float, limit: float, now: float) -> float:
        """Charge the part of an interval that was not charged before, up to `limit` seconds; return
        the charged seconds."""
        seconds = min(max(0.0, until - max(since, self.charged_until)), limit)
        self.charged_until = max(self.charged_until, until)
        self.held.add(seconds, now)
        return seconds

    def dispute(self, other: PeerId, since: float, until: float, now: float) -> None:
        """Charge an attempt for which one peer named the other, up to MAX_DISPUTED_SECONDS, and
        MAX_DISPUTED_WITH_ALL_SECONDS of all others."""
        bucket = self.disputes.get(other)
        if bucket is None:
            _make_room(self.disputes, MAX_DISPUTES, lambda entry: entry.at(now))
            bucket = self.disputes[other] = Leaking()
        room = min(MAX_DISPUTED_SECONDS - bucket.at(now), MAX_SECONDS_PER_CHARGE)
        seconds = max(0.0, min(until - max(since, self.charged_until), room))
        room_of_all = max(0.0, MAX_DISPUTED_WITH_ALL_SECONDS - self.disputed.at(now))
        charged = self.charge(since, until, min(seconds, room_of_all), now)
        self.disputed.add(charged, now)
        bucket.add(seconds, now)

    def refuse(
        self, until: float, reason: str, now: float, *, ends_with_self_test: bool = False
    ) -> None:
        """Refuse until a time, with a reason; nothing ends sooner what it is refused for already.

        Otherwise a peer could be lazy before it lies, and rest a minute for both.
        """
        if self.refused_until > now:
            ends_with_self_test = ends_with_self_test and self.ends_with_self_test
        if until > self.refused_until:
            self.refused_until, self.refused_because = until, reason
        self.ends_with_self_test = ends_with_self_test

    def worth(self, now: float) -> float:
        """Seconds that would be forgotten with the account."""
        return self.held.at(now) + max(0.0, self.refused_until - now)

    def record(self, account: PeerId, now: float) -> HeldAccountRecord:
        """What is stored of the account, with times as seconds from now."""
        return HeldAccountRecord(
            account,
            leaks_for_seconds=max(0.0, self.held.empty_at - now),
            refused_for_seconds=max(0.0, self.refused_until - now),
            refused_because=self.refused_because,
            disputes=tuple(
                (other, bucket.empty_at - now)
                for other, bucket in sorted(self.disputes.items())
                if bucket.empty_at > now
            ),
            ends_with_self_test=self.ends_with_self_test,
        )


@dataclass(slots=True)
class HeldTime:
    """The accounts of all peers and owners, and which have changed since they were stored."""

    accounts: dict[PeerId, HeldAccount] = field(default_factory=dict)
    refusals_due: set[PeerId] = field(default_factory=set)
    """Attached peers that are to be refused at the next tick."""
    changed: set[PeerId] = field(default_factory=set)

    def change(self, key: PeerId, now: float) -> HeldAccount:
        """An account to be changed: it is stored at the next tick."""
        self.changed.add(key)
        account = self.accounts.get(key)
        if account is None:
            _make_room(self.accounts, MAX_ACCOUNTS, lambda candidate: candidate.worth(now))
            account = self.accounts[key] = HeldAccount()
        return account

    def account(self, key: PeerId) -> HeldAccount:
        """An account to be read; that of an unknown peer is new and not remembered."""
        return self.accounts.get(key) or HeldAccount()

    def seconds(self, key: PeerId, now: float) -> float:
        """The held seconds of an account."""
        return self.account(key).held.at(now)

    def refused(self, keys: Iterable[PeerId], now: float) -> list[PeerId]:
        """The accounts among `keys` that are refused now."""
        return [key for key in keys if self.account(key).refused_until > now]

    def take_changed(self, now: float) -> tuple[HeldAccountRecord, ...]:
        """The accounts to be stored, in the order of their keys; most charges are of no seconds."""
        changed, self.changed = sorted(self.changed & self.accounts.keys()), set()
        accounts = ((key, self.accounts[key]) for key in changed)
        # An account whose refusal has ended early is stored, too.
        return tuple(
            account.record(key, now)
            for key, account in accounts
            if account.held.empty_at > now or account.refused_until > -math.inf
        )


def restored_held_time(records: Iterable[HeldAccountRecord], now: float) -> HeldTime:
    """The accounts of an earlier start of the coordinator."""
    return HeldTime(
        {
            record.account: HeldAccount(
                Leaking(now + record.leaks_for_seconds),
                disputes={other: Leaking(now + seconds) for other, seconds in record.disputes},
                disputed=Leaking(now + _disputed_leaks_for_seconds(record)),
                refused_until=now + record.refused_for_seconds,
                refused_because=record.refused_because,
                ends_with_self_test=record.ends_with_self_test,
            )
            for record in records
        }
    )


def _disputed_leaks_for_seconds(record: HeldAccountRecord) -> float:
    """Seconds until what was charged for disputes is forgotten, at most: not all was charged."""
    named = sum(seconds for _, seconds in record.disputes)
    return min(named, MAX_DISPUTED_WITH_ALL_SECONDS * LEAK_SECONDS)


def _remember(table: dict[PeerId, float], other: PeerId, now: float) -> None:
    if other not in table:
        _make_room(table, MAX_DISPUTES, lambda at: at)
    table[other] = now


def _make_room(table: dict[KeyT, ValueT], capacity: int, worth: Callable[[ValueT], float]) -> None:
    """Drop the eighth of the entries with the least worth from a full table."""
    if len(table) >= capacity:
        for key in sorted(table, key=lambda key: worth(table[key]))[: max(1, capacity // 8)]:
            del table[key]
