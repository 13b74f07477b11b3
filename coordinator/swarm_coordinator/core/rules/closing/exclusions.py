"""Excluding peers from a step that they keep from closing.

Part of the pure core (docs/decisions, numbers 0016 and 0035).
"""

from __future__ import annotations

from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.release import Release, release
from swarm_coordinator.core.rules.round_membership import ABORT_BACKOFF_SECONDS
from swarm_coordinator.core.state.peers import PeerState, short
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import PeerId

MAX_FAILED_ATTEMPTS = 3
"""Failed attempts of one step attributed to a peer after which the step closes without it."""


def count_failure(
    run: RunState, step: StepState, parties: list[PeerState], now: float, *, at_once: bool = False
) -> None:
    """Count a failed attempt against all that may have caused it; exclude a peer at its limit.

    Of two that name each other neither is more credible: both sit the step out if others of the
    stage remain, and else the one that has held up the run for longer. With `at_once` at the first
    attempt: one of the two has lied, or a peer has named itself. But one that is at odds with most
    owners of its stage, where the other is not, sits the step out at once and alone; so does a peer
    that failed alone in an earlier step.
    """
    if len(parties) == 2:
        if observe(run, step, parties[0], parties[1], now):
            return
    elif held_up.was_alone(run, parties[0], now):
        exclude_alone(run, step, parties[0], now)
        return
    for peer in parties:
        step.failure_counts[peer.peer] = step.failure_counts.get(peer.peer, 0) + 1
    apart = (
        at_once
        or max(step.failure_counts[peer.peer] for peer in parties) >= MAX_FAILED_ATTEMPTS
        or (len(parties) == 2 and held_up.in_dispute(run, parties[0], parties[1], now))
    )
    at_limit = [peer for peer in parties if apart or held_up.is_spent(run, peer, now)]
    at_limit.sort(
        key=lambda peer: (held_up.held_seconds(run, peer, now), peer.session, peer.peer),
        reverse=True,
    )
    for peer in at_limit:
        if len(parties) == 1:
            exclude_alone(run, step, peer, now)
        else:
            exclude(run, step, peer.peer, now)


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
    if peer is None or peer.stage is None or peer_id in run.peers.excluded:
        return False
    if all(p is peer for p in run.peers.ready(peer.stage)):
        return False
    # What failed cannot fail again: the others need no long pause.
    step.close_not_before = min(step.close_not_before, now + ABORT_BACKOFF_SECONDS)
    release(run, peer, Release.STEP, now)
    run.note(
        f"{short(peer_id)} keeps step {step.step} from closing and is excluded from it", peer_id
    )
    return True
