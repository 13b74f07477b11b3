"""Verdicts: what follows from the outcome of an audit.

Part of the pure core (docs/decisions, number 0036). Values and decisions are in
`swarm_coordinator.core.trust`.
"""

from __future__ import annotations

from dataclasses import replace

from swarm_coordinator.core.events import NO_STEP, Ban, Persist, VerdictRecord
from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.rules.auditing import cleared_cells, open_audits
from swarm_coordinator.core.state.peers import PeerState, display, owner_of, short
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.state.utilisation import Rejection
from swarm_coordinator.core.trust.audits import OpenAudit
from swarm_shared.base.types import PeerId
from swarm_shared.trust.votes import Finding, Outcome

MAX_WITHHELD = 3
"""Steps in which an owner may give its auditors no tensors that fit its receipts, without a passed
audit in between; one more expels it."""

REFUSED_SECONDS = 3600.0
"""Seconds for which an owner that lost its first audit is refused, unless its machine passes a
self-test; a second lost audit bans the owner."""


def conclude(run: RunState, step: StepState, audit: OpenAudit, result: Outcome, now: float) -> None:
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
    if open_audits.still_counts(step, audit):
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
