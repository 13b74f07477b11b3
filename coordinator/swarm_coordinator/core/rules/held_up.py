"""What holding up the run costs: how long others wait for a peer, and what it is charged.

Part of the pure core (docs/decisions, number 0035). Deadlines follow the step's own pace: peers
that share a stage take about as long as each other. The accounts, one of each peer and one of each
owner, are in `swarm_coordinator.core.state.held_time`; they outlast steps and sessions. They have:

    held seconds   Intervals for which a peer alone held up the run (`charge`); they leak away
                   within an hour. From HELD_BUDGET_SECONDS on, the budget is spent and the run
                   does not wait for the peer any more; from REFUSED_AT_SECONDS on, it is refused.
    disputes       Intervals for which one of two peers is responsible, and nothing shows which
                   (`dispute`). Both are charged alike: an accusation is no evidence.
    at odds        Two owners between whose peers an average failed within an hour. A peer at odds
                   with most owners of its stage is at fault itself.
    alone          Steps that a peer held up alone although the others could end them without it.
                   From the second one within an hour on, the peer is refused, each time for twice
                   as long (a rest).
"""

from __future__ import annotations

import math

from swarm_coordinator.core.events import CloseSession, HeldTimeRecord, Remember
from swarm_coordinator.core.state.held_time import (
    FIRST_REST_SECONDS,
    FIRST_REST_STEPS,
    HELD_BUDGET_SECONDS,
    MAX_SECONDS_PER_CHARGE,
    REFUSED_AT_SECONDS,
    REFUSED_FOR_SECONDS,
    HeldAccount,
)
from swarm_coordinator.core.state.peers import PeerPhase, PeerState, display, owner_of, short
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Refused

FREE_SECONDS = 1.0
"""Seconds by which a peer may be later than most others at no charge, at least."""

PACE_SHARE = 0.5
"""Part of the step's duration for which others wait at least, and at no charge."""

SHORTEST_WAIT_SECONDS = 5.0
"""Seconds that the last members have after most others, at least: home machines stall that long."""

WAIT_FACTOR = 3.0
"""Multiple of the time of most members that the last ones have in addition."""

KEPT_APART_SECONDS = 30.0
"""Seconds held up by the accusations of two peers above which they do not share a stage."""


# ---------------------------------------------------------------- waiting


def uncharged_until(step: StepState, began_at: float, most_at: float) -> float:
    """Return the time until which an answer to an order is not charged.

    The order was sent at `began_at`, and most others had answered it at `most_at`.
    """
    return most_at + max(FREE_SECONDS, most_at - began_at, PACE_SHARE * pace(step))


def deadline(run: RunState, step: StepState, began_at: float, most_at: float) -> float:
    """Return the time until which the run waits for an answer to an order.

    The order was sent at `began_at`, and most others had answered it at `most_at`. The last ones
    have at least as long again, even where that is longer than a lease.
    """
    wait = max(SHORTEST_WAIT_SECONDS, WAIT_FACTOR * (most_at - began_at), PACE_SHARE * pace(step))
    latest = max(began_at + run.manifest.limits.lease_seconds, most_at + (most_at - began_at))
    return min(most_at + wait, latest)


def pace(step: StepState) -> float:
    """Seconds that the work of the step took, which no single peer decides.

    Until the table is complete, the seconds that the work of the first stage to average took; 0
    before that.
    """
    ended_at = step.complete_at
    if ended_at is None and step.closing.rounds:
        ended_at = min(round_.began_at for round_ in step.closing.rounds.values())
    return 0.0 if ended_at is None else max(0.0, ended_at - step.previous_applied_at)


# ---------------------------------------------------------------- charging


def charge(run: RunState, peer: PeerState, since: float, until: float, now: float) -> None:
    """Charge an interval that a peer alone has held up."""
    for key in accounts_of(peer):
        run.held_time.change(key, now).charge(since, until, MAX_SECONDS_PER_CHARGE, now)
    _judge(run, peer, now)


def dispute(
    run: RunState, first: PeerState, second: PeerState, since: float, until: float, now: float
) -> None:
    """Charge an interval to two peers, of which either may be the one that held up the run."""
    for peer, against in ((first, second), (second, first)):
        for key in accounts_of(peer):
            run.held_time.change(key, now).dispute(against.peer, since, until, now)
    _judge(run, first, now)
    _judge(run, second, now)


def record_at_odds(run: RunState, first: PeerState, second: PeerState, now: float) -> None:
    """Remember that an average has failed between two peers, of which either may be at fault."""
    for peer, against in ((first, second), (second, first)):
        run.held_time.change(owner_of(peer), now).record_at_odds(owner_of(against), now)


def at_odds_since(run: RunState, first: PeerState, second: PeerState, now: float) -> float | None:
    """When an average has last failed between the owners of two peers, within an hour."""
    account, key = run.held_time.account(owner_of(first)), owner_of(second)
    return account.at_odds_with[key] if key in account.parties(now) else None


def is_at_odds_with_most(run: RunState, peer: PeerState, now: float) -> bool:
    """Whether averages have failed between a peer and most of the other owners of its stage.

    An honest peer is at odds with liars only, which are fewer. Of one other owner there is no
    majority.
    """
    if peer.stage is None:
        return False
    own = owner_of(peer)
    others = {owner_of(other) for other in run.peers.at(peer.stage)} - {own}
    at_odds = run.held_time.account(own).parties(now) & others
    return len(others) > 1 and 2 * len(at_odds) > len(others)


def record_held_up_alone(
    run: RunState, peer: PeerState, now: float, *, rests_at_once: bool = False
) -> None:
    """Remember that a peer has held up a step alone, which the others can end without it.

    Once an hour is an accident; from the second time on the peer is refused for a while, with
    `rests_at_once` from the first.
    """
    account = run.held_time.change(peer.peer, now)
    account.record_alone(now)
    if rests_at_once or account.times_alone(now) > 1:
        run.held_time.refusals_due.add(peer.peer)


def has_held_up_alone(run: RunState, peer: PeerState, now: float) -> bool:
    """Whether a peer has held up a step alone within an hour."""
    return run.held_time.account(peer.peer).times_alone(now) > 0


def _refusal_seconds(run: RunState, account: HeldAccount, now: float) -> float:
    """Seconds for which the owner of an account is refused: the more it has held up, the longer."""
    if account.held.at(now) >= REFUSED_AT_SECONDS:
        return REFUSED_FOR_SECONDS
    step, times = run.steps.current, account.times_alone(now)
    if not times:
        return 0.0
    first = max(FIRST_REST_SECONDS, FIRST_REST_STEPS * pace(step) if step is not None else 0.0)
    return min(REFUSED_FOR_SECONDS, first * 2.0 ** max(0, times - 2))


def accounts_of(peer: PeerState) -> tuple[PeerId, ...]:
    """The accounts that a peer is charged on: its own and, if it has one, its owner's."""
    return _accounts(peer.peer, peer.profile.owner)


def _accounts(peer: PeerId, owner: PeerId | None) -> tuple[PeerId, ...]:
    return (peer,) if owner is None else (peer, owner)


def held_seconds(run: RunState, peer: PeerState, now: float) -> float:
    """The held seconds of a peer or of its owner, whichever are more."""
    return max(run.held_time.seconds(key, now) for key in accounts_of(peer))


def is_spent(run: RunState, peer: PeerState, now: float) -> bool:
    """Whether the run does not wait for a peer any more."""
    return held_seconds(run, peer, now) >= HELD_BUDGET_SECONDS


def kept_apart(run: RunState, peer: PeerState, stage: StageIndex, now: float) -> bool:
    """Whether a peer must not hold a stage, because of its disputes with a holder of that stage.

    One of two peers that keep accusing each other is at fault, and together they end no step.
    """
    return any(
        seconds.at(now) > KEPT_APART_SECONDS
        and (holder := run.peers.get(other)) is not None
        and holder.stage == stage
        and run.peers.holds_current(holder)
        for other, seconds in run.held_time.account(peer.peer).disputes.items()
    )


def is_at_odds_in(run: RunState, peer: PeerState, stage: StageIndex, now: float) -> bool:
    """Whether averages have failed between a peer and a holder of a stage, within an hour."""
    parties = run.held_time.account(owner_of(peer)).parties(now)
    # Almost always none: a join must not cost time for each peer of the run.
    return bool(parties) and any(owner_of(holder) in parties for holder in run.peers.at(stage))


def store_changed(run: RunState, now: float) -> None:
    """Store what has been charged since the last tick."""
    if run.held_time.changed and (accounts := run.held_time.take_changed(now)):
        run.commands.append(Remember(HeldTimeRecord(accounts)))


# ---------------------------------------------------------------- refusing


def _judge(run: RunState, peer: PeerState, now: float) -> None:
    """Note a spent budget once, and mark a peer that is to be refused."""
    seconds = held_seconds(run, peer, now)
    if seconds >= HELD_BUDGET_SECONDS and not peer.budget_spent:
        run.note(
            f"{display(peer)} has held up the run for {seconds:.0f} s within an hour and is not "
            f"waited for any more",
            peer.peer,
        )
    peer.budget_spent = seconds >= HELD_BUDGET_SECONDS
    if seconds >= REFUSED_AT_SECONDS:
        run.held_time.refusals_due.add(peer.peer)


def take_refusals(run: RunState, now: float) -> list[PeerState]:
    """Refuse the peers that have held up too much, also those that have left meanwhile; the caller
    removes the attached ones, which are returned.

    A stage's last holder stays until there is another one, or until it is forgotten.
    """
    refused: list[PeerState] = []
    for peer_id in sorted(run.held_time.refusals_due):
        peer = run.peers.get(peer_id)
        if peer is not None and _is_last_holder(run, peer):
            continue
        run.held_time.refusals_due.discard(peer_id)
        for key in (peer_id,) if peer is None else accounts_of(peer):
            account = run.held_time.change(key, now)
            if seconds := _refusal_seconds(run, account, now):
                account.refuse(now + seconds, "", now)
        if peer is not None and refused_seconds(run, peer_id, peer.profile.owner, now):
            refused.append(peer)
    return refused


def _is_last_holder(run: RunState, peer: PeerState) -> bool:
    if peer.stage is None or peer.phase is not PeerPhase.READY:
        return False
    return not any(p is not peer and p.phase is PeerPhase.READY for p in run.peers.at(peer.stage))


def refused_seconds(run: RunState, peer: PeerId, owner: PeerId | None, now: float) -> float | None:
    """Seconds for which a peer may not take part; None if it may."""
    accounts = map(run.held_time.account, _accounts(peer, owner))
    seconds = max(account.refused_until for account in accounts) - now
    return seconds if seconds > 0 else None


def refusal(run: RunState, peer: PeerId, owner: PeerId | None, now: float) -> str | None:
    """Why a peer may not take part for now, as a sentence; None if it may."""
    seconds = refused_seconds(run, peer, owner, now)
    if seconds is None:
        return None
    device = "this volunteer" if owner is None else "a device of this owner"
    for account in map(run.held_time.account, _accounts(peer, owner)):
        if account.refused_because:
            return f"{device} was expelled: {account.refused_because}"
    return (
        f"{device} has held up the run for too long or too often within an hour and may take part "
        f"again in {math.ceil(seconds / 60)} min; check its connection and its load"
    )


def refuse_until(
    run: RunState, keys: tuple[PeerId, ...], until: float, reason: str, now: float,
    *, ends_with_self_test: bool = False,
) -> None:  # fmt: skip
    """Refuse a peer and its owner until a time, with a reason."""
    for key in keys:
        run.held_time.change(key, now).refuse(
            until, reason, now, ends_with_self_test=ends_with_self_test
        )


def ends_with_self_test(run: RunState, peer: PeerId, owner: PeerId | None, now: float) -> bool:
    """Whether a passed self-test ends all that a peer is refused for now."""
    refused = run.held_time.refused(_accounts(peer, owner), now)
    return bool(refused) and all(run.held_time.account(key).ends_with_self_test for key in refused)


def lift_refusal(run: RunState, peer: PeerId, owner: PeerId | None, now: float) -> bool:
    """End the refusal of a peer that says that its machine has passed a self-test; False if that
    does not end it.

    A liar says so as well, and gains time only: the next lost audit bans its owner.
    """
    if not ends_with_self_test(run, peer, owner, now):
        return False
    for key in run.held_time.refused(_accounts(peer, owner), now):
        run.held_time.change(key, now).refused_until = now
    run.note(f"{short(peer)} may take part again: its machine has passed a self-test", peer)
    return True


def refuse(run: RunState, peer: PeerId, owner: PeerId | None, now: float) -> bool:
    """Refuse a client that may not take part for now; False if it may."""
    reason = refusal(run, peer, owner, now)
    if reason is not None:
        send_refusal(run, peer, owner, reason, now)
    return reason is not None


def send_refusal(
    run: RunState, peer: PeerId, owner: PeerId | None, reason: str, now: float
) -> None:
    """Refuse a client, with the seconds that are left and whether a self-test ends them."""
    refuse_for_now(
        run, peer, reason, refused_seconds(run, peer, owner, now),
        self_test=ends_with_self_test(run, peer, owner, now),
    )  # fmt: skip


def refuse_for_now(
    run: RunState, peer: PeerId, reason: str, retry_seconds: float | None = None,
    *, self_test: bool = False,
) -> None:  # fmt: skip
    """Refuse a client in a way that lets it try again later, and end its session."""
    run.send(
        peer,
        Refused(code="protocol", reason=reason, retry_seconds=retry_seconds, self_test=self_test),
    )
    run.commands.append(CloseSession(peer))
    run.note(f"{short(peer)} was refused: {reason}", peer)
