"""When the parts of a step happened, for traces (`swarm_coordinator.tracking`).

Part of the pure core; no rule depends on these times.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm_coordinator.core.events import StepPart, StepTimesRecord
from swarm_coordinator.core.state.steps import StepState

DIGITS = 6
"""Decimal places of a time: microseconds."""


def of_applied_step(step: StepState, now: float) -> StepTimesRecord:
    """Return the times of a step whose last member has applied it `now`."""
    decided = step.closing.decided_at
    parts = tuple(
        part._replace(
            began=round(part.began - decided, DIGITS), ended=round(part.ended - decided, DIGITS)
        )
        for part in _parts(step, now)
    )
    return StepTimesRecord(step.step, parts)


def _parts(step: StepState, now: float) -> Iterator[StepPart]:
    """Yield the parts with their times on the core's clock; the whole before its stages."""
    decided, rounds = step.closing.decided_at, sorted(step.closing.rounds.items())
    if step.complete_at is not None:
        yield StepPart("compute", None, step.began_at, step.complete_at)
    starts = [round_.began_at for _, round_ in rounds]
    starts += [failed.began_at for failed in step.failed_rounds]
    yield StepPart("close", None, min(starts), decided)
    for failed in step.failed_rounds:
        for stage in sorted(failed.stages):
            yield StepPart("failed attempt", stage, failed.began_at, failed.ended_at)
    for stage, round_ in rounds:
        yield StepPart("average", stage, round_.began_at, round_.averaged_at)
    yield StepPart("apply", None, decided, now)
    for stage, at in sorted(step.closing.last_applied_at.items()):
        yield StepPart("apply", stage, decided, at)
