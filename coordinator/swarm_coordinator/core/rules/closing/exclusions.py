"""Excluding peers from a step that they keep from closing.

Part of the pure core (docs/decisions, numbers 0016 and 0035).
"""

from __future__ import annotations

from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.rules.round_membership import ABORT_BACKOFF_SECONDS
from swarm_coordinator.core.state.peers import PeerState, owner_of, short
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import PeerId

MAX_FAILED_ATTEMPTS = 3
"""Failed attempts of a step by one peer alone after which the step closes without it."""


def count_failure(
    run: RunState, step: StepState, parties: list[PeerState], now: float, *, at_once: bool = False
) -> None:
    """Count a failed attempt against the one or two peers that may have caused it, and exclude a
    peer that has reached its limit.

    One peer is excluded after MAX_FAILED_ATTEMPTS, or at once if it failed alone in an earlier step
    of the last hour, if its budget is spent, or with `at_once`: it has named itself.

    Of two peers, the one that is at odds with most owners of its stage is excluded at once. If that
    is neither or both, nothing shows which is at fault. One of them is excluded if they failed
    together before within an hour, or with `at_once` (one of them has lied): the one whose owner
    has passed fewer audits. It is also refused for a while if they failed together in an earlier
    step. Otherwise a peer whose budget is spent is excluded.
    """
    if len(parties) == 1:
        _count_alone(run, step, parties[0], now, at_once=at_once)
        return
    first, second = parties
    since = held_up.at_odds_since(run, first, second, now)
    if record_failed_average(run, step, first, second, now):
        return
    spent = [peer for peer in parties if held_up.is_spent(run, peer, now)]
    at_limit = parties if at_once or since is not None else spent
    for peer in sorted(at_limit, key=lambda p: _rank(run, p)):
        if exclude(run, step, peer.peer, now):
            if since is not None and since < step.previous_applied_at:
                held_up.record_held_up_alone(run, peer, now, rests_at_once=True)
            return


def _count_alone(
    run: RunState, step: StepState, peer: PeerState, now: float, *, at_once: bool
) -> None:
    failures = step.failure_counts[peer.peer] = step.failure_counts.get(peer.peer, 0) + 1
    if (
        at_once
        or failures >= MAX_FAILED_ATTEMPTS
        or held_up.has_held_up_alone(run, peer, now)
        or held_up.is_spent(run, peer, now)
    ):
        exclude_alone(run, step, peer, now)


def _rank(run: RunState, peer: PeerState) -> tuple[int, int]:
    """Passed audits, then seniority: of two peers, the one with the lower rank is excluded."""
    return (run.audits.standings.get(owner_of(peer)).passed, -peer.session)


def record_failed_average(
    run: RunState, step: StepState, first: PeerState, second: PeerState, now: float
) -> bool:
    """Record that an average has failed between two peers; return whether one was excluded for it:
    the one that is at odds with most owners of its stage, if the other is not."""
    held_up.record_at_odds(run, first, second, now)
    odd = [peer for peer in (first, second) if held_up.is_at_odds_with_most(run, peer, now)]
    return len(odd) == 1 and exclude_alone(run, step, odd[0], now)


def exclude_alone(run: RunState, step: StepState, peer: PeerState, now: float) -> bool:
    """Exclude a peer that alone keeps a step from closing, and record that it did so."""
    if not exclude(run, step, peer.peer, now):
        return False
    held_up.record_held_up_alone(run, peer, now)
    return True


def exclude(run: RunState, step: StepState, peer_id: PeerId, now: float) -> bool:
    """Let the step close without this peer; False if it is the last of its stage."""
    peer = run.peers.get(peer_id)
    if peer is None or peer_id in run.peers.excluded or not run.peers.has_others(peer):
        return False
    # What failed cannot fail again: the others need no long pause.
    step.close_not_before = min(step.close_not_before, now + ABORT_BACKOFF_SECONDS)
    release(run, peer, Release.STEP, now)
    run.note(
        f"{short(peer_id)} keeps step {step.step} from closing and is excluded from it", peer_id
    )
    return True
