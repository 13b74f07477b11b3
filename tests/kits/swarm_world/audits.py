"""Audits in the simulated world: what an auditor finds, and peers that lie.

Gradients of unlike machines differ in their last bits; those of a liar differ in substance.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kits.swarm_world import sums
from swarm_coordinator.core import events
from swarm_coordinator.core.trust.audits import AuditBook, AuditSettings, StepAudits
from swarm_coordinator.simulator.transcripts import simulated_transcript
from swarm_shared.base.transcript import Transcript
from swarm_shared.base.types import MicrobatchIndex, PeerId, RunId, StageIndex, Step
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.protocol import Audit, Drop, Dropped

if TYPE_CHECKING:
    from kits.swarm_world.peer import SimPeer
    from kits.swarm_world.stage import Stage
    from kits.swarm_world.world import World

LIE = 9
"""The variant of a transcript that an honest peer never gives."""

FALSE_STATEMENT_SHARE = 0.5
"""Share of a liar's statements that contradict an honest receipt."""


def book(world: World) -> AuditBook:
    """The audits of a world; a share of 0 audits none, so each owner is established at once."""
    options = world.options
    settings = AuditSettings(
        audit_share=options.audit_share,
        probation_cells=0,
        check_sums=options.check_sums,
        rolls_back=options.rolls_back,
    )
    kind = WholeAuditsOnly if options.hidden_only else AuditBook
    return kind(settings, world.rng.random)


class WholeAuditsOnly(AuditBook):
    """Audits that draw no cell, so that no audited peer sees one."""

    def draws(self, owner: PeerId, open_audits: StepAudits) -> bool:
        super().draws(owner, open_audits)
        return False


def transcript(stage: Stage, step: int, microbatch: int, variant: int) -> Transcript:
    last = StageIndex(stage.peer.world.options.stages - 1)
    return simulated_transcript(Step(step), MicrobatchIndex(microbatch), stage.index, last, variant)


def drop(peer: SimPeer, message: Drop) -> None:
    """Take microbatches out of the step's sum, and answer."""
    stage = peer.holding
    dropped = Dropped(step=message.step, stage=message.stage, microbatches=message.microbatches)
    if stage is None or stage.index != message.stage:
        peer.send(dropped)
        return
    held = stage
    held.account.removed(message.step, message.microbatches)

    def remove() -> bool:
        return held.worker.remove(message.step, message.microbatches)

    def removed(done: bool) -> None:
        if not done:
            held.worker.empty(message.step)
            held.account.emptied(message.step)
        # What was computed meanwhile was of a sum that still had them.
        held.account.removed(message.step, message.microbatches)
        peer.send(dropped)

    held.worker.request(0.01, remove, removed)


def audit(peer: SimPeer, message: Audit) -> None:
    """Compute the audited microbatch again, and state what came out."""
    stage = peer.holding
    if stage is None or stage.index != message.stage or not stage.account.works_on(message.step):
        _answer(peer, message, None)
        return
    held = stage
    stage.worker.request(
        0.05, lambda: None, lambda _: _answer(peer, message, _state(held, message))
    )


def _answer(peer: SimPeer, message: Audit, statement: AuditStatement | None) -> None:
    peer.deliver(
        lambda session, name: events.AuditAnswered(
            session, name, message.audit, statement, "statement" if statement else ""
        )
    )


def _state(stage: Stage, message: Audit) -> AuditStatement:
    peer, world = stage.peer, stage.peer.world
    audited = world.peers[message.peer]
    given = _given_by_neighbours(world, message)
    if not given:
        audited.shown.add((int(message.step), int(message.microbatch)))
    claimed = None
    if not given or message.comparison is not None:
        claimed = _shown(world, message.peer, message.stage, message)
    variant = peer.machine
    lies = peer.lies and world.rng.random() < FALSE_STATEMENT_SHARE
    computed = transcript(stage, message.step, message.microbatch, LIE if lies else variant)
    distance = None
    if message.comparison is not None and claimed == message.comparison.claimed:
        distance = 1.0 if lies != (audited.lies and claimed_lie(stage, message)) else 1e-6
    return AuditStatement(
        run=RunId("run"), generation=peer.generation, audit=message.audit, step=message.step,
        microbatch=message.microbatch, stage=message.stage, peer=message.peer, auditor=peer.id,
        transcript=computed if given or claimed is not None else None,
        loss_sum=stage.loss(message.step, message.microbatch), distance=distance,
        **(sums.of_cell(peer, message) if message.secret is not None else {}),
    )  # fmt: skip


def _given_by_neighbours(world: World, message: Audit) -> bool:
    """Whether the peers beside the audited one give the inputs."""
    sources = message.sources
    if sources is None:
        return False
    world.counts["hidden audits"] += 1
    for peer, further in ((sources.before, -1), (sources.behind, 1)):
        stage = StageIndex(message.stage + further)
        found = None if peer is None else _shown(world, peer, stage, message)
        if peer is not None and (
            found is None
            or (further < 0 and found.output != message.input)
            or (further > 0 and found.input_gradient != message.output_gradient)
        ):
            world.counts["neighbours failed"] += 1
            return False
    return True


def _shown(world: World, peer: PeerId, stage: StageIndex, message: Audit) -> Transcript | None:
    """What a peer has counted of a microbatch in a stage; None if it shows nothing."""
    holder = world.peers[peer]
    there = holder.holding
    if there is None or there.index != stage or not holder.alive or holder.hung:
        return None
    return there.worker.transcript(message.step, message.microbatch)


def claimed_lie(stage: Stage, message: Audit) -> bool:
    lie = transcript(stage, message.step, message.microbatch, LIE)
    return message.comparison is not None and message.comparison.claimed == lie
