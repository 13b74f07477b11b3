"""The auditor: computes microbatches of other peers again, on the coordinator's order.

An audit runs in the worker of the held stage, behind the work that waits there, and leaves no trace
in it. The statement is signed before the coordinator shows what was claimed: an order first names
the digests of the inputs alone.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import trio

from swarm_client.auditing.exchange import KeptServer, fetch_kept
from swarm_client.membership.member_context import MemberContext
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.pipeline import Pipeline
from swarm_client.stage.protocol.errors import WorkerDied
from swarm_client.stage.protocol.messages import AuditDone
from swarm_client.stage.protocol.slot_sizes import SlotSizes
from swarm_shared.base.errors import SwarmError
from swarm_shared.identity.signing import encode_envelope
from swarm_shared.identity.work_statements import AuditStatement, wire_digest
from swarm_shared.protocol import Audit, AuditResult, KeptRequest, PeerRecord

log = logging.getLogger(__name__)

MAX_AUDITS = 8
"""Audits in hand at a time; the coordinator asks for fewer."""


def inputs_fit(order: Audit, content: bytes, sizes: SlotSizes) -> bool:
    """Whether these are the inputs of the receipt that is audited: the input, the targets of the
    last stage, the output's gradient.

    Otherwise an audited peer could give each auditor other targets, and set them against each
    other.
    """
    view = memoryview(content)
    parts = (
        view[: sizes.input_bytes],
        view[sizes.input_bytes : sizes.request_bytes],
        view[sizes.request_bytes :],
    )
    found = tuple(wire_digest(part) if part.nbytes else "" for part in parts)
    return found == (order.input, order.targets, order.output_gradient)


class _Withheld(SwarmError):
    """The audited peer gives no tensors that fit its receipt."""


@dataclass(frozen=True, slots=True)
class _Files:
    inputs: Path
    computed: Path


class Auditor:
    """The audits of one volunteer, as auditor and as audited peer."""

    def __init__(self, member: MemberContext, pipeline: Pipeline, folder: Path) -> None:
        self._member = member
        self._pipeline = pipeline
        self._folder = folder
        self._in_hand = 0
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.iterdir():
            left.unlink(missing_ok=True)
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
        files = _Files(
            self._folder / f"audit-{order.audit}-inputs",
            self._folder / f"audit-{order.audit}-computed",
        )
        try:
            holding, audited = self._able(order)
            self._answer(order, await self._state(order, holding, audited, files))
        except WorkerDied:
            self._answer(order, None, "the compute process has ended")
        except SwarmError as error:
            log.info("audit %d is not carried out: %s", order.audit, error)
            self._answer(order, None, str(error))
        finally:
            self._in_hand -= 1
            files.inputs.unlink(missing_ok=True)
            files.computed.unlink(missing_ok=True)

    def _able(self, order: Audit) -> tuple[Holding, PeerRecord]:
        """The held stage and the audited peer, if this peer can audit it."""
        holding, audited = self._pipeline.holding, self._member.roster.get(order.peer)
        if self._pipeline.server.paused:
            raise SwarmError("this peer is paused")
        if holding is None or holding.stage != order.stage:
            raise SwarmError(f"this peer does not hold stage {order.stage}")
        if not holding.account.works_on(order.step):
            raise SwarmError(f"this peer does not work on step {order.step}")
        if audited is None:
            raise SwarmError(f"{order.peer} is not in the roster")
        return holding, audited

    async def _state(
        self, order: Audit, holding: Holding, audited: PeerRecord, files: _Files
    ) -> AuditStatement:
        try:
            await self._fetch_inputs(order, holding, audited, files)
        except _Withheld as error:
            log.info("audit %d: %s", order.audit, error)
            return self._statement(order, None)
        computed = None
        if order.claimed is not None:
            try:
                worker = holding.worker
                total = worker.sizes.computed_bytes(worker.own_elements + worker.tied_elements)
                await self._fetch(order, audited, total, files.computed)
                computed = files.computed
            except _Withheld as error:
                log.info("audit %d: %s", order.audit, error)
        done = await holding.worker.audit(
            order.step, order.microbatch, files.inputs, computed, order.claimed, order.secret
        )
        return self._statement(order, done)

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
        )  # fmt: skip

    async def _fetch_inputs(
        self, order: Audit, holding: Holding, audited: PeerRecord, files: _Files
    ) -> None:
        sizes = holding.worker.sizes
        total = sizes.request_bytes + sizes.output_gradient_bytes
        await self._fetch(order, audited, total, files.inputs, of_inputs=True)
        content = await trio.Path(files.inputs).read_bytes()
        if not inputs_fit(order, content, sizes):
            raise _Withheld(f"{order.peer} gave inputs that do not fit its receipt")

    async def _fetch(
        self, order: Audit, audited: PeerRecord, total_bytes: int, path: Path,
        *, of_inputs: bool = False,
    ) -> None:  # fmt: skip
        request = KeptRequest(
            step=order.step, microbatch=order.microbatch, stage=order.stage, computed=not of_inputs
        )
        try:
            await fetch_kept(self._member, audited, request, total_bytes, path)
        except OSError as error:
            raise SwarmError(f"{path} cannot be written: {error.strerror}") from error
        except SwarmError as error:
            raise _Withheld(str(error)) from error
