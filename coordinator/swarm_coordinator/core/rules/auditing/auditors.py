"""Auditors: who may audit a cell, who is asked, and where the inputs come from.

Part of the pure core (docs/decisions, number 0036). Auditors are peers of the same stage and of
other owners.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm_coordinator.core.rules import held_up
from swarm_coordinator.core.state.peers import PeerState, owner_of
from swarm_coordinator.core.state.run import RunState
from swarm_coordinator.core.state.steps import StepState
from swarm_coordinator.core.trust.arithmetic_classes import Machine
from swarm_coordinator.core.trust.audits import (
    ALIKE_FIRST_SHARE,
    MAX_IN_HAND,
    AuditOrder,
    OpenAudit,
)
from swarm_coordinator.core.trust.showing import showing_seconds
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.protocol import Audit, AuditSources, Comparison
from swarm_shared.trust.votes import MAX_VOTERS

AUDIT_SECONDS = 5.0
"""Seconds that an auditor has for its answer, at least: the time that a step takes, if that is
longer."""


def machine_of(peer: PeerState, stage: StageIndex) -> Machine:
    """A peer's device at a stage, as classes know it."""
    return Machine(stage, peer.peer, peer.profile.device)


def electorate(
    run: RunState, stage: StageIndex, owner: PeerId, devices: Mapping[PeerId, PeerId]
) -> frozenset[PeerId]:
    """The owners that may judge another one of the stage.

    `devices`: those that take part already, the judged one included, each with the owner for which
    it does. None of them has a further voice for another owner.
    """
    ready = {peer.peer: owner_of(peer) for peer in run.peers.ready(stage)}
    owners = {own for peer, own in ready.items() if devices.get(peer, own) == own}
    return run.audits.entitled(owners, owner)


def candidates(run: RunState, audit: OpenAudit) -> list[PeerState]:
    """The peers that may be asked next to audit a cell, of owners that have not been asked."""
    if len(audit.asked) >= MAX_VOTERS:
        return []
    devices = audit.owner_of_device
    entitled = electorate(run, audit.stage, audit.owner, devices) - set(audit.asked.values())
    return [
        peer
        for peer in run.peers.ready(audit.stage)
        if owner_of(peer) in entitled
        and peer.peer not in devices
        and not peer.paused
        and not peer.leaving
        and (not audit.within_class or is_alike(run, audit, peer))
    ]


def is_alike(run: RunState, audit: OpenAudit, peer: PeerState) -> bool:
    """Whether a peer is known to compute like the audited one."""
    return run.audits.classes.alike(audit.machine, machine_of(peer, audit.stage))


def _has_agreed(run: RunState, audit: OpenAudit, peer: PeerState) -> bool:
    """Whether a peer has computed like the audited one before, or decides alone."""
    classes, machine = run.audits.classes, machine_of(peer, audit.stage)
    trusted = run.audits.settings.trusted_owners
    return owner_of(peer) in trusted or classes.has_agreed(audit.machine, machine)


def ask_one_of(
    run: RunState, step: StepState, audit: OpenAudit, candidates: list[PeerState], now: float
) -> None:
    """Ask a trusted owner, or the candidate with the fewest audits in hand; one that was silent is
    asked last. Ask none while all candidates have MAX_IN_HAND, or while a peer that is to give the
    inputs has not counted."""
    if not can_go_on(run, step, audit):
        return
    busy = {peer.peer: step.audits.in_hand(peer.peer) for peer in candidates}
    alike = [peer for peer in candidates if _has_agreed(run, audit, peer)]
    # A whole audit has a result only if all of its auditors compute alike: it waits for these.
    preferred = alike if alike and audit.secret else candidates
    free = [peer for peer in preferred if busy[peer.peer] < MAX_IN_HAND]
    if not free:
        return
    standings, trusted = run.audits.standings, run.audits.settings.trusted_owners
    free_alike = [peer for peer in alike if busy[peer.peer] < MAX_IN_HAND]
    if 0 < len(free_alike) < len(free) and run.audits.draw() < ALIKE_FIRST_SHARE:
        free = free_alike
    lots = {peer.peer: run.audits.draw() for peer in free}

    def rank(peer: PeerState) -> tuple[bool, bool, int, float]:
        owner = owner_of(peer)
        return owner not in trusted, standings.get(owner).silent, busy[peer.peer], lots[peer.peer]

    ask(run, step, audit, min(free, key=rank), now)


def ask(
    run: RunState, step: StepState, audit: OpenAudit, auditor: PeerState, now: float,
    *, compares: bool = False,
) -> None:  # fmt: skip
    """Send a peer the order to audit; with `compares` it also gets the claim."""
    run.audits.last_audit += 1
    claimed, comparison, seconds = audit.claim.transcript, None, 0.0
    if compares:
        audit.sample = audit.sample or run.audits.draw_secret()
        seconds = _showing_seconds(run, step, audit.stage)
        comparison = Comparison(claimed=claimed, sample=audit.sample, seconds=seconds)
    audit.order = AuditOrder(
        run.audits.last_audit, auditor.peer, owner_of(auditor), now, compares, seconds,
        auditor.profile.binding,
    )  # fmt: skip
    audit.asked[auditor.peer] = owner_of(auditor)
    is_last = audit.stage == run.manifest.stage_count - 1
    run.send(
        auditor.peer,
        Audit(
            audit=run.audits.last_audit,
            step=step.step,
            microbatch=audit.microbatch,
            stage=audit.stage,
            peer=audit.peer,
            input=claimed.input,
            output_gradient=claimed.output_gradient,
            targets=claimed.output if is_last else "",
            comparison=comparison,
            sources=_sources(run, step, audit) if audit.hidden else None,
            patience_seconds=_patience_seconds(run, step, audit, compares=compares),
            secret=audit.secret or None,
        ),
    )


def can_go_on(run: RunState, step: StepState, audit: OpenAudit) -> bool:
    """Whether the next auditor can be asked: the audit waits neither for an answer nor for the
    peers that are to give the inputs."""
    return audit.order is None and not (audit.hidden and _beside(run, step, audit) is None)


def _beside(run: RunState, step: StepState, audit: OpenAudit) -> dict[StageIndex, PeerId] | None:
    """The peers that have counted an audited microbatch in the neighbouring stages; None while it
    is not counted in one of them."""
    stages = (StageIndex(audit.stage - 1), StageIndex(audit.stage + 1))
    cells = {stage: step.table.get((audit.microbatch, stage)) for stage in stages}
    if any(cells[stage] is None and 0 <= stage <= run.last_stage for stage in stages):
        return None
    return {stage: cell.peer for stage, cell in cells.items() if cell is not None}


def _sources(run: RunState, step: StepState, audit: OpenAudit) -> AuditSources | None:
    """The peers that give the inputs of a hidden audit; None if one of them is gone."""
    beside = _beside(run, step, audit)
    if beside is None or not run.peers.keys() >= set(beside.values()):
        return None
    return AuditSources(
        before=beside.get(StageIndex(audit.stage - 1)),
        behind=beside.get(StageIndex(audit.stage + 1)),
    )


def _patience_seconds(run: RunState, step: StepState, audit: OpenAudit, *, compares: bool) -> float:
    """Seconds for which the auditor waits for the peers beside the audited one: half of its time.
    In a contest it waits all of its time for the inputs: the audited peer may have left, or give
    nothing."""
    waits_on = audit.confirms and not compares
    return answer_seconds(run, step) * (1.0 if waits_on else 0.5)


def answer_seconds(run: RunState, step: StepState) -> float:
    """Seconds that an auditor has for its answer: no less than the work of this step took or, until
    that is known, than the previous step took."""
    last = run.history.last_applied
    return max(AUDIT_SECONDS, held_up.pace(step) or (0.0 if last is None else last.seconds))


def _showing_seconds(run: RunState, step: StepState, stage: StageIndex) -> float:
    """Seconds for which an auditor waits for what is claimed: half of its time, or as long as the
    slowest uplink takes."""
    slowest = showing_seconds(run.manifest, stage, run.history.averaging_seconds)
    return max(answer_seconds(run, step) / 2, slowest)


def overdue_at(run: RunState, step: StepState, order: AuditOrder) -> float:
    """When an auditor's answer is overdue. One that compares also waits for the audited peer."""
    return order.asked_at + answer_seconds(run, step) + order.showing_seconds
