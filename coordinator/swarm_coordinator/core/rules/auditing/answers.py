"""Auditors' answers: statements become votes, until they decide or another auditor is asked.

Part of the pure core (docs/decisions, number 0036).
"""

from __future__ import annotations

from swarm_coordinator.core.events import AuditAnswered
from swarm_coordinator.core.rules.auditing import auditors, broken_chains, open_audits, verdicts
from swarm_coordinator.core.state.peers import PeerState, owner_of
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust.audits import AuditOrder, ExactFinding, OpenAudit
from swarm_coordinator.core.trust.whole_audits import cell_sums
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.trust.votes import Finding, Outcome, Vote, finding, outcome


def answered(run: RunState, peer: PeerState, event: AuditAnswered, now: float) -> None:
    """Handle an auditor's answer; an answer to no open order is ignored."""
    for step in run.steps.open():
        for audit in step.audits.open.values():
            order = audit.order
            expected = None if order is None else (order.audit, order.auditor, order.owner)
            if order is not None and expected == (event.audit, peer.peer, owner_of(peer)):
                if not open_audits.is_current(step, audit):
                    del step.audits.open[audit.key]
                else:
                    _record(run, step, audit, order, event, now)
                return


def _record(
    run: RunState,
    step: StepState,
    audit: OpenAudit,
    order: AuditOrder,
    event: AuditAnswered,
    now: float,
) -> None:
    """Enter a statement as a vote, or have the auditor compare the tensors."""
    audit.order = None
    statement = event.statement
    if statement is not None and (
        statement.step, statement.microbatch, statement.stage, statement.peer
    ) != (step.step, audit.microbatch, audit.stage, audit.peer):  # fmt: skip
        statement = None  # of something else than was asked for
    note_silence(run, order, silent=statement is None)
    if statement is not None:
        vote_finding = finding(
            audit.claim, statement, run.audits.settings.tolerance, compared=order.compares
        )
        if vote_finding is None:
            auditors.ask(run, step, audit, run.peers[order.auditor], now, compares=True)
            return
        if vote_finding is Finding.AGREES:
            _keep_sums(run, step, audit, order, statement, event.envelope)
        _compare_bits(run, audit, order, statement, vote_finding)
        audit.votes.append(
            Vote(
                order.owner,
                order.auditor,
                vote_finding,
                event.envelope,
                statement.distance,
                order.binding,
            )
        )
        run.audits.standings.change(order.owner).audited_work += 1
    proceed(run, step, audit, now)


def _keep_sums(
    run: RunState, step: StepState, audit: OpenAudit, order: AuditOrder, statement: AuditStatement,
    envelope: str,
) -> None:  # fmt: skip
    """Enter what an auditor states of a cell's gradient into a whole audit."""
    whole_audit = step.audits.whole.get((audit.peer, audit.stage))
    if whole_audit is None or audit.secret != whole_audit.secret:
        return
    transcript = audit.claim.transcript
    stated = cell_sums(
        statement, envelope, run.averaged_parts(audit.stage),
        exact=statement.transcript == transcript,
    )  # fmt: skip
    if stated:
        whole_audit.add(audit.microbatch, transcript, order.owner, stated)


def _compare_bits(
    run: RunState,
    audit: OpenAudit,
    order: AuditOrder,
    statement: AuditStatement,
    vote_finding: Finding,
) -> None:
    """Record whether an auditor's result is equal to the bit.

    If the two machines were alike and it is not, the audit is decided within the class. Once an
    auditor finds a difference beyond the tolerance, all owners decide as in any other audit.
    """
    auditor = run.peers[order.auditor]
    exact_finding = finding(audit.claim, statement, 0.0, compared=True)
    assert exact_finding is not None, "only a comparison is missing"
    alike = auditors.is_alike(run, audit, auditor)
    audit.exact_findings[order.auditor] = ExactFinding(
        auditors.machine_of(auditor, audit.stage), exact_finding, alike
    )
    if vote_finding is not Finding.AGREES:
        audit.within_class = False
    elif alike and exact_finding is not Finding.AGREES and not audit.disputed:
        audit.within_class = True


def proceed(run: RunState, step: StepState, audit: OpenAudit, now: float) -> None:
    """Conclude an audit, or ask the next auditor."""
    votes = audit.ballot
    trusted = run.audits.settings.trusted_owners
    # Owners that have voted and left still count.
    judges = auditors.electorate(run, audit.stage, audit.owner, audit.owner_of_device)
    audit.entitled = len(judges | {vote.owner for vote in votes}) + 1
    result = outcome(votes, audit.entitled, trusted)
    if result is not Outcome.OPEN:
        _end(run, step, audit, result, now)
    elif candidates := auditors.candidates(run, audit):
        auditors.ask_one_of(run, step, audit, candidates, now)
    else:
        give_up(run, step, audit, now)


def give_up(run: RunState, step: StepState, audit: OpenAudit, now: float) -> bool:
    """Begin an audit that gets no answer anew, or end it undecided; return whether it goes on.

    It begins anew once, without the audited peer, which may let its auditors wait for the inputs;
    other audits of its owner may have taken all of their time. So do all further ones of the owner.
    """
    standing = run.audits.standings.kept(audit.owner)
    waited = bool(audit.asked) or standing.lets_wait
    if not waited or audit.hidden or audit.votes:
        _end(run, step, audit, Outcome.OPEN, now)
        return False
    standing.lets_wait = True
    audit.hidden, audit.order, audit.opened_at = True, None, now
    audit.asked.clear()
    proceed(run, step, audit, now)
    return True


def _end(run: RunState, step: StepState, audit: OpenAudit, result: Outcome, now: float) -> None:
    del step.audits.open[audit.key]
    verdicts.conclude(run, step, audit, result, now)
    broken_chains.settle(run, step, audit.microbatch, now)


def note_silence(run: RunState, order: AuditOrder, *, silent: bool) -> None:
    """Note whether an auditor that was to compare did: each that lets the run wait does so once."""
    if order.compares:
        run.audits.standings.kept(order.owner).silent = silent
