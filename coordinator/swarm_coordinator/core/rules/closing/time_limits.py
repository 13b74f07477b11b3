"""Time limits of a close: overdue rounds and applies end without their silent members.

Part of the pure core (docs/decisions, number 0035). Two limits bound a round:

1. Once most members of a stage have answered, the last ones get a multiple of the time that most
   needed (`held_up.deadline`).
2. Where most are late, a round may take `limits.lease_seconds`, or twice as long as the slowest
   round of the previous step if that is more. Each attempt of the step that timed out doubles this.
"""

from __future__ import annotations

from swarm_coordinator.core.rules import held_up, membership, round_membership
from swarm_coordinator.core.rules.closing import exclusions
from swarm_coordinator.core.state.close import Round
from swarm_coordinator.core.state.peers import PeerState, short
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import PeerId

USUAL_FACTOR = 2.0
"""Multiple of the time of the last step's slowest round after which a round is overdue."""

MAX_TIME_FACTOR = 32
"""Multiple of `limits.lease_seconds` that no round exceeds."""


def time_out(run: RunState, now: float) -> None:
    """End a round or an apply that exceeds its time limit, without its silent members."""
    step = run.steps.current
    if step is None or not step.closing.rounds:
        return
    closing, limit = step.closing, run.manifest.limits.lease_seconds
    if run.phase is RunPhase.APPLYING:
        _time_out_apply(run, step, now)
        return
    # Large states take long over slow uplinks: the limit follows the step before, and doubles with
    # each attempt that timed out.
    usual = max(limit, USUAL_FACTOR * run.history.averaging_seconds)
    longest = min(usual * 2 ** min(step.timeouts, 5), limit * MAX_TIME_FACTOR)
    late = [r for r in closing.each_round() if r.awaited and now - r.asked_at > longest]
    step.timeouts += bool(late)
    for round_ in late:
        _proceed_without_silent(run, step, round_, now)
    for round_ in closing.each_round():
        if round_.most_reported_at and round_.awaited:
            _proceed_without_last(run, step, round_, now)


def _time_out_apply(run: RunState, step: StepState, now: float) -> None:
    """Continue without members that do not apply; a member that shares its stage has less time.

    The last holder of a stage has the whole time limit: without it the stage would be lost.
    """
    closing = step.closing
    most_at = closing.most_applied_at
    over = now - closing.decided_at > run.manifest.limits.lease_seconds
    if not over and (
        most_at is None or now <= held_up.deadline(run, step, closing.decided_at, most_at)
    ):
        return
    for peer_id in sorted(closing.members.keys() - closing.applied.keys()):
        shared = closing.members[peer_id] in closing.last_applied_at
        if not (over or shared):
            continue
        run.note(f"{short(peer_id)} did not apply step {step.step} in time", peer_id)
        peer = run.peers[peer_id]
        charge_late_apply(run, step, peer, now)
        if not over:
            held_up.record_held_up_alone(run, peer, now)
        closing.remove_member(peer_id)


def charge_late_apply(run: RunState, step: StepState, peer: PeerState, now: float) -> None:
    """Charge a member the time by which it applies later than the others, if another member of its
    stage has applied."""
    closing = step.closing
    if closing.members[peer.peer] in closing.last_applied_at:
        # Without most of the members, what applying takes here is unknown.
        most_at = closing.most_applied_at or closing.decided_at
        free = held_up.uncharged_until(step, closing.decided_at, most_at)
        held_up.charge(run, peer, free, now, now)


def charge_late_report(
    run: RunState, step: StepState, round_: Round, peer: PeerState, now: float
) -> None:
    """Charge a member the time by which its report is later than those of most members of its
    stage."""
    most_at = round_.most_reported_at.get(round_.members[peer.peer])
    if most_at is not None and peer.peer in round_.awaited:
        free = held_up.uncharged_until(step, round_.asked_at, most_at)
        if free < now:
            held_up.charge(run, peer, free, now, now)


def give_up_catching_up(run: RunState, now: float) -> None:
    """Sync a peer anew that has not applied a missed step within the time of an ordinary apply."""
    limit = run.manifest.limits.lease_seconds
    for peer, transfer in list(run.peers.syncing.items()):
        missed = transfer.missed_apply
        if missed is not None and now - transfer.asked_at > limit:
            reason = f"it did not apply step {missed} in time"
            membership.resync(run, run.peers[peer], reason, now)


def _proceed_without_last(run: RunState, step: StepState, round_: Round, now: float) -> None:
    """Exclude the last members of a stage, whose others have all averaged in far less time."""
    last: list[PeerId] = []
    for peer_id in sorted(round_.awaited):
        most_at = round_.most_reported_at.get(round_.members[peer_id])
        if most_at is None or now <= held_up.deadline(run, step, round_.asked_at, most_at):
            return  # it has time left, so that the round cannot end yet
        last.append(peer_id)
    if round_.completes_without(last):
        _exclude_silent(run, step, round_, last, now)
    elif round_.unchecked:
        _abort_without(run, step, round_, last, now)


def _exclude_silent(
    run: RunState, step: StepState, round_: Round, silent: list[PeerId], now: float
) -> None:
    """Let a round end without its silent members, and charge them for the wait."""
    round_.awaited.difference_update(silent)
    for peer_id in silent:
        _charge_silent(run, step, round_, peer_id, now)
        _exclude_late(run, step, round_, peer_id, now)


def _exclude_late(
    run: RunState, step: StepState, round_: Round, peer_id: PeerId, now: float
) -> None:
    """Exclude a member that has not answered.

    Where most members of its stage have answered, it is also recorded that the member held up the
    step alone.
    """
    if round_.members[peer_id] in round_.most_reported_at:
        exclusions.exclude_alone(run, step, run.peers[peer_id], now)
    else:
        exclusions.exclude(run, step, peer_id, now)


def _charge_silent(
    run: RunState, step: StepState, round_: Round, peer_id: PeerId, now: float
) -> None:
    """Charge a silent member for the wait.

    If only a minority of its stage has reported, the wait is charged as a dispute with one of these
    members: they may have reported without averaging.
    """
    peer, stage = run.peers[peer_id], round_.members[peer_id]
    most_at = round_.most_reported_at.get(stage)
    free = held_up.uncharged_until(step, round_.asked_at, most_at or round_.asked_at)
    if most_at is not None:
        held_up.charge(run, peer, free, now, now)
        return
    other = min(p for p in round_.answered if round_.members.get(p) == stage)
    held_up.dispute(run, peer, run.peers[other], free, now, now)


def _proceed_without_silent(run: RunState, step: StepState, round_: Round, now: float) -> None:
    """Exclude the silent members of an overdue round, or abort it.

    A stage that is silent as a whole is slow. A member that is silent while others of its stage
    have reported is stuck.
    """
    done = {stage for peer, stage in round_.members.items() if peer not in round_.awaited}
    silent = sorted(peer for peer in round_.awaited if round_.members[peer] in done)
    if round_.completes_without(silent):
        _exclude_silent(run, step, round_, silent, now)
        return
    _abort_without(run, step, round_, silent, now)


def _abort_without(
    run: RunState, step: StepState, round_: Round, silent: list[PeerId], now: float
) -> None:
    """Abort an overdue round, exclude its silent members, and charge them for the wait."""
    for peer in silent:
        _charge_silent(run, step, round_, peer, now)
    round_membership.abort(run, round_, "it took too long", now)
    for peer in silent:
        _exclude_late(run, step, round_, peer, now)
