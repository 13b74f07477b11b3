"""Verdicts: which counted cells are audited, and what follows from the auditors' answers.

Design: docs/decisions, number 0036.

Part of the pure core. Whether a cell is audited is drawn when its receipt arrives: its peer has
signed its result by then. Auditors are peers of the same stage and of other owners
(`swarm_coordinator.core.rules.auditing.auditors`). The step does not close before its audits have
ended, up to a limit that follows the step's pace, so that the cells of a peer that lost an audit
are cleared before they are averaged. Values and decisions are in `swarm_coordinator.core.trust`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from swarm_coordinator.core.events import (
    NO_STEP,
    AuditAnswered,
    Ban,
    Persist,
    VerdictRecord,
)
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.auditing import auditors, cleared_cells
from swarm_coordinator.core.state.peers import PeerState, display, owner_of, short
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.step_table import CellKey
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust import chains
from swarm_coordinator.core.trust.audits import AuditOrder, ExactFinding, OpenAudit
from swarm_coordinator.core.trust.whole_audits import CellSums, WholeAudit, sums_of
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.trust.votes import (
    Claim,
    Finding,
    Outcome,
    Vote,
    finding,
    outcome,
)

HOLD_SECONDS = 2.0
"""Shortest time in seconds that audits may delay the close of a step. In a long step they may take
half the time of its work, or four times that time if every cell is audited (`delay_close`)."""

DISPUTE_FACTOR = 4.0
"""Factor by which that limit is longer for disputed audits."""

HIDDEN_FACTOR = 2.0
"""Factor by which that limit is longer for hidden audits: their auditor may first ask a peer of a
neighbouring stage for the inputs without success, and then the audited peer."""

MAX_WITHHELD = 3
"""Steps in which an owner may give its auditors no tensors that fit its receipts, without a passed
audit in between; one more expels it."""

REFUSED_SECONDS = 3600.0
"""Seconds for which an owner that lost its first audit is refused, unless its machine passes a
self-test; a second lost audit bans the owner."""


# ---------------------------------------------------------------- draws and chains


def counted(run: RunState, step: StepState, cell: CellKey, now: float) -> None:
    """Check a newly counted cell against its neighbours, and draw whether it is audited."""
    microbatch = cell[0]
    broken = _breaks_at(step, cell)
    if broken:
        _suspect(run, step, microbatch, broken, now)
    elif not step.audits.open or not _is_audited(step, cell):
        peer = run.peers[step.table[cell].peer]
        checked = run.audits.settings.check_sums
        secret = _whole_secret(run, step, peer, cell[1]) if checked else ""
        drawn = run.audits.draws(owner_of(peer), step.audits)
        if drawn or secret:
            # Hidden unless drawn: a member that saw all of its cells audited would know that it is
            # audited whole.
            hidden = not drawn or run.audits.standings.get(owner_of(peer)).lets_wait
            begin_audit(run, step, audit_of(run, step, cell, now, secret, hidden=hidden), now)
    if step.audits.open:
        _resume_hidden_audits(run, step, cell, now)


def _resume_hidden_audits(run: RunState, step: StepState, cell: CellKey, now: float) -> None:
    """Go on with hidden audits that have waited for this cell."""
    microbatch, stage = cell
    for neighbour in (StageIndex(stage - 1), StageIndex(stage + 1)):
        audit = _open_audit(step, (microbatch, neighbour))
        if audit is not None and audit.hidden and auditors.can_go_on(run, step, audit):
            _proceed(run, step, audit, now)


def _open_audit(step: StepState, cell: CellKey) -> OpenAudit | None:
    """The open audit of a cell as its present holder has counted it; None without one."""
    entry = step.table.get(cell)
    return step.audits.open.get((*cell, entry.peer)) if entry is not None else None


def _is_audited(step: StepState, cell: CellKey) -> bool:
    audit = _open_audit(step, cell)
    return audit is not None and _current(step, audit)


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


def _breaks_at(step: StepState, cell: CellKey) -> tuple[chains.Boundary, ...]:
    """The boundaries at which a cell's receipt contradicts a neighbour's."""
    microbatch, stage = cell
    own = step.table[cell]
    before = step.table.get((microbatch, StageIndex(stage - 1)))
    behind = step.table.get((microbatch, StageIndex(stage + 1)))
    return chains.breaks_at(
        stage, own.transcript, before.transcript if before else None,
        behind.transcript if behind else None,
    )  # fmt: skip


def _suspect(
    run: RunState, step: StepState, microbatch: MicrobatchIndex,
    broken: tuple[chains.Boundary, ...], now: float,
) -> None:  # fmt: skip
    """Audit both sides of each boundary at which two receipts contradict each other."""
    step.audits.broken.setdefault(microbatch, set()).update(broken)
    for stage in sorted({stage for boundary in broken for stage in boundary}):
        if _open_audit(step, (microbatch, stage)) is None:
            begin_audit(run, step, audit_of(run, step, (microbatch, stage), now), now)
    _settle_broken(run, step, microbatch, now)


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


# ---------------------------------------------------------------- answers


def answered(run: RunState, peer: PeerState, event: AuditAnswered, now: float) -> None:
    """Handle an auditor's answer; an answer to no open order is ignored."""
    for step in run.steps.open():
        for audit in step.audits.open.values():
            order = audit.order
            expected = None if order is None else (order.audit, order.auditor, order.owner)
            if order is not None and expected == (event.audit, peer.peer, owner_of(peer)):
                if not _current(step, audit):
                    del step.audits.open[audit.key]
                else:
                    _record(run, step, audit, order, event, now)
                return


def _current(step: StepState, audit: OpenAudit) -> bool:
    """Whether an audit is to go on: the audited cell still counts, or is contested."""
    return audit.confirms or _counts(step, audit)


def _counts(step: StepState, audit: OpenAudit) -> bool:
    """Whether the audited peer still holds the cell with the same receipt."""
    entry = step.table.get((audit.microbatch, audit.stage))
    return entry is not None and (entry.peer, entry.transcript) == (
        audit.peer,
        audit.claim.transcript,
    )


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
    _note_silence(run, order, silent=statement is None)
    if statement is not None and (
        statement.step, statement.microbatch, statement.stage, statement.peer
    ) == (step.step, audit.microbatch, audit.stage, audit.peer):  # fmt: skip
        vote_finding = finding(
            audit.claim, statement, run.audits.settings.tolerance, compared=order.compares
        )
        if vote_finding is None:
            auditors.ask(run, step, audit, run.peers[order.auditor], now, compares=True)
            return
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
    _proceed(run, step, audit, now)


def _keep_sums(
    run: RunState, step: StepState, audit: OpenAudit, order: AuditOrder, statement: AuditStatement,
    envelope: str,
) -> None:  # fmt: skip
    """Enter an auditor's digests into a whole audit, if its result is equal to the bit."""
    whole_audit = step.audits.whole.get((audit.peer, audit.stage))
    sums = sums_of(statement.sums, 1 + (audit.stage in run.tied_stages()))
    if (
        whole_audit is not None
        and sums
        and audit.secret == whole_audit.secret
        and statement.transcript == audit.claim.transcript
    ):
        stated = tuple(CellSums(digests, order.auditor, envelope) for digests in sums)
        whole_audit.add(audit.microbatch, audit.claim.transcript, order.owner, stated)


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


def _proceed(run: RunState, step: StepState, audit: OpenAudit, now: float) -> None:
    """Conclude an audit, or ask the next auditor."""
    votes = audit.ballot
    trusted = run.audits.settings.trusted_owners
    # Owners that have voted and left still count.
    judges = auditors.electorate(run, audit.stage, audit.owner, audit.owner_of_device)
    audit.entitled = len(judges | {vote.owner for vote in votes}) + 1
    result = outcome(votes, audit.entitled, trusted)
    if result is Outcome.OPEN:
        candidates = auditors.candidates(run, audit)
        if candidates:
            auditors.ask_one_of(run, step, audit, candidates, now)
            return
        if _is_to_be_hidden(run, audit):
            _hide(run, step, audit, now)
            return
    del step.audits.open[audit.key]
    _conclude(run, step, audit, result, now)
    _settle_broken(run, step, audit.microbatch, now)


def _is_to_be_hidden(run: RunState, audit: OpenAudit) -> bool:
    """Whether an audit that gets no answer goes on without the audited peer, which may let its
    auditors wait for the inputs; other audits of its owner may have taken all of their time."""
    waited = bool(audit.asked) or run.audits.standings.get(audit.owner).lets_wait
    return waited and not audit.hidden and not audit.votes


def _hide(run: RunState, step: StepState, audit: OpenAudit, now: float) -> None:
    """Begin an audit anew, hidden as all further ones of its owner."""
    run.audits.standings.kept(audit.owner).lets_wait = True
    audit.hidden, audit.order, audit.opened_at = True, None, now
    audit.asked.clear()
    _proceed(run, step, audit, now)


# ---------------------------------------------------------------- outcomes


def _conclude(
    run: RunState, step: StepState, audit: OpenAudit, result: Outcome, now: float
) -> None:
    if audit.within_class and result is Outcome.LOST:
        _deviates(run, step, audit, now)
    elif audit.within_class and result is Outcome.OPEN:
        _passed(run, step, audit, now)  # as within the tolerance
    elif result is Outcome.PASSED:
        _passed(run, step, audit, now)
    elif result is Outcome.LOST:
        reason = f"what it signed for {_cell_text(step, audit)} is not what the microbatch gives"
        _lost(run, step, audit.peer, audit.owner, audit, reason + _distance_text(audit), now)
    elif result is Outcome.WITHHELD:
        _withheld(run, step, audit, now)
    elif audit.votes:
        _undecided(run, step, audit, now)
    else:
        run.audits.unanswered += 1


def _deviates(run: RunState, step: StepState, audit: OpenAudit, now: float) -> None:
    """Take a peer out of its class: most owners that were alike before now compute other bits.

    A second time within half a day counts as a lost audit.
    """
    reason = (
        f"what it computed of {_cell_text(step, audit)} is not to the bit what others compute that "
        f"have computed like it before{_distance_text(audit)}"
    )
    if run.audits.classes.deviates_again(audit.owner, now):
        reason += ", the second time within half a day"
        _lost(run, step, audit.peer, audit.owner, audit, reason, now)
    else:
        run.audits.classes.forget(audit.peer)
        run.note(f"{short(audit.peer)} has left its class: {reason}", audit.peer)
        _clear(run, step, audit)


def _cell_text(step: StepState, audit: OpenAudit) -> str:
    return f"microbatch {audit.microbatch} of step {step.step} in stage {audit.stage}"


def _distance_text(audit: OpenAudit) -> str:
    """The largest distance that was found, as part of a sentence."""
    distances = [vote.distance for vote in audit.votes if vote.distance is not None]
    return f" (relative distance {max(distances):.2g})" if distances else ""


def _passed(run: RunState, step: StepState, audit: OpenAudit, now: float) -> None:
    run.audits.passed += 1
    standing = run.audits.standings.change(audit.owner)
    standing.passed += 1
    standing.withheld = standing.unaudited = 0
    standing.vested_step = max(standing.vested_step, step.step)
    standing.unvested_since = NO_STEP
    for exact in audit.exact_findings.values():
        if exact.finding is Finding.AGREES:
            run.audits.classes.note_agreement(audit.machine, exact.machine)
        elif exact.finding is Finding.DIFFERS:
            run.audits.classes.note_difference(audit.machine, exact.machine)
    for vote in audit.votes:
        if vote.finding is Finding.DIFFERS:
            _lost(
                run, step, vote.peer, vote.owner, audit,
                f"its audit of {_cell_text(step, audit)} contradicts what others compute",
                now,
            )  # fmt: skip
        elif vote.finding is Finding.WITHHELD:
            dispute(run, audit.peer, vote.peer, audit.opened_at, now)


def _withheld(run: RunState, step: StepState, audit: OpenAudit, now: float) -> None:
    """Clear all that a peer has counted in the step when it gave no tensors that fit its receipt,
    and go on without it: it may be the fastest, and would get the same microbatches again.

    Its memory may have been short or its connection slow; but if only the audited cell were
    cleared, a liar would lose no more than what is found.
    """
    standing = run.audits.standings.change(audit.owner)
    if standing.withheld_step != step.step:
        standing.withheld, standing.withheld_step = standing.withheld + 1, step.step
    peer = run.peers.get(audit.peer)
    if peer is not None:
        run.note(
            f"{display(peer)} gave its auditors no tensors of {_cell_text(step, audit)}", peer.peer
        )
        held_up.charge(run, peer, audit.opened_at, now, now)
    for cell in step.table.held_by(audit.peer):
        cleared_cells.clear_cell(run, step, cell)
    run.audits.withholding.add(audit.peer)
    if standing.withheld > MAX_WITHHELD:
        reason = f"its audits failed in {standing.withheld} steps: it gave its auditors no tensors"
        _expel(run, audit.peer, audit.owner, reason, now)


def _undecided(run: RunState, step: StepState, audit: OpenAudit, now: float) -> None:
    """Clear a cell on which no majority of auditors agrees, and charge both sides."""
    for vote in audit.votes:
        if vote.finding is not Finding.AGREES:
            dispute(run, audit.peer, vote.peer, audit.opened_at, now)
    differs = any(vote.finding is Finding.DIFFERS for vote in audit.votes)
    run.note(
        f"{_cell_text(step, audit)} is computed again: its auditors "
        f"{'contradict' if differs else 'got no tensors from'} {short(audit.peer)}, and no "
        f"majority decides",
        audit.peer,
    )
    _clear(run, step, audit)


def _clear(run: RunState, step: StepState, audit: OpenAudit) -> None:
    """Clear what was audited, if it still counts."""
    if _counts(step, audit):
        cleared_cells.clear_cell(run, step, (audit.microbatch, audit.stage))


def dispute(run: RunState, first: PeerId, second: PeerId, since: float, now: float) -> None:
    """Charge two peers that contradict each other equally, if both are attached."""
    peers = run.peers.get(first), run.peers.get(second)
    if peers[0] is not None and peers[1] is not None:
        held_up.dispute(run, peers[0], peers[1], since, now, now)


def _lost(
    run: RunState, step: StepState, peer: PeerId, owner: PeerId, audit: OpenAudit, reason: str,
    now: float,
) -> None:  # fmt: skip
    record = VerdictRecord(
        step=step.step, microbatch=audit.microbatch, stage=audit.stage, peer=peer, owner=owner,
        audited=audit.peer, reason=reason, evidence=audit.evidence(run.audits.settings),
        claim=audit.claim,
    )  # fmt: skip
    convict(run, record, now)


def convict(run: RunState, verdict: VerdictRecord, now: float) -> None:
    """Expel an owner whose statement was found wrong, and record the evidence.

    Further findings until the owner takes part again belong to the same verdict. A refusal for
    another reason does not end them: a liar could hold up the run until it is refused.
    """
    owner, reason = verdict.owner, verdict.reason
    standing = run.audits.standings.change(owner)
    if standing.expelled:
        return
    standing.expelled = True
    record = replace(verdict, void_after=standing.vested_step)
    run.audits.verdicts.append(replace(record, evidence=None, statements=(), claim=None))
    run.commands.append(Persist(record))
    if run.audits.settings.rolls_back and standing.unvested_since:
        since = run.audits.unverified_since or standing.unvested_since
        run.audits.unverified_since = min(since, standing.unvested_since)
    run.audits.classes.forget(verdict.peer)
    banned = _count_lost(run, verdict.peer, owner)
    run.persist_standings()
    for key, lost in banned.items():
        run.commands.append(Ban(key, f"it has lost {lost} audits; the last one: {reason}"))
    if banned:
        sentence = f"{reason}; this is the second lost audit, and it is banned from this run"
    else:
        sentence = (
            f"{reason}; a faulty memory, processor or graphics card does that, too: it may take "
            f"part again once this machine has passed its self-test (`swarm-client doctor "
            f"--self-test`), otherwise in {REFUSED_SECONDS / 60:.0f} min"
        )
    _expel(run, verdict.peer, owner, sentence, now, ends_with_self_test=not banned)


def _count_lost(run: RunState, peer: PeerId, owner: PeerId) -> dict[PeerId, int]:
    """Count a lost audit against an owner and its device; return the lost audits of those of them
    that are to be banned.

    A device may show another owner with each hello, and would begin anew with each.
    """
    banned: dict[PeerId, int] = {}
    for key in dict.fromkeys((owner, peer)):
        standing = run.audits.standings.change(key)
        standing.lost += 1
        standing.passed = standing.withheld = 0
        standing.unvested_since = NO_STEP
        if standing.lost > 1:
            banned[key] = standing.lost
    return banned


def _expel(
    run: RunState, peer: PeerId, owner: PeerId, reason: str, now: float,
    *, ends_with_self_test: bool = False,
) -> None:  # fmt: skip
    """Refuse a device and its owner for an hour; the caller of the event removes the peers, and
    with them their cells. The device may have shown another owner since."""
    held_up.refuse_until(
        run, (peer, owner), now + REFUSED_SECONDS, reason, now,
        ends_with_self_test=ends_with_self_test,
    )  # fmt: skip
    for member in run.peers.values():
        if owner_of(member) == owner or member.peer == peer:
            run.statistics.flag(member.peer, Rejection.LOST_AUDIT, reason)
            run.audits.expelled[member.peer] = reason


def take_expelled(run: RunState) -> list[tuple[PeerId, str]]:
    """The attached peers to be removed, with the reason; the caller removes them."""
    expelled, run.audits.expelled = run.audits.expelled, {}
    return [(peer, reason) for peer, reason in expelled.items() if peer in run.peers]


def take_withholding(run: RunState) -> list[PeerState]:
    """The peers that are to sit the step out, where another one holds their stage; the caller
    releases them."""
    withholding, run.audits.withholding = run.audits.withholding, set()
    peers = [run.peers[peer] for peer in sorted(withholding) if peer in run.peers]
    return [peer for peer in peers if run.peers.has_others(peer)]


# ---------------------------------------------------------------- cleared cells


def _settle_broken(run: RunState, step: StepState, microbatch: MicrobatchIndex, now: float) -> None:
    """Clear a microbatch whose chain is broken at a boundary, once the audits of both sides have
    ended.

    Without a lost audit, either side may have lied to the other, or two unlike machines have
    computed the microbatch: then one path computes all of it again.
    """
    broken = step.audits.broken.get(microbatch, set())
    for boundary in sorted(broken):
        if any(_open_audit(step, (microbatch, stage)) for stage in boundary):
            continue
        broken.discard(boundary)
        before, behind = (step.table.get((microbatch, stage)) for stage in boundary)
        if before is None or behind is None or chains.fits(before.transcript, behind.transcript):
            continue  # a side was cleared, and may have been counted anew
        if run.audits.expelled.keys() & {before.peer, behind.peer}:
            continue  # its cells go with it
        broken.clear()
        if before.peer != behind.peer:
            dispute(run, before.peer, behind.peer, step.began_at, now)
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


# ---------------------------------------------------------------- time


def advance(run: RunState, now: float) -> None:
    """Replace auditors that are gone or do not answer, and end what nothing waits for."""
    for step in run.steps.open():
        if not step.audits.open:
            continue
        for audit in _current_audits(run, step, now):
            if audit.order is not None and _is_overdue(run, step, audit.order, now):
                _note_silence(run, audit.order, silent=True)
                audit.order = None
            if auditors.can_go_on(run, step, audit):
                _proceed(run, step, audit, now)


def _current_audits(run: RunState, step: StepState, now: float) -> Iterator[OpenAudit]:
    """Yield the open audits, and end those whose cell the peer does not hold any more."""
    for key, audit in list(step.audits.open.items()):
        if audit is not step.audits.open.get(key):
            continue
        if _current(step, audit):
            yield audit
        else:
            del step.audits.open[key]
            _settle_broken(run, step, audit.microbatch, now)


def _is_overdue(run: RunState, step: StepState, order: AuditOrder, now: float) -> bool:
    auditor = run.peers.get(order.auditor)
    is_there = auditor is not None and owner_of(auditor) == order.owner
    return not is_there or now > auditors.overdue_at(run, step, order)


def _note_silence(run: RunState, order: AuditOrder, *, silent: bool) -> None:
    """Note whether an auditor that was to compare did: each that lets the run wait does so once."""
    if order.compares:
        run.audits.standings.kept(order.owner).silent = silent


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
        if now < until:
            waiting = True
            continue
        if _is_to_be_hidden(run, audit):
            _hide(run, step, audit, now)
            waiting = True
            continue
        del step.audits.open[audit.key]
        _conclude(run, step, audit, Outcome.OPEN, now)
        _settle_broken(run, step, audit.microbatch, now)
    return waiting or bool(run.audits.expelled)
