"""Removing a peer from a step that is closing. At most its own round is aborted.

Part of the pure core (docs/decisions, number 0025). The gradient of a member that leaves after all
other members of its round have averaged is part of their sums, so its cells count; where sums are
checked, only after the check. Otherwise its round alone is aborted, and the stages of that round
average anew when the table is complete again. A round is aborted as well if an audit finds wrong
what its average contains.
"""

from __future__ import annotations

from swarm_coordinator.core.rules import state_transfer
from swarm_coordinator.core.rules.auditing import cleared_cells
from swarm_coordinator.core.rules.microbatches import cells
from swarm_coordinator.core.state.close import CloseState, Round
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState, enter_phase
from swarm_coordinator.core.state.steps import FailedRound
from swarm_coordinator.core.state.waiting import stage_names
from swarm_shared.base.backoff import backoff_seconds
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import AbortRound

ABORT_BACKOFF_SECONDS = 0.5
"""Pause after a failed attempt, doubled per attempt up to ABORT_BACKOFF_MAXIMUM_SECONDS. There is
no pause after the loss of a member, which cannot recur."""
ABORT_BACKOFF_MAXIMUM_SECONDS = 5.0
"""Longest pause after a failed attempt."""


def leave(run: RunState, peer: PeerId, reason: str, now: float) -> None:
    """Remove a peer from its round, if it is a member of one."""
    step = run.steps.current
    round_ = None if step is None else step.closing.round_of(peer)
    if step is None or round_ is None:
        return
    if run.phase is RunPhase.APPLYING or round_.completes_without((peer,)):
        step.closing.remove_member(peer)
    else:
        abort(run, round_, reason, now, of_loss=True)


def abort(run: RunState, round_: Round, reason: str, now: float, *, of_loss: bool = False) -> None:
    """Abort one round for all of its members; nothing has been applied."""
    step = run.steps.current
    if step is None or not step.closing.rounds:
        return
    run.broadcast(
        [member for member in round_.members if member in run.peers],
        AbortRound(step=step.step, attempt=round_.attempt, reason=reason[:500]),
    )
    if not of_loss:
        state_transfer.drop_failed_moves(run, round_.switching)
        pause_seconds = backoff_seconds(
            step.closes - 1, ABORT_BACKOFF_SECONDS, ABORT_BACKOFF_MAXIMUM_SECONDS
        )
        step.close_not_before = max(step.close_not_before, now + pause_seconds)
    step.failed_rounds.append(FailedRound(round_.stages, round_.began_at, now))
    step.closing.discard_round(round_)
    for peer, stage in round_.kept.items():
        cells.clear_counted(run, step, peer, (stage,))
    if not step.closing.rounds:
        step.closing = CloseState()
    if run.phase is RunPhase.CLOSING:
        enter_phase(run, RunPhase.COLLECT)
    names = stage_names(round_.stages)
    run.note(f"attempt {step.closes} to close {names} of step {step.step} failed: {reason}")


def abort_all(run: RunState, reason: str, now: float) -> None:
    """Abort every round of the close."""
    step = run.steps.current
    for round_ in step.closing.each_round() if step is not None else ():
        abort(run, round_, reason, now)


def retract(run: RunState, now: float) -> None:
    """Abort the rounds that contain what audits have found wrong since they began: cells that are
    to be cleared, and all that expelled peers have counted."""
    # Taken in any case: retracted cells of a step that is over must not concern the next one.
    retracted, run.audits.retracted = run.audits.retracted, set()
    step = run.steps.current
    if step is None or run.phase is RunPhase.APPLYING:
        return
    for round_ in step.closing.each_round():
        wrong = run.audits.expelled.keys() & (round_.members.keys() | round_.kept.keys())
        if wrong or any(stage in round_.stages for _, stage in retracted):
            abort(run, round_, "an audit found wrong what its average contains", now, of_loss=True)
    for cell in sorted(retracted):
        cleared_cells.clear_cell(run, step, cell)


def rejoin(run: RunState, peer: PeerId, stage: StageIndex, averaged_attempt: int | None) -> None:
    """Restore a lost member that has returned with its round's average: it can still apply."""
    step, round_ = run.steps.current, run.steps.round_of(stage)
    if step is None or round_ is None or run.phase is RunPhase.APPLYING:
        return
    if round_.attempt == averaged_attempt and round_.kept.get(peer) == stage:
        step.closing.restore_member(peer, stage)
