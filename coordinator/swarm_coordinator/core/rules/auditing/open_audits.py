"""Open audits: how one begins, and whether it is to go on.

Part of the pure core (docs/decisions, number 0036).
"""

from __future__ import annotations

from swarm_coordinator.core.rules.auditing import auditors
from swarm_coordinator.core.state.peers import owner_of
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.step_table import CellKey
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust.audits import OpenAudit
from swarm_shared.trust.votes import Claim


def audit_of(
    run: RunState, step: StepState, cell: CellKey, now: float, secret: str = "",
    *, hidden: bool = False,
) -> OpenAudit:  # fmt: skip
    """A new audit of a cell as it counts now; it is not begun."""
    microbatch, stage = cell
    counted_cell = step.table[cell]
    peer = run.peers[counted_cell.peer]
    return OpenAudit(
        auditors.machine_of(peer, stage), microbatch, owner_of(peer),
        Claim(counted_cell.transcript, counted_cell.loss_sum), now, peer.profile.binding,
        secret=secret, hidden=hidden,
    )  # fmt: skip


def begin_audit(run: RunState, step: StepState, audit: OpenAudit, now: float) -> bool:
    """Begin an audit; False if there is no auditor."""
    candidates = auditors.candidates(run, audit)
    if candidates:
        step.audits.open[audit.key] = audit
        auditors.ask_one_of(run, step, audit, candidates, now)
    return bool(candidates)


def of_cell(step: StepState, cell: CellKey) -> OpenAudit | None:
    """The open audit of a cell as its present holder has counted it; None without one."""
    entry = step.table.get(cell)
    return step.audits.open.get((*cell, entry.peer)) if entry is not None else None


def is_current(step: StepState, audit: OpenAudit) -> bool:
    """Whether an audit is to go on: the audited cell still counts, or is contested."""
    return audit.confirms or still_counts(step, audit)


def still_counts(step: StepState, audit: OpenAudit) -> bool:
    """Whether the audited peer still holds the cell with the same receipt."""
    entry = step.table.get((audit.microbatch, audit.stage))
    return entry is not None and (entry.peer, entry.transcript) == (
        audit.peer,
        audit.claim.transcript,
    )
