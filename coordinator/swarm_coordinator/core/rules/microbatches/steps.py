"""The steps that microbatches are leased for: the next one, the one after it under staleness, and
the evaluation.

Part of the pure core (docs/decisions, number 0024).
"""

from __future__ import annotations

from swarm_coordinator.core.rules.microbatches import cells, leases
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState, enter_phase
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import MicrobatchIndex, Step


def begin_step(run: RunState, now: float) -> None:
    """Open the next step and lease all of its microbatches to the trainers."""
    enter_phase(run, RunPhase.COLLECT)
    step = run.steps.ahead or _new_step(run, Step(run.history.version + 1), now)
    step.previous_applied_at = now
    run.steps.current, run.steps.ahead, run.steps.began = step, None, True
    _start(run, step, now)


def begin_ahead(run: RunState, step: StepState, now: float) -> None:
    """Under staleness 1, open the following step once this one no longer fills the pipelines.

    Delayed parameter updates; docs/decisions, number 0024.
    """
    training = run.manifest.training
    if not training.staleness or run.steps.ahead is not None:
        return
    all_cells = training.microbatches_per_step * run.manifest.stage_count
    carried = len(run.peers.working(0)) * run.manifest.limits.stage_queue // 2
    if (
        step.step >= training.steps
        or run.stop_requested_at is not None
        or all_cells - len(step.table) > carried * run.manifest.stage_count
    ):
        return
    run.steps.ahead = _new_step(run, Step(step.step + 1), now)
    _start(run, run.steps.ahead, now)


def begin_evaluation(run: RunState, now: float) -> None:
    """Open the evaluation and lease all held-out microbatches."""
    enter_phase(run, RunPhase.EVALUATING)
    # The step that is computed with the newest parameters.
    number = Step(run.history.version + 1 + run.manifest.training.staleness)
    run.steps.current = _new_step(run, number, now)
    _start(run, run.steps.current, now)


def _new_step(run: RunState, step: Step, now: float) -> StepState:
    microbatches = {MicrobatchIndex(index) for index in cells.indices_of_step(run)}
    return StepState(step=step, began_at=now, previous_applied_at=now, unsettled=microbatches)


def _start(run: RunState, step: StepState, now: float) -> None:
    """Enter what has been reported of a step already, and lease the rest."""
    for peer in run.peers.values():
        cells.commit_early_receipts(run, peer, now)
    leases.lease_open_microbatches(run, step, now)
