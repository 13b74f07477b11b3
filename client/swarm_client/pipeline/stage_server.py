"""Serving a stage: activations come in, gradients go back.

Every microbatch is one task: forward, on to a peer of the next stage, backward, answer. The number
of tasks is bounded by the manifest's queue length and by the credits of each edge, so sockets are
always drained, whatever the device does (design: the life of a microbatch).

A microbatch may be answered before it is counted here: the gradients of the weights then follow
when the device has nothing else to do, and the receipt goes to the coordinator alone (decision
0045).

What is counted, and what a receipt is signed for, is the account's
(`swarm_shared.volunteer_rules.stage_account`).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from dataclasses import dataclass, field

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.membership.member_context import MemberContext
from swarm_client.pipeline.downstream import Downstream, MicrobatchAbandoned, MicrobatchRequest
from swarm_client.pipeline.edge import HELLO_SECONDS, EdgeAnswer, Stream
from swarm_client.pipeline.held_stage import Holding
from swarm_client.pipeline.tickets import TicketCheck
from swarm_client.pipeline.uplink_share import UplinkShare
from swarm_client.stage.handle.slots import Output
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_client.stage.protocol.slot_sizes import TOKEN_BYTES
from swarm_shared.base.errors import AdmissionError, LinkClosed, ProtocolError, SwarmError
from swarm_shared.base.types import PeerId, StageIndex
from swarm_shared.network import AssemblyBudget, FrameLimits
from swarm_shared.protocol import (
    Backward,
    Forward,
    NotCounted,
    NotFinite,
    Receipts,
    RefusalReason,
    StageCancel,
    StageHello,
    StageHelloAnswer,
    StageRefused,
    encode,
    parse,
    stage_requests,
)
from swarm_shared.protocol.framing import Buffer
from swarm_shared.run.manifest import Manifest
from swarm_shared.volunteer_rules.stage_account import Computation

log = logging.getLogger(__name__)

HELLO_LIMITS = FrameLimits(max_header_bytes=16 * 1024)
"""Frame limits before the sender has shown a certificate: all that an unadmitted peer can make this
one buffer."""

MAX_HEADER_BYTES = 512 * 1024
"""Bytes of a stage message's header: room for a receipt and a peer of each of MAX_STAGES."""

ANSWER_STALL_SECONDS = 30.0
"""Seconds in which a sender must take a megabyte of its answer. A slower one is disconnected: its
microbatches occupy queue slots."""

ASSEMBLY_BYTES = 256 * 2**20
"""Memory for all requests that have not arrived whole; more where the queue is larger."""

PAUSED_DETAIL = "this peer is paused"


def stage_limits(manifest: Manifest) -> FrameLimits:
    """Frame limits for the run: one activation or token ids with targets, or a gradient."""
    token_bytes = manifest.tokens_per_microbatch * TOKEN_BYTES
    request_bytes = max(manifest.activation_bytes, token_bytes) + token_bytes
    return FrameLimits(
        max_header_bytes=MAX_HEADER_BYTES,
        max_payload_bytes=max(request_bytes, manifest.gradient_bytes),
    )


@dataclass(slots=True, eq=False)
class StageServer:
    """Handler of the stage protocol."""

    member: MemberContext
    """The context of this member. Its nursery runs what is left of a microbatch when its sender has
    the answer."""
    uplink: UplinkShare
    holding: Holding | None = field(default=None, init=False)
    """The stage that is served now; set by the stage manager."""
    paused: bool = field(default=False, init=False)
    """True while nothing new is computed for others: senders receive a busy refusal and choose
    other peers."""
    refused: Counter[RefusalReason] = field(default_factory=Counter, init=False)
    """Refusals sent, by reason."""
    _tickets: TicketCheck = field(init=False)
    _assembly_budget: AssemblyBudget = field(default_factory=AssemblyBudget, init=False)
    _task_scopes: set[trio.CancelScope] = field(default_factory=set, init=False)
    """Scopes of the microbatches in flight, from before the forward to the gradient."""

    def __post_init__(self) -> None:
        self._tickets = TicketCheck(self.member.membership)

    def hand_back(self) -> None:
        """While paused: cancel what is in flight, so that senders give it to other peers."""
        if self.paused:
            for scope in self._task_scopes:
                scope.cancel()

    async def handle(self, stream: Stream) -> None:
        """Serve one sender until its stream ends."""
        manifest = await self._handshake(stream)
        if manifest is None:
            return
        limits = stage_limits(manifest)
        stream.expect(limits)
        queue_bytes = manifest.limits.stage_queue * limits.max_payload_bytes
        stream.assemble_within(self._assembly_budget, max(ASSEMBLY_BYTES, queue_bytes))
        # Twice the credits: a request that was cancelled or answered a moment ago may still be
        # listed.
        max_requests = 2 * manifest.limits.edge_credits
        scopes: dict[int, trio.CancelScope] = {}
        try:
            async with trio.open_nursery() as nursery:
                try:
                    while True:
                        frame = await stream.receive()
                        message = parse(stage_requests, frame.header)
                        if isinstance(message, StageCancel):
                            if message.request in scopes:
                                scopes[message.request].cancel()
                        elif isinstance(message, Forward) and len(scopes) >= max_requests:
                            raise ProtocolError(
                                f"{stream.remote} has {len(scopes)} microbatches here, but "
                                f"{manifest.limits.edge_credits} credits"
                            )
                        elif isinstance(message, Forward) and message.request not in scopes:
                            scope = scopes[message.request] = trio.CancelScope()
                            nursery.start_soon(
                                self._serve, stream, message, frame.payload, scope, scopes
                            )
                        else:
                            raise ProtocolError(f"{stream.remote} sent {message.kind!r} again")
                        del frame  # or its payload would stay until the next one comes
                finally:
                    nursery.cancel_scope.cancel()
        except* LinkClosed:
            pass  # the sender has disconnected; its gradients have no receiver

    async def _handshake(self, stream: Stream) -> Manifest | None:
        """Answer the sender's hello; return the run's manifest, or None when the sender was
        refused."""
        frame = await stream.receive(timeout_seconds=HELLO_SECONDS)
        hello = parse(stage_requests, frame.header)
        if not isinstance(hello, StageHello):
            raise ProtocolError(f"{stream.remote} did not begin with a hello")
        membership = self.member.membership.now
        if self.holding is None:
            refusal = StageRefused(
                reason=RefusalReason.WRONG_STEP, detail="this peer holds no stage now"
            )
        else:
            try:
                self.member.gate.check(stream.remote, hello.run, hello.certificate)
            except AdmissionError as error:
                refusal = StageRefused(reason=RefusalReason.NOT_ADMITTED, detail=str(error)[:500])
            else:
                answer = StageHelloAnswer(credits=membership.manifest.limits.edge_credits)
                await stream.send(encode(answer))
                return membership.manifest
        self.refused[refusal.reason] += 1
        await stream.send(encode(refusal))
        await stream.close()
        return None

    async def _serve(
        self,
        stream: Stream,
        message: Forward,
        payload: Buffer,
        scope: trio.CancelScope,
        scopes: dict[int, trio.CancelScope],
    ) -> None:
        try:
            with scope:
                refusal = await self._try_to_serve(stream, message, payload)
                # Drop the request's payload: it would stay in memory until the sender has taken the
                # refusal.
                payload = b""
                if refusal is not None:
                    self.refused[refusal.reason] += 1
                    await stream.send(encode(refusal), stall_seconds=ANSWER_STALL_SECONDS)
        finally:
            del scopes[message.request]

    async def _try_to_serve(
        self, stream: Stream, message: Forward, payload: Buffer
    ) -> StageRefused | None:
        """Answer the request; return a refusal to send instead when that is not possible."""

        def refuse(reason: RefusalReason, detail: str) -> StageRefused:
            return StageRefused(request=message.request, reason=reason, detail=detail[:500])

        try:
            self.member.gate.check_not_revoked(stream.remote)
        except AdmissionError as error:
            return refuse(RefusalReason.NOT_ADMITTED, str(error))
        manifest, holding = self.member.membership.now.manifest, self.holding
        if holding is None or holding.stage != message.stage:
            return refuse(RefusalReason.WRONG_STEP, "this peer holds another stage")
        if not holding.account.works_on(message.step):
            return refuse(RefusalReason.WRONG_STEP, f"this peer works on step {holding.step}")
        if not self.member.gate.may_send(stream.remote, message.stage):
            # Wrong step rather than not admitted: the newer roster may not have arrived yet.
            return refuse(
                RefusalReason.WRONG_STEP, "the roster has the sender in no preceding stage"
            )
        if self.paused:
            return refuse(RefusalReason.BUSY, PAUSED_DETAIL)
        if holding.in_flight >= manifest.limits.stage_queue:
            return refuse(RefusalReason.BUSY, f"{holding.in_flight} microbatches are queued")
        self._check_sizes(stream.remote, holding, manifest, message, payload)
        try:
            self._tickets.check(message, payload)
        except AdmissionError as error:
            return refuse(RefusalReason.NOT_ADMITTED, str(error))
        holding.in_flight += 1
        try:
            faults.inject_outage(FaultPoint.FORWARD, message.step)
            task = _MicrobatchTask(holding, manifest.stage_count, message, payload)
            answer = await self._run_task(task)
            if answer is None:
                # Not BUSY: a peer downstream may have counted it, and the sender must ask for a
                # mask.
                return refuse(RefusalReason.FAILED, PAUSED_DETAIL)
            await self._send_answer(stream, task, answer)
        except (RequestFailed, WorkerDied, MicrobatchAbandoned) as error:
            self._report_failure(stream.remote, holding, message, error)
            over = not holding.account.works_on(message.step)
            reason = RefusalReason.WRONG_STEP if over else RefusalReason.FAILED
            return refuse(reason, str(error))
        finally:
            holding.in_flight -= 1
        return None

    async def _send_answer(self, stream: Stream, task: _MicrobatchTask, answer: _Answer) -> None:
        header, gradient, step = answer.header, answer.gradient, task.message.step
        update: dict[str, object] = {"uplink_seconds": self.uplink.microbatch_seconds(task.holding)}
        if gradient.owed:
            update["owing"] = (*header.owing, self.member.node.peer_id)
            self.member.nursery.start_soon(self._count_later, stream.remote, task, answer)
        header = header.model_copy(update=update)
        faults.inject_outage(FaultPoint.RECEIPT, step)
        faults.inject(FaultPoint.RECEIPT, step)
        try:
            await stream.send(
                encode(header), gradient.payload or b"", stall_seconds=ANSWER_STALL_SECONDS
            )
        finally:
            gradient.release()

    async def _count_later(self, sender: PeerId, task: _MicrobatchTask, answer: _Answer) -> None:
        """Compute the gradients of the weights after the answer, and report the receipt, or that
        there is none."""
        holding, message = task.holding, task.message
        holding.owed += 1
        counted = False
        try:
            with trio.CancelScope() as scope:
                self._task_scopes.add(scope)
                try:
                    counted = await task.count_later(answer)
                finally:
                    self._task_scopes.discard(scope)
        except (RequestFailed, WorkerDied) as error:
            self._report_failure(sender, holding, message, error)
        finally:
            holding.owed -= 1
        if not counted:
            self.member.coordinator.send(
                NotCounted(step=message.step, microbatches=(message.microbatch,))
            )
        # Without a session the receipts stay unreported. A session that is being opened has sent
        # its Hello with the earlier receipts, and reports these next.
        if not holding.owed and self.holding is holding and self.member.coordinator.attached:
            # At once: the close of the step may wait for these receipts.
            batch = holding.account.take_unreported()
            if batch:
                self.member.coordinator.send(Receipts(receipts=batch))

    def _report_failure(
        self, sender: PeerId, holding: Holding, message: Forward, error: SwarmError
    ) -> None:
        """Report a microbatch whose computation was not finite, with its sender; count one for
        which the memory did not suffice."""
        code = error.code if isinstance(error, RequestFailed) else ""
        if code == "not_finite":
            self.member.coordinator.send(
                NotFinite(step=message.step, microbatch=message.microbatch, sender=sender)
            )
        elif code == "out_of_memory":
            log.warning("stage %d: %s", message.stage, error)
            holding.memory.failed()

    async def _run_task(self, task: _MicrobatchTask) -> _Answer | None:
        """Run the task; None when this peer was paused before the gradient arrived."""
        answer = None
        with trio.CancelScope() as scope:
            self._task_scopes.add(scope)
            try:
                answer = await task.run()
            finally:
                self._task_scopes.discard(scope)
        return answer

    def _check_sizes(
        self, remote: PeerId, holding: Holding, manifest: Manifest, message: Forward, data: Buffer
    ) -> None:
        sizes = holding.worker.sizes
        expected = (sizes.input_bytes, manifest.tokens_per_microbatch * TOKEN_BYTES)
        announced = (message.input_bytes, message.target_bytes)
        if announced != expected or memoryview(data).nbytes != sum(expected):
            raise ProtocolError(
                f"{remote} sent {memoryview(data).nbytes} bytes for a microbatch of stage "
                f"{message.stage}, announced as {announced}; it takes {expected}"
            )


@dataclass(frozen=True, slots=True)
class _Answer:
    """The answer to a sender, with what is needed to count the microbatch afterwards."""

    header: Backward
    gradient: Output
    computation: Computation
    seconds: float
    """Computing time so far."""


class _MicrobatchTask:
    """Computes one microbatch in this stage, by way of the stages after it."""

    def __init__(
        self, holding: Holding, stage_count: int, message: Forward, payload: Buffer
    ) -> None:
        self.holding = holding
        self._stage_count = stage_count
        self.message = message
        view = memoryview(payload)
        self._input = view[: message.input_bytes]
        self._targets = view[message.input_bytes :]
        self._arrived = time.monotonic()

    async def run(self) -> _Answer:
        """Compute forward and backward, by way of the stages after this one."""
        message, holding = self.message, self.holding
        computation = holding.account.begin(message.step, message.microbatch, message.accumulate)
        if holding.next_stage is None:
            return await self._run_last_stage(computation)
        return await self._run_middle_stage(computation, holding.next_stage)

    async def count_later(self, answer: _Answer) -> bool:
        """Compute the gradients of the weights that `run` left for later; return whether the
        microbatch is counted."""
        holding, gradient = self.holding, answer.gradient
        done = await holding.worker.count_weights(gradient)
        holding.meter.observe(answer.seconds, done.seconds)
        receipt = holding.account.finish(
            answer.computation, added=done.added, tokens=gradient.tokens,
            loss_sum=gradient.loss_sum, transcript=done.transcript,
        )  # fmt: skip
        return receipt is not None

    async def _run_last_stage(self, computation: Computation) -> _Answer:
        output = await self.holding.worker.forward(
            computation.step,
            computation.microbatch,
            computation.accumulate,
            (self._input, self._targets),
        )
        return self._answer(computation, output, output.seconds, output.loss_sum or 0.0)

    async def _run_middle_stage(self, computation: Computation, next_stage: Downstream) -> _Answer:
        message, worker = self.message, self.holding.worker
        activation = await worker.forward(
            computation.step, computation.microbatch, computation.accumulate, (self._input,)
        )
        try:
            answer = await self._send_on(next_stage, activation, message.accumulate)
            faults.inject_outage(FaultPoint.BACKWARD, message.step)
            self._check(answer)
            gradient = await worker.backward(activation, answer.payload)
        except BaseException:
            worker.discard(activation)
            raise
        activation.release()
        seconds = activation.seconds + gradient.seconds
        return self._answer(computation, gradient, seconds, answer.header.loss_sum, answer.header)

    def _check(self, answer: EdgeAnswer) -> None:
        """Raise MicrobatchAbandoned for an answer that no honest peer of the next stage gives."""
        worker, header = self.holding.worker, answer.header
        if memoryview(answer.payload).nbytes != worker.sizes.output_gradient_bytes:
            raise MicrobatchAbandoned("the returned gradient has a wrong size")
        behind = self._stage_count - 1 - self.holding.stage
        if len(header.receipts) > behind or len(header.owing) > behind:
            raise MicrobatchAbandoned(
                f"the answer names {len(header.receipts)} receipts and {len(header.owing)} peers "
                f"without one, of {behind} stages"
            )

    async def _send_on(
        self, next_stage: Downstream, output: Output, accumulate: tuple[StageIndex, ...]
    ) -> EdgeAnswer:
        """Send this stage's output to the next one; return the answer with its gradient."""
        if output.payload is None:
            raise MicrobatchAbandoned("the stage worker returned no activation")
        message = self.message
        return await next_stage.send(
            MicrobatchRequest(
                message.step, message.microbatch, accumulate,
                output.payload, self._targets, message.ticket, message.is_copy,
            )
        )  # fmt: skip

    def _answer(
        self, computation: Computation, gradient: Output, seconds: float, loss_sum: float,
        behind: Backward | None = None,
    ) -> _Answer:  # fmt: skip
        """Record the computation in the account; return the answer to the sender. `behind` is the
        answer of the next stage, if there is one."""
        account, meter = self.holding.account, self.holding.meter
        self.holding.memory.computed()
        if gradient.owed:
            service_seconds = seconds + meter.weights_seconds
            receipt = account.receipt(computation.step, computation.microbatch)
        else:
            service_seconds = seconds
            meter.observe(seconds)
            receipt = account.finish(
                computation, added=gradient.added, tokens=gradient.tokens,
                loss_sum=gradient.loss_sum, transcript=gradient.transcript,
            )  # fmt: skip
        receipts = () if behind is None else behind.receipts
        header = Backward(
            request=self.message.request,
            receipts=receipts if receipt is None else (*receipts, receipt),
            service_seconds=service_seconds,
            total_seconds=time.monotonic() - self._arrived,
            loss_sum=loss_sum,
            tokens=gradient.tokens,
            owing=() if behind is None else behind.owing,
        )
        return _Answer(header, gradient, computation, seconds)
