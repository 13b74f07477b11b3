"""Makes the status document from the core's state. Reads a RunState, changes nothing."""

from __future__ import annotations

import heapq

from swarm_coordinator.core.rules.not_finite import diverged_sentence
from swarm_coordinator.core.state.peers import PeerState
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.utilisation import (
    Rejection,
    StageUtilisation,
    UtilisationStats,
    quantile,
)
from swarm_coordinator.core.state.waiting import waiting_reason
from swarm_coordinator.status.document import (
    MoveDecisionRow,
    OwnerRow,
    PeerRow,
    RebalancingStatus,
    RunFigures,
    StageFigures,
    StageStatusRow,
    StatusDocument,
    TrustStatus,
    VerdictRow,
    WorkCounts,
)
from swarm_shared.base.types import Step

OWNERS_SHOWN = 50
"""Owners in the document; `swarm-coordinator trust` lists all of them."""

VERDICTS_SHOWN = 20
"""Newest verdicts in the document; `swarm-coordinator trust` lists all of them."""


def document_without_peers(run: RunState, now: float) -> StatusDocument:
    """Everything that the core has for the document, without its peers, of which there may be
    thousands (`peer_row`), and the health, which depends on them."""
    step, last = run.steps.current, run.history.last_applied
    return StatusDocument(
        run=run.manifest.name,
        phase=run.phase.value,
        waiting_for=waiting_reason(run),
        generation=run.start.generation,
        version=run.history.version,
        steps=run.manifest.training.steps,
        step=step.step if step is not None else Step(run.history.version),
        cells_done=len(step.table) if step is not None else 0,
        cells_total=run.manifest.training.microbatches_per_step * run.manifest.stage_count,
        loss=last.loss if last is not None else None,
        diverged=diverged_sentence(run),
        tokens_per_second=last.tokens / last.seconds if last and last.seconds > 0 else None,
        heldout_loss=run.history.heldout_loss,
        work=WorkCounts.model_validate(run.statistics.work, from_attributes=True),
        checkpoint_version=run.checkpoints.stored.version if run.checkpoints.stored else None,
        uptime_seconds=now - run.start.at,
        coordinator=run.start.record.peer,
        stages=tuple(
            StageStatusRow(
                stage=row.stage,
                peers=len(run.peers.ready(row.stage)),
                microbatches_per_second=row.microbatches_per_second,
            )
            for row in run.peers.stage_rows()
        ),
        figures=figures_of(run.statistics.utilisation),
        rebalancing=_rebalancing(run, now),
        trust=_trust(run),
    )


def peer_row(run: RunState, peer: PeerState, now: float) -> PeerRow:
    flag = run.statistics.flags.get(peer.peer)
    return PeerRow(
        peer=peer.peer,
        name=peer.profile.name,
        stage=peer.stage,
        phase=peer.phase.value,
        version=peer.version,
        leaving=peer.leaving,
        paused=peer.paused,
        device=peer.profile.device,
        arithmetic=peer.arithmetic,
        reachability=peer.contact.reachability.value,
        offers_relay=peer.contact.offers_relay,
        microbatches_per_second=peer.rates.microbatches_per_second,
        queued=peer.rates.queued,
        silent_seconds=round(now - peer.last_heard, 1),
        flagged_times=0 if flag is None else flag.times,
        flagged_reason="" if flag is None else flag.reason,
    )


def figures_of(utilisation: UtilisationStats) -> RunFigures:
    recent = utilisation.recent()
    whole = StageUtilisation(
        sum(stage.held_seconds for stage in recent), sum(stage.busy_seconds for stage in recent)
    )
    return RunFigures(
        bubble_share=whole.idle_share,
        stages=tuple(
            StageFigures(
                idle_share=now.idle_share,
                p50_seconds=quantile(now.buckets, 0.50),
                p95_seconds=quantile(now.buckets, 0.95),
                held_seconds=total.held_seconds,
                busy_seconds=total.busy_seconds,
                microbatches=tuple(total.buckets),
            )
            for now, total in zip(recent, utilisation.totals, strict=True)
        ),
        rejected={reason.value: utilisation.rejected[reason] for reason in Rejection},
    )


def _trust(run: RunState) -> TrustStatus:
    book = run.audits
    owners = book.standings.owners
    established = sum(book.established(owner) for owner in owners)
    return TrustStatus(
        audit_share=book.settings.audit_share,
        passed=book.passed,
        unanswered=book.unanswered,
        under_way=sum(len(step.audits.open) for step in run.steps.open()),
        established=established,
        on_probation=len(owners) - established,
        lost=sum(standing.lost for standing in owners.values()),
        probation_cells=book.settings.probation_cells,
        owners=tuple(
            OwnerRow(
                owner=owner, passed=standing.passed, lost=standing.lost,
                made=standing.audited_work, established=book.established(owner),
            )
            for owner, standing in heapq.nsmallest(
                OWNERS_SHOWN, owners.items(),
                key=lambda item: (-item[1].lost, -item[1].passed, item[0]),
            )
        ),
        verdicts=tuple(
            VerdictRow.model_validate(one, from_attributes=True)
            for one in list(book.verdicts)[-VERDICTS_SHOWN:]
        ),
    )  # fmt: skip


def _rebalancing(run: RunState, now: float) -> RebalancingStatus:
    state = run.rebalancing
    return RebalancingStatus(
        rule=state.settings.rule.value,
        period_seconds=state.settings.policy.period_seconds,
        decided=state.decided,
        made=state.made,
        dropped=state.dropped,
        bytes_moved=state.bytes_moved,
        on_the_way=len(run.peers.movers),
        decisions=tuple(
            MoveDecisionRow(seconds_ago=now - note.at, peer=note.peer, text=note.text)
            for note in state.decisions
        ),
        reason=state.reason,
    )
