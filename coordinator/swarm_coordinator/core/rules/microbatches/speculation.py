"""Speculative leases: microbatches that lag at the end of a step are leased a second time.

Part of the pure core (design: the life of a step). The senders themselves resend most of what lags
(hedges, `swarm_shared.volunteer_rules.delivery`). This module covers the rest: a trainer that is
slow or unreachable. Two copies are then in flight; the first receipt counts, and the peer that
counted the other copy removes it at the close.

The rule is that of Spark's speculative execution: once most of the step is done, a microbatch that
takes one and a half times as long as that part of the step took is a straggler.
"""

from __future__ import annotations

from swarm_coordinator.core.rules.microbatches import cells, leases
from swarm_coordinator.core.state.leases import LeaseState
from swarm_coordinator.core.state.peers import short
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_shared.base.types import MicrobatchIndex, PeerId

SPECULATION_START_FRACTION = 0.75
"""Fraction of the table's cells that must be filled. Before that no trainer is idle, and a second
copy would delay other work."""

SLOWDOWN_FACTOR = 1.5
"""Multiple of the time that SPECULATION_START_FRACTION of the step took after which a microbatch is
a straggler."""

MIN_LAG_SECONDS = 2.0
"""Minimum lag in seconds; several reporting intervals. A step of one second has no stragglers worth
a copy."""

CHECK_INTERVAL_SECONDS = 0.5
"""Seconds between two checks of the open microbatches."""


def lease_stragglers(run: RunState, step: StepState, now: float) -> None:
    """Lease lagging microbatches a second time, each at most once."""
    if now < step.speculation_not_before or not _mostly_done(run, step):
        return
    if step.mostly_done_at is None:
        step.mostly_done_at = now
    most_seconds = step.mostly_done_at - step.began_at
    late_at = step.began_at + max(SLOWDOWN_FACTOR * most_seconds, most_seconds + MIN_LAG_SECONDS)
    if now < late_at:
        return
    step.speculation_not_before = now + CHECK_INTERVAL_SECONDS
    if now < step.close_not_before or not run.peers.has_complete_pipeline():
        return
    since = now - max(MIN_LAG_SECONDS, (SLOWDOWN_FACTOR - 1.0) * most_seconds)
    late = [
        microbatch
        for microbatch, lease in step.leases.items()
        if (lease.resolved_at is None or microbatch in step.owing)
        and lease.granted_at <= since
        and microbatch not in step.speculative_leases
        and not cells.is_done(run, step, microbatch)
    ]
    if late:
        _lease_again(run, step, late, now)


def _mostly_done(run: RunState, step: StepState) -> bool:
    whole_table = len(cells.indices_of_step(run)) * run.manifest.stage_count
    return len(step.table) >= SPECULATION_START_FRACTION * whole_table


def _lease_again(run: RunState, step: StepState, late: list[MicrobatchIndex], now: float) -> None:
    driving = leases.trainer_loads(run, step, ())
    grants: dict[PeerId, list[MicrobatchIndex]] = {}
    for microbatch in late:
        trainer = leases.least_loaded_except(driving, (step.leases[microbatch].trainer,))
        if trainer is not None:
            grants.setdefault(trainer, []).append(microbatch)
    for trainer, granted in grants.items():
        number = leases.send_lease(run, step, trainer, granted, len(driving))
        for microbatch in granted:
            step.speculative_leases[microbatch] = LeaseState(number, trainer, now)
    if grants:
        run.note(
            f"{sum(map(len, grants.values()))} microbatch(es) of step {step.step} lag: "
            f"{', '.join(short(trainer) for trainer in grants)} drive them as well"
        )
