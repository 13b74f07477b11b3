"""Draws: which counted cells are audited.

Part of the pure core (docs/decisions, number 0036). Whether a cell is audited is drawn when its
receipt arrives: its peer has signed its result by then.
"""

from __future__ import annotations

from swarm_coordinator.core.rules.auditing import answers, auditors, broken_chains, open_audits
from swarm_coordinator.core.state.peers import PeerState, owner_of
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.step_table import CellKey
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust.whole_audits import WholeAudit
from swarm_shared.base.types import StageIndex


def counted(run: RunState, step: StepState, cell: CellKey, now: float) -> None:
    """Check a newly counted cell against its neighbours, and draw whether it is audited."""
    microbatch = cell[0]
    broken = broken_chains.breaks_at(step, cell)
    if broken:
        broken_chains.suspect(run, step, microbatch, broken, now)
    elif not step.audits.open or not _is_audited(step, cell):
        peer = run.peers[step.table[cell].peer]
        checked = run.audits.settings.check_sums
        secret = _whole_secret(run, step, peer, cell[1]) if checked else ""
        drawn = run.audits.draws(owner_of(peer), step.audits)
        if drawn or secret:
            # Hidden unless drawn: a member that saw all of its cells audited would know that it is
            # audited whole.
            hidden = not drawn or run.audits.standings.get(owner_of(peer)).lets_wait
            open_audits.begin_audit(
                run, step, open_audits.audit_of(run, step, cell, now, secret, hidden=hidden), now
            )
    if step.audits.open:
        _resume_hidden_audits(run, step, cell, now)


def _resume_hidden_audits(run: RunState, step: StepState, cell: CellKey, now: float) -> None:
    """Go on with hidden audits that have waited for this cell."""
    microbatch, stage = cell
    for neighbour in (StageIndex(stage - 1), StageIndex(stage + 1)):
        audit = open_audits.of_cell(step, (microbatch, neighbour))
        if audit is not None and audit.hidden and auditors.can_go_on(run, step, audit):
            answers.proceed(run, step, audit, now)


def _is_audited(step: StepState, cell: CellKey) -> bool:
    audit = open_audits.of_cell(step, cell)
    return audit is not None and open_audits.is_current(step, audit)


def _whole_secret(run: RunState, step: StepState, peer: PeerState, stage: StageIndex) -> str:
    """The secret of a member's whole audit; empty if the member is not audited whole.

    Whether it is is drawn with its first cell, and not in the evaluation, after which nothing is
    averaged.
    """
    if not run.checks_sums or run.phase is RunPhase.EVALUATING:
        return ""
    key = (peer.peer, stage)
    if key not in step.audits.drawn:
        step.audits.drawn.add(key)
        if run.audits.draw() < run.audits.share(owner_of(peer)) / 2:
            step.audits.whole[key] = WholeAudit(run.audits.draw_secret())
    whole_audit = step.audits.whole.get(key)
    # Once all seeds are known, further cells are audited as drawn.
    return whole_audit.secret if whole_audit is not None and whole_audit.has_another_check else ""
