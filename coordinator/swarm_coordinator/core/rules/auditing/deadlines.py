"""Deadlines: of auditors' answers, and of the audits that a step waits for.

Part of the pure core (docs/decisions, number 0036). A step does not close before its audits have
ended, up to a limit that follows its pace, so that the cells of a peer that lost an audit are
cleared before they are averaged.
"""

from __future__ import annotations

from collections.abc import Iterator

from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.auditing import answers, auditors, broken_chains, open_audits
from swarm_coordinator.core.state.peers import owner_of
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust.audits import AuditOrder, OpenAudit

HOLD_SECONDS = 2.0
"""Shortest time in seconds that audits may delay the close of a step. In a long step they may take
half the time of its work, or four times that time if every cell is audited (`delay_close`)."""

DISPUTE_FACTOR = 4.0
"""Factor by which that limit is longer for disputed audits."""

HIDDEN_FACTOR = 2.0
"""Factor by which that limit is longer for hidden audits: their auditor may first ask a peer of a
neighbouring stage for the inputs without success, and then the audited peer."""


def advance(run: RunState, now: float) -> None:
    """Replace auditors that are gone or do not answer, and end what nothing waits for."""
    for step in run.steps.open():
        if not step.audits.open:
            continue
        for audit in _current_audits(run, step, now):
            if audit.order is not None and _is_overdue(run, step, audit.order, now):
                answers.note_silence(run, audit.order, silent=True)
                audit.order = None
            if auditors.can_go_on(run, step, audit):
                answers.proceed(run, step, audit, now)


def _current_audits(run: RunState, step: StepState, now: float) -> Iterator[OpenAudit]:
    """Yield the open audits, and end those whose cell the peer does not hold any more."""
    for key, audit in list(step.audits.open.items()):
        if audit is not step.audits.open.get(key):
            continue
        if open_audits.is_current(step, audit):
            yield audit
        else:
            del step.audits.open[key]
            broken_chains.settle(run, step, audit.microbatch, now)


def _is_overdue(run: RunState, step: StepState, order: AuditOrder, now: float) -> bool:
    auditor = run.peers.get(order.auditor)
    is_there = auditor is not None and owner_of(auditor) == order.owner
    return not is_there or now > auditors.overdue_at(run, step, order)


def _is_silent(run: RunState, order: AuditOrder) -> bool:
    return run.audits.standings.get(order.owner).silent


def delay_close(run: RunState, step: StepState, complete_at: float, now: float) -> bool:
    """Return whether a step, complete since `complete_at`, waits for its audits; end the audits
    that have reached their limit."""
    wait = max(HOLD_SECONDS, held_up.pace(step) * (0.5 + 3.5 * run.audits.settings.audit_share))
    waiting = False
    for audit in _current_audits(run, step, now):
        disputed = audit.disputed or bool(step.audits.broken.get(audit.microbatch))
        factor = DISPUTE_FACTOR if disputed else HIDDEN_FACTOR if audit.hidden else 1.0
        until = max(complete_at, audit.opened_at) + wait * factor
        order = audit.order
        if order is not None and order.compares and not _is_silent(run, order):
            until = max(until, auditors.overdue_at(run, step, order))
        waiting = now < until or answers.give_up(run, step, audit, now) or waiting
    return waiting or bool(run.audits.expelled)
