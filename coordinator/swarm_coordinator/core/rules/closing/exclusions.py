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
    """Count a failed attempt against all that may have caused it; exclude a peer at its limit.

    One that is at odds with most owners of its stage sits the step out at once; so does a peer that
    failed alone in an earlier step. Of two others that failed together before, neither is at fault
    for sure: the one whose owner has passed fewer audits sits the step out, and rests if they
    failed together in an earlier step. With `at_once` at the first attempt: one of the two has
    lied, or a peer has named itself.
    """
    if len(parties) == 1:
        _count_alone(run, step, parties[0], now, at_once=at_once)
        return
    one, other = parties
    since = held_up.at_odds_since(run, one, other, now)
    if observe(run, step, one, other, now):
        return
    spent = [peer for peer in parties if held_up.is_spent(run, peer, now)]
    at_limit = parties if at_once or since is not None else spent
    for peer in sorted(at_limit, key=lambda p: _rank(run, p)):
        if exclude(run, step, peer.peer, now):
            if since is not None and since < step.previous_applied_at:
                held_up.record_alone(run, peer, now, rests_at_once=True)
            return


def _count_alone(
    run: RunState, step: StepState, peer: PeerState, now: float, *, at_once: bool
) -> None:
    failures = step.failure_counts[peer.peer] = step.failure_counts.get(peer.peer, 0) + 1
    if (
        at_once
        or failures >= MAX_FAILED_ATTEMPTS
        or held_up.was_alone(run, peer, now)
        or held_up.is_spent(run, peer, now)
    ):
        exclude_alone(run, step, peer, now)


def _rank(run: RunState, peer: PeerState) -> tuple[int, int]:
    """Passed audits, and then seniority: of two the one with the lesser rank sits out."""
    return (run.audits.standings.of(owner_of(peer)).passed, -peer.session)


def observe(run: RunState, step: StepState, one: PeerState, other: PeerState, now: float) -> bool:
    """Remember that an average has failed between two peers; exclude the one that is at odds with
    most owners of its stage, if the other is not. Returns whether one was excluded."""
    held_up.record_at_odds(run, one, other, now)
    odd = [peer for peer in (one, other) if held_up.is_at_odds_with_most(run, peer, now)]
    return len(odd) == 1 and exclude_alone(run, step, odd[0], now)


def exclude_alone(run: RunState, step: StepState, peer: PeerState, now: float) -> bool:
    """Exclude the one peer that keeps a step from closing, and remember it."""
    if not exclude(run, step, peer.peer, now):
        return False
    held_up.record_alone(run, peer, now)
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
