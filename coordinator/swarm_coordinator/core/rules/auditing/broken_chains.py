"""Broken chains: microbatches whose receipts contradict each other at a boundary of stages.

Part of the pure core (docs/decisions, number 0036). Both sides are audited; unless one of them
loses, all stages compute the microbatch again.
"""

from __future__ import annotations

from swarm_coordinator.core.rules.auditing import cleared_cells, open_audits, verdicts
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.step_table import CellKey
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust import chains
from swarm_shared.base.types import MicrobatchIndex, StageIndex


def breaks_at(step: StepState, cell: CellKey) -> tuple[chains.Boundary, ...]:
    """The boundaries at which a cell's receipt contradicts a neighbour's."""
    microbatch, stage = cell
    own = step.table[cell]
    before = step.table.get((microbatch, StageIndex(stage - 1)))
    behind = step.table.get((microbatch, StageIndex(stage + 1)))
    return chains.breaks_at(
        stage, own.transcript, before.transcript if before else None,
        behind.transcript if behind else None,
    )  # fmt: skip


def suspect(
    run: RunState, step: StepState, microbatch: MicrobatchIndex,
    broken: tuple[chains.Boundary, ...], now: float,
) -> None:  # fmt: skip
    """Audit both sides of each boundary at which two receipts contradict each other."""
    step.audits.broken.setdefault(microbatch, set()).update(broken)
    for stage in sorted({stage for boundary in broken for stage in boundary}):
        if open_audits.of_cell(step, (microbatch, stage)) is None:
            open_audits.begin_audit(
                run, step, open_audits.audit_of(run, step, (microbatch, stage), now), now
            )
    settle(run, step, microbatch, now)


def settle(run: RunState, step: StepState, microbatch: MicrobatchIndex, now: float) -> None:
    """Clear a microbatch whose chain is broken at a boundary, once the audits of both sides have
    ended.

    Without a lost audit, either side may have lied to the other, or two unlike machines have
    computed the microbatch: then one path computes all of it again.
    """
    broken = step.audits.broken.get(microbatch, set())
    for boundary in sorted(broken):
        if any(open_audits.of_cell(step, (microbatch, stage)) for stage in boundary):
            continue
        broken.discard(boundary)
        before, behind = (step.table.get((microbatch, stage)) for stage in boundary)
        if before is None or behind is None or chains.fits(before.transcript, behind.transcript):
            continue  # a side was cleared, and may have been counted anew
        if run.audits.expelled.keys() & {before.peer, behind.peer}:
            continue  # its cells go with it
        broken.clear()
        if before.peer != behind.peer:
            verdicts.dispute(run, before.peer, behind.peer, step.began_at, now)
        _compute_again(run, step, microbatch, boundary)
        break


def _compute_again(
    run: RunState, step: StepState, microbatch: MicrobatchIndex, boundary: chains.Boundary
) -> None:
    """Clear a microbatch in all stages, and note why."""
    run.note(
        f"microbatch {microbatch} of step {step.step} is computed again: the receipts of stages "
        f"{boundary[0]} and {boundary[1]} contradict each other"
    )
    for stage in run.stage_indices:
        cleared_cells.clear_cell(run, step, (microbatch, stage))
