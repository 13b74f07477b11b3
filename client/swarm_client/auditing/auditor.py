"""The auditor: computes microbatches of other peers again, on the coordinator's order.

An audit runs in the worker of the held stage, behind the work that waits there, and leaves no trace
in it. The statement is signed before the coordinator shows what was claimed: an order first names
the digests of the inputs alone.
"""

from __future__ import annotations

import logging
from pathlib import Path

from swarm_client.auditing.exchange import KeptServer
from swarm_client.auditing.inputs import AuditedSamples, AuditInputs, TensorsWithheld
from swarm_client.membership.member_context import MemberContext
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.pipeline import Pipeline
from swarm_client.stage.handle.worker_handle import StageWorker
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_client.stage.protocol.gradient_blocks import sampled_blocks
from swarm_client.stage.protocol.messages import AuditDone, ShownFile
from swarm_client.stage.protocol.slot_sizes import GRADIENT_ELEMENT_BYTES
from swarm_shared.base.errors import SwarmError
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import AuditStatement
from swarm_shared.protocol import Audit, AuditResult

log = logging.getLogger(__name__)

MAX_AUDITS = 8
"""Audits in hand at a time; the coordinator asks for fewer."""


class Auditor:
    """The audits of one volunteer, as auditor and as audited peer."""

    def __init__(
        self, member: MemberContext, pipeline: Pipeline, samples: AuditedSamples, folder: Path
    ) -> None:
        self._member = member
        self._pipeline = pipeline
        self._folder = folder
        self._inputs = AuditInputs(member, samples)
        self._in_hand = 0
        folder.mkdir(parents=True, exist_ok=True)
        for leftover in folder.iterdir():
            leftover.unlink(missing_ok=True)
        KeptServer(member, pipeline, folder)

    def take(self, order: Audit) -> None:
        """Carry out an order and answer it."""
        if self._in_hand >= MAX_AUDITS:
            self._answer(order, None, "this peer audits as much as it can")
            return
        self._in_hand += 1
        self._member.nursery.start_soon(self._carry_out, order)

    def _answer(self, order: Audit, statement: AuditStatement | None, reason: str = "") -> None:
        envelope = None
        if statement is not None:
            envelope = encode_envelope(statement.sign(self._member.identity))
        self._member.coordinator.send(
            AuditResult(audit=order.audit, statement=envelope, reason=reason[:500])
        )

    async def _carry_out(self, order: Audit) -> None:
        inputs = self._folder / f"audit-{order.audit}-inputs"
        computed = self._folder / f"audit-{order.audit}-computed"
        try:
            holding = self._able(order)
            self._answer(order, await self._state(order, holding.worker, inputs, computed))
        except WorkerDied:
            self._answer(order, None, "the compute process has ended")
        except SwarmError as error:
            log.info("audit %d is not carried out: %s", order.audit, error)
            self._answer(order, None, str(error))
        finally:
            self._in_hand -= 1
            inputs.unlink(missing_ok=True)
            computed.unlink(missing_ok=True)

    def _able(self, order: Audit) -> Holding:
        """The held stage, if this peer can audit it."""
        holding = self._pipeline.holding
        if self._pipeline.server.paused:
            raise SwarmError("this peer is paused")
        if holding is None or holding.stage != order.stage:
            raise SwarmError(f"this peer does not hold stage {order.stage}")
        if not holding.account.works_on(order.step):
            raise SwarmError(f"this peer does not work on step {order.step}")
        return holding

    async def _state(
        self, order: Audit, worker: StageWorker, inputs: Path, computed: Path
    ) -> AuditStatement:
        try:
            await self._inputs.write_inputs(order, worker.sizes, inputs)
        except TensorsWithheld as error:
            log.info("audit %d: %s", order.audit, error)
            return self._statement(order, None)
        shown = await self._shown(order, worker, computed)
        done = await worker.audit(order.step, order.microbatch, inputs, shown, order.secret)
        return self._statement(order, done)

    async def _shown(self, order: Audit, worker: StageWorker, path: Path) -> ShownFile | None:
        """What the audited peer shows of what it has computed, if the order is to compare it; None
        also if it shows nothing."""
        comparison = order.comparison
        if comparison is None:
            return None
        elements = worker.configured.own_elements + worker.configured.tied_elements
        blocks = sampled_blocks(comparison.sample, elements * GRADIENT_ELEMENT_BYTES)
        total_bytes = worker.sizes.computed_bytes(elements, blocks)
        try:
            await self._inputs.write_computed(order, blocks, total_bytes, comparison.seconds, path)
        except TensorsWithheld as error:
            log.info("audit %d: %s", order.audit, error)
            return None
        return ShownFile(path=str(path), blocks=blocks, claimed=comparison.claimed)

    def _statement(self, order: Audit, done: AuditDone | None) -> AuditStatement:
        member = self._member.membership.now
        return AuditStatement(
            run=member.run, generation=member.generation, audit=order.audit, step=order.step,
            microbatch=order.microbatch, stage=order.stage, peer=order.peer,
            auditor=self._member.identity.peer_id,
            transcript=None if done is None else done.transcript,
            loss_sum=None if done is None else done.loss_sum,
            distance=None if done is None else done.distance,
            sums=() if done is None else done.sums,
            sketches=() if done is None else done.sketches,
        )  # fmt: skip
