"""Whole audits in a close: a member's sum is compared with what auditors computed of its cells.

Part of the pure core (docs/decisions, number 0036). Which members are audited whole is drawn with
their first cell (`swarm_coordinator.core.rules.auditing.draws`), or follows from what they put in
(`swarm_coordinator.core.rules.closing.outsized_parts`). Where one auditor's digests contradict the
member, either may have lied: the round is aborted, and other owners audit the same cells until as
many as decide an audit have stated the same. A member that leaves meanwhile is judged in its
absence.

A member's part is compared under a seed of its own, which its auditors learn with their orders. The
sums are checked under another one first, which is drawn after they are exchanged: an auditor is a
member of the round, too, and could hand out a false sum whose digest is right under a seed that it
knows. Where no member is audited whole the second seed is drawn as well, so that none knows whether
one is. Every attempt to close has seeds of its own: otherwise one liar could fail the first
attempt, and another one put anything into the second.
"""

from __future__ import annotations

from collections.abc import Iterable

from swarm_coordinator.core.events import VerdictRecord
from swarm_coordinator.core.rules.auditing import auditors, cleared_cells, open_audits, verdicts
from swarm_coordinator.core.state.close import Round
from swarm_coordinator.core.state.peers import owner_of, short
from swarm_coordinator.core.state.phases import RunPhase
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.step_table import Cell, CellKey, StepTable
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust.audits import OpenAudit
from swarm_coordinator.core.trust.sums import RoundSums, SignedSums
from swarm_coordinator.core.trust.whole_audits import (
    CellSums,
    Contest,
    Sums,
    WholeAudit,
    are_alike,
    decided,
    is_sum,
    put_in,
    total,
)
from swarm_shared.base.types import MicrobatchIndex, PeerId, StageIndex
from swarm_shared.identity.linear_digest import check_seed
from swarm_shared.trust.evidence import sum_evidence
from swarm_shared.trust.votes import MAX_VOTERS, Claim

ENOUGH_AUDITORS = 2
"""Auditors of each cell that are enough to prove what a member has put in, if they agree: a single
one could collude with the member, and state digests that add up."""

MAX_CHECKED = 8
"""Most whole audits that one attempt to close compares: each takes a check of the sums."""

Member = tuple[PeerId, StageIndex]
StatedCells = dict[MicrobatchIndex, dict[PeerId, CellSums]]
"""The digests that auditors have stated of each cell as it counts, by the auditor's owner."""


def begin_checks(run: RunState, step: StepState, round_: Round, check: RoundSums) -> None:
    """Choose the seeds of a round's checks: one that is drawn, then those of whole audits."""
    book = run.audits
    audited = [
        (not whole_audit.ratio, book.draw(), whole_audit.seed)
        for (peer, stage), whole_audit in step.audits.whole.items()
        if round_.members.get(peer) == stage and whole_audit.attempt is None
    ]
    chosen = [seed for *_, seed in sorted(audited)[:MAX_CHECKED]]
    check.secret = book.draw_secret()
    check.seeds = (check_seed(check.secret, 0), *(chosen or [book.draw_secret()]))


def reveal(step: StepState, round_: Round, seed: str) -> None:
    """Note that the members of a round learn a seed; the next attempt needs another one."""
    for whole_audit in step.audits.whole.values():
        if whole_audit.seed == seed:
            whole_audit.attempt = round_.attempt


def begin_contests(
    run: RunState, step: StepState, round_: Round, check: RoundSums, now: float
) -> list[PeerId]:
    """The members whose sums under the present seed, their own, are not those of their audited
    cells; their audits are repeated."""
    wrong: list[PeerId] = []
    for member, whole_audit in step.audits.whole.items():
        peer, stage = member
        if round_.members.get(peer) != stage or whole_audit.seed != check.seed:
            continue
        stated_cells = [
            _stated_of(step, member, whole_audit, microbatch)
            for microbatch in cells_of(step.table, member)
        ]
        if not stated_cells or not all(stated_cells):
            continue
        cells = [next(iter(by_owner.values())) for by_owner in stated_cells]
        if not is_sum(cells, check.totals[peer].statement, run.audits.settings.tolerance):
            whole_audit.contest = contest_of(run, step, member, check.totals[peer], now)
            wrong.append(peer)
    return wrong


def contest_of(
    run: RunState, step: StepState, member: Member, signed: SignedSums, now: float
) -> Contest:
    """The contest of what a member has stated."""
    peer, stage = member
    state = run.peers[peer]
    claims = {m: _claim_of(step.table[m, stage]) for m in cells_of(step.table, member)}
    return Contest(
        signed, auditors.machine_of(state, stage), owner_of(state), state.profile.binding, claims,
        now,
    )  # fmt: skip


def cells_of(table: StepTable, member: Member) -> tuple[MicrobatchIndex, ...]:
    """The microbatches that a member has counted in its stage, in ascending order."""
    peer, stage = member
    return tuple(sorted(m for m, held_stage in table.held_by(peer) if held_stage == stage))


def _claim_of(cell: Cell) -> Claim:
    return Claim(cell.transcript, cell.loss_sum)


def _stated_of(
    step: StepState, member: Member, whole_audit: WholeAudit, microbatch: MicrobatchIndex
) -> dict[PeerId, CellSums]:
    """The digests that auditors have stated of a cell as it counts, by the auditor's owner."""
    return whole_audit.of_receipt(microbatch, step.table[microbatch, member[1]].transcript)


def renew(run: RunState, step: StepState, now: float) -> bool:
    """Prepare whole audits whose seed a failed attempt has revealed for the next attempt; return
    whether cells are audited again for that."""
    if run.phase is not RunPhase.COLLECT:
        return False
    renewed = False
    for member, whole_audit in list(step.audits.whole.items()):
        stage = member[1]
        if (
            whole_audit.attempt is None
            or whole_audit.contest is not None
            or run.steps.round_of(stage)
        ):
            continue
        if whole_audit.has_another_check:
            whole_audit.begin_another_check()
        else:
            whole_audit = step.audits.whole[member] = WholeAudit(run.audits.draw_secret())
        for microbatch in cells_of(step.table, member):
            if not _stated_of(step, member, whole_audit, microbatch):
                renewed = _audit_anew(run, step, (microbatch, stage), whole_audit, now) or renewed
    return renewed


def _audit_anew(
    run: RunState, step: StepState, cell: CellKey, whole_audit: WholeAudit, now: float
) -> bool:
    """Audit a cell under the secret of a whole audit; False if it is audited so already, or there
    is no auditor."""
    audit = open_audits.audit_of(run, step, cell, now, whole_audit.secret, hidden=True)
    open_audit = step.audits.open.get(audit.key)
    if open_audit is not None and (open_audit.votes or open_audit.secret == whole_audit.secret):
        return False
    return open_audits.begin_audit(run, step, audit, now)


# ---------------------------------------------------------------- contests


def settle_contests(run: RunState, step: StepState, now: float) -> bool:
    """Conclude the contests of a step that has been complete; return whether the close waits for
    one of them."""
    if step.complete_at is None or run.phase is not RunPhase.COLLECT:
        return False
    waiting = False
    for member, whole_audit in list(step.audits.whole.items()):
        contest = whole_audit.contest
        if contest is None:
            continue
        stated = {
            m: whole_audit.of_receipt(m, claim.transcript) for m, claim in contest.claims.items()
        }
        if _proceed(run, step, member, whole_audit, contest, stated, now):
            waiting = True
        else:
            whole_audit.contest = None
    return waiting or bool(run.audits.expelled)


def _proceed(
    run: RunState, step: StepState, member: Member, whole_audit: WholeAudit, contest: Contest,
    stated: StatedCells, now: float,
) -> bool:  # fmt: skip
    """Conclude a contest, or have its cells audited once more; return whether the close waits."""
    stage = member[1]
    for microbatch, by_owner in stated.items():
        whole_audit.asked.setdefault(
            microbatch, {cell_sums.auditor: owner for owner, cell_sums in by_owner.items()}
        )
    judges = _judges(run, member, whole_audit, contest, stated)
    enough = min(ENOUGH_AUDITORS, judges)
    if _is_confirmed(run, contest, stated, enough):
        _note_proved(run, stage, whole_audit)
        return False
    needed = min(judges + 1, MAX_VOTERS) // 2 + 1
    claimed = put_in(contest.stated.statement, run.averaged_parts(stage))
    sums = decided(_exact(stated), claimed, needed, run.audits.settings.trusted_owners)
    if sums is not None:
        _conclude(run, step, member, whole_audit, _exact(stated), sums, now)
        return False
    # Cells that few have audited come first, so that all are audited at the same time.
    lacking = [m for m, by_owner in stated.items() if len(by_owner) < enough]
    if _audit_further(run, step, whole_audit, contest, lacking or list(contest.claims), now):
        return True
    if not all(stated.values()):
        run.note(
            f"what {short(member[0])} put into the average of step {step.step} is not proved: not "
            "all of what it counted found an auditor",
            member[0],
        )
    elif lacking and _is_confirmed(run, contest, stated, 1):
        _note_proved(run, stage, whole_audit)
    else:
        _undecided(run, step, member, stated, contest, now)
    return False


def _judges(
    run: RunState, member: Member, whole_audit: WholeAudit, contest: Contest, stated: StatedCells
) -> int:
    """How many owners may judge a member, those included that have done it and left."""
    peer, stage = member
    voters = {owner for by_owner in stated.values() for owner in by_owner}
    devices = {peer: contest.owner}
    for asked in whole_audit.asked.values():
        devices.update(asked)
    return len(auditors.electorate(run, stage, contest.owner, devices) | voters)


def _audit_further(
    run: RunState, step: StepState, whole_audit: WholeAudit, contest: Contest,
    microbatches: Iterable[MicrobatchIndex], now: float,
) -> bool:  # fmt: skip
    """Have these cells audited by one more owner each; return whether one of them is."""
    waiting = False
    for microbatch in microbatches:
        audit = OpenAudit(
            contest.machine, microbatch, contest.owner, contest.claims[microbatch], now,
            contest.binding, secret=whole_audit.secret, asked=whole_audit.asked[microbatch],
            confirms=True, hidden=True,
        )  # fmt: skip
        if audit.key in step.audits.open or open_audits.begin_audit(run, step, audit, now):
            waiting = True
    return waiting


def _is_confirmed(run: RunState, contest: Contest, stated: StatedCells, enough: int) -> bool:
    """Whether enough auditors of each cell state the same of it, and these add up to what the
    member states."""
    tolerance = run.audits.settings.tolerance
    cells = [list(by_owner.values()) for by_owner in stated.values()]
    return (
        all(len(of_cell) >= enough and are_alike(of_cell, tolerance) for of_cell in cells)
        and is_sum([of_cell[0] for of_cell in cells], contest.stated.statement, tolerance)
    )  # fmt: skip


def _note_proved(run: RunState, stage: StageIndex, whole_audit: WholeAudit) -> None:
    """Note how large a part was right, for those that will be as large."""
    proved = run.audits.proved_ratios
    proved[stage] = max(proved.get(stage, 0.0), whole_audit.ratio)


def _exact(stated: StatedCells) -> StatedCells:
    """The digests of auditors that compute like the member, to the bit."""
    return {
        microbatch: {owner: sums for owner, sums in by_owner.items() if sums.exact}
        for microbatch, by_owner in stated.items()
    }


def _undecided(
    run: RunState,
    step: StepState,
    member: Member,
    stated: StatedCells,
    contest: Contest,
    now: float,
) -> None:
    """Clear what a member has counted that an auditor contradicts and no other one can judge."""
    peer, stage = member
    for auditor in sorted(
        {cell_sums.auditor for by_owner in stated.values() for cell_sums in by_owner.values()}
    ):
        verdicts.dispute(run, peer, auditor, contest.since, now)
    run.note(
        f"what {short(peer)} counted in step {step.step} is computed again: it and its auditors "
        f"contradict each other in the sum, and no majority decides",
        peer,
    )
    for microbatch, claim in contest.claims.items():
        cell = step.table.get((microbatch, stage))
        if cell is not None and (cell.peer, _claim_of(cell)) == (peer, claim):
            cleared_cells.clear_cell(run, step, (microbatch, stage))


def _conclude(
    run: RunState, step: StepState, member: Member, whole_audit: WholeAudit, stated: StatedCells,
    sums: dict[MicrobatchIndex, Sums], now: float,
) -> None:  # fmt: skip
    """Expel a member whose sum is not that of its cells, and auditors whose digests are false."""
    (peer, stage), contest = member, whole_audit.contest
    assert contest is not None, "it is concluded"
    evidence = [cell_sums.envelope for m in sums for cell_sums in stated[m].values()]
    audited_total = total(sums.values())
    if audited_total != put_in(contest.stated.statement, len(audited_total)):
        record = VerdictRecord(
            step=step.step, microbatch=None, stage=stage, peer=peer,
            owner=contest.owner, audited=peer,
            reason="it put something else into its average than the sum of what it counted",
            statements=sum_evidence((contest.stated.envelope,), evidence),
        )  # fmt: skip
        verdicts.convict(run, record, now)
    else:
        _note_proved(run, stage, whole_audit)
    for microbatch, by_owner in stated.items():
        for owner, cell_sums in by_owner.items():
            if cell_sums.sums == sums[microbatch]:
                continue
            whole_audit.remove(microbatch, contest.claims[microbatch].transcript, owner)
            record = VerdictRecord(
                step=step.step, microbatch=microbatch, stage=stage,
                peer=cell_sums.auditor, owner=owner,
                audited=peer, reason="the digests in its audit contradict what others compute",
                statements=tuple(statement.envelope for statement in by_owner.values()),
            )  # fmt: skip
            verdicts.convict(run, record, now)
