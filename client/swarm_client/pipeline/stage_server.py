"""Serving a stage: activations come in, gradients go back.

Every microbatch is one task: forward, on to a peer of the next stage, backward, answer. The number
of tasks is bounded by the manifest's queue length and by the credits of each edge, so sockets are
always drained, whatever the device does (design: the life of a microbatch).

Invariant: a receipt is signed if and only if the microbatch is in the accumulator.
`_MicrobatchTask` decides whether a microbatch is counted and signs;
`swarm_client.pipeline.receipts` stores the receipts; `swarm_client.pipeline.step_close` removes
both together; the accumulator is in the stage worker (`swarm_client.stage.worker.accumulator`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import trio

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.membership.admission_gate import AdmissionGate
from swarm_client.membership.membership import Membership
from swarm_client.pipeline.downstream import Downstream, MicrobatchRequest
from swarm_client.pipeline.edge import HELLO_SECONDS, Buffer, Stream
from swarm_client.pipeline.errors import MicrobatchAbandoned
from swarm_client.pipeline.held_stage import Holding
from swarm_client.stage.handle.slots import Output
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_shared.base.errors import AdmissionError, LinkClosed, ProtocolError
from swarm_shared.base.types import PeerId
from swarm_shared.network import FrameLimits
from swarm_shared.protocol import (
    Backward,
    Forward,
    NotFinite,
    RefusalReason,
    StageCancel,
    StageHello,
    StageHelloAnswer,
    StageRefused,
    encode,
    parse,
    stage_requests,
)
from swarm_shared.run.manifest import Manifest

log = logging.getLogger(__name__)

HELLO_LIMITS = FrameLimits(max_header_bytes=16 * 1024)
"""Frame limits before the sender has shown a certificate: all that an unadmitted peer can make this
one buffer."""

MAX_HEADER_BYTES = 512 * 1024
"""Bytes of a stage message's header; a few hundred receipts of half a kilobyte each."""

ANSWER_STALL_SECONDS = 30.0
"""Seconds in which a sender must take a megabyte of its answer. A slower one is disconnected: its
microbatches occupy queue slots."""

PAUSED_DETAIL = "this peer is paused"

TOKEN_BYTES = 4
"""Bytes of a token id or target on the wire (uint32)."""


def stage_limits(manifest: Manifest) -> FrameLimits:
    """Frame limits for the run: one activation or token ids with targets, or a gradient."""
    token_bytes = manifest.tokens_per_microbatch * TOKEN_BYTES
    request_bytes = max(manifest.activation_bytes, token_bytes) + token_bytes
    return FrameLimits(
        max_header_bytes=MAX_HEADER_BYTES,
        max_payload_bytes=max(request_bytes, manifest.gradient_bytes),
    )


class StageServer:
    """Handler of the stage protocol. `holding` and `next_stage` return what is served now."""

    def __init__(
        self,
        membership: Callable[[], Membership | None],
        holding: Callable[[], Holding | None],
        next_stage: Callable[[], Downstream | None],
        gate: AdmissionGate,
        uplink_seconds: Callable[[Holding], float],
        report_not_finite: Callable[[NotFinite], None] = lambda _: None,
    ) -> None:
        """`uplink_seconds` returns the seconds of the uplink that one microbatch takes;
        `report_not_finite` reports a computation that was not finite at this peer."""
        self._report_not_finite = report_not_finite
        self._uplink_seconds = uplink_seconds
        self._membership = membership
        self._holding = holding
        self._next_stage = next_stage
        self._gate = gate
        self.refused: dict[RefusalReason, int] = dict.fromkeys(RefusalReason, 0)
        """Refusals sent, by reason."""
        self._paused = False
        self._task_scopes: set[trio.CancelScope] = set()
        """Scopes of the microbatches in flight, from before the forward to the gradient."""

    def pause(self) -> None:
        """Take no new microbatch: senders receive a busy refusal and choose other peers."""
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def hand_back(self) -> None:
        """While paused: cancel what is in flight, so that senders give it to other peers."""
        if self._paused:
            for work in self._task_scopes:
                work.cancel()

    async def handle(self, stream: Stream) -> None:
        """Serve one sender until its stream ends."""
        manifest = await self._handshake(stream)
        if manifest is None:
            return
        stream.expect(stage_limits(manifest))
        # Twice the credits: a request that was cancelled or answered a moment ago may still be
        # listed.
        most = 2 * manifest.limits.edge_credits
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
                        elif isinstance(message, Forward) and len(scopes) >= most:
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
                finally:
                    nursery.cancel_scope.cancel()
        except* LinkClosed:
            pass  # the sender has disconnected; its gradients have no receiver

    async def _handshake(self, stream: Stream) -> Manifest | None:
        """Answer the sender's hello; return the run's manifest, or None when the sender was
        refused."""
        frame = await stream.receive(timeout_seconds=HELLO_SECONDS)
        hello = parse(stage_requests, frame.header)
        membership, holding = self._membership(), self._holding()
        refusal: tuple[RefusalReason, str] | None = None
        if not isinstance(hello, StageHello):
            raise ProtocolError(f"{stream.remote} did not begin with a hello")
        if membership is None or holding is None:
            refusal = (RefusalReason.WRONG_STEP, "this peer holds no stage now")
        else:
            try:
                self._gate.check(stream.remote, hello.run, hello.certificate)
            except AdmissionError as error:
                refusal = (RefusalReason.NOT_ADMITTED, str(error)[:500])
        if refusal is not None:
            self.refused[refusal[0]] += 1
            await stream.send(encode(StageRefused(reason=refusal[0], detail=refusal[1])))
            await stream.close()
            return None
        assert membership is not None
        assert holding is not None
        answer = StageHelloAnswer(
            certificate=membership.certificate,
            stage=holding.stage,
            credits=membership.manifest.limits.edge_credits,
        )
        await stream.send(encode(answer))
        return membership.manifest

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
            self._gate.check_not_revoked(stream.remote)
        except AdmissionError as error:
            return refuse(RefusalReason.NOT_ADMITTED, str(error))
        membership, holding = self._membership(), self._holding()
        if membership is None or holding is None or holding.stage != message.stage:
            return refuse(RefusalReason.WRONG_STEP, "this peer holds another stage")
        if not _has_parameters_for(holding, message):
            return refuse(RefusalReason.WRONG_STEP, f"this peer works on step {holding.step}")
        if not self._gate.may_send(stream.remote, message.stage):
            # Wrong step rather than not admitted: the newer roster may not have arrived yet.
            return refuse(
                RefusalReason.WRONG_STEP, "the roster has the sender in no preceding stage"
            )
        if self._paused:
            return refuse(RefusalReason.BUSY, PAUSED_DETAIL)
        if holding.in_flight >= membership.manifest.limits.stage_queue:
            return refuse(RefusalReason.BUSY, f"{holding.in_flight} microbatches are queued")
        self._check_sizes(stream.remote, holding, membership.manifest, message, payload)
        holding.in_flight += 1
        try:
            faults.inject_outage(FaultPoint.FORWARD, message.step)
            work = _MicrobatchTask(
                holding, self._next_stage(), membership.manifest, message, payload
            )
            answer = await self._run_task(work)
            if answer is None:
                # Not BUSY: a peer downstream may have counted it, and the sender must ask for a
                # mask.
                return refuse(RefusalReason.FAILED, PAUSED_DETAIL)
            header, gradient = answer
            header = header.model_copy(update={"uplink_seconds": self._uplink_seconds(holding)})
            faults.inject_outage(FaultPoint.RECEIPT, message.step)
            faults.inject(FaultPoint.RECEIPT, message.step)
            try:
                await stream.send(
                    encode(header), gradient.payload or b"", stall_seconds=ANSWER_STALL_SECONDS
                )
            finally:
                gradient.release()
        except (RequestFailed, WorkerDied, MicrobatchAbandoned) as error:
            training = message.mode == "train"
            if training and isinstance(error, RequestFailed) and error.code == "not_finite":
                self._report_not_finite(NotFinite(step=message.step, microbatch=message.microbatch))
            over = not _has_parameters_for(holding, message)
            reason = RefusalReason.WRONG_STEP if over else RefusalReason.FAILED
            return refuse(reason, str(error))
        finally:
            holding.in_flight -= 1
        return None

    async def _run_task(self, work: _MicrobatchTask) -> tuple[Backward, Output] | None:
        """Run the task; None when this peer was paused before the gradient arrived."""
        answer = None
        with trio.CancelScope() as scope:
            self._task_scopes.add(scope)
            try:
                answer = await work.run()
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


def _has_parameters_for(holding: Holding, message: Forward) -> bool:
    """Whether this peer has the parameters with which the message has to be computed."""
    if message.mode == "evaluate":
        return holding.evaluates(message.step)
    return holding.works_on(message.step)


class _MicrobatchTask:
    """One microbatch in this stage."""

    def __init__(
        self,
        holding: Holding,
        next_stage: Downstream | None,
        manifest: Manifest,
        message: Forward,
        payload: Buffer,
    ) -> None:
        self._holding = holding
        self._next_stage = next_stage
        self._manifest = manifest
        self._message = message
        view = memoryview(payload)
        self._input = view[: message.input_bytes]
        self._targets = view[message.input_bytes :]
        self._compute_seconds = 0.0
        self._arrived = time.monotonic()
        self._accumulation_requested = False

    def _still_wanted(self) -> bool:
        return _has_parameters_for(self._holding, self._message)

    def _receipt(self) -> str | None:
        return self._holding.receipts.get(self._message.step, self._message.microbatch)

    def _may_accumulate(self) -> bool:
        """Whether to count the microbatch: the mask includes this stage, it has no receipt, and the
        step is not closing."""
        return (
            self._message.mode == "train"
            and self._holding.stage in self._message.accumulate
            and self._receipt() is None
            and not self._holding.closes(self._message.step)
        )

    def _request_accumulation(self) -> bool:
        """The same, recorded as requested from the worker."""
        self._accumulation_requested = self._may_accumulate()
        return self._accumulation_requested

    def _needs_receipt(self, output: Output) -> bool:
        """Whether the accumulator holds the microbatch without a receipt.

        Not only if it was added just now: an earlier request may have been cancelled after the
        worker had counted the microbatch and before it was signed. The worker does not add it
        again, and without a receipt it would be leased again and again.
        """
        if not self._still_wanted():
            return False
        held = self._accumulation_requested and not self._holding.closes(self._message.step)
        return output.added or (held and self._receipt() is None)

    async def run(self) -> tuple[Backward, Output]:
        if self._message.mode == "evaluate":
            return await self._evaluate()
        if self._holding.is_last:
            return await self._run_last_stage()
        return await self._run_middle_stage()

    async def _run_last_stage(self) -> tuple[Backward, Output]:
        message, worker = self._message, self._holding.worker
        output = await worker.forward(
            message.step,
            message.microbatch,
            self._request_accumulation(),
            (self._input, self._targets),
        )
        self._holding.observe(output.seconds)
        self._compute_seconds = output.seconds
        return self._answer(output, (), output.loss_sum or 0.0), output

    async def _run_middle_stage(self) -> tuple[Backward, Output]:
        message, worker, downstream = self._message, self._holding.worker, self._next_stage
        assert downstream is not None
        activation = await worker.forward(
            message.step, message.microbatch, self._request_accumulation(), (self._input,)
        )
        try:
            assert activation.payload is not None
            answer = await downstream.send(
                MicrobatchRequest(
                    "train", message.step, message.microbatch, message.accumulate,
                    activation.payload, self._targets,
                )
            )  # fmt: skip
            faults.inject_outage(FaultPoint.BACKWARD, message.step)
            if memoryview(answer.payload).nbytes != worker.sizes.output_gradient_bytes:
                raise MicrobatchAbandoned("the returned gradient has a wrong size")
            gradient = await worker.backward(activation, answer.payload)
        except BaseException:
            worker.discard(activation)
            raise
        activation.release()
        self._compute_seconds = activation.seconds + gradient.seconds
        self._holding.observe(self._compute_seconds)
        return (
            self._answer(gradient, answer.header.receipts, answer.header.loss_sum),
            gradient,
        )

    def _answer(self, output: Output, receipts: tuple[str, ...], loss_sum: float) -> Backward:
        message, book = self._message, self._holding.receipts
        if self._needs_receipt(output):
            book.add(
                message.step,
                message.microbatch,
                self._manifest.training.sequences_per_microbatch,
                output.tokens,
                output.loss_sum if self._holding.is_last else None,
            )
        own = self._receipt()
        return Backward(
            request=message.request,
            receipts=(*receipts, own) if own is not None else receipts,
            service_seconds=self._compute_seconds,
            total_seconds=time.monotonic() - self._arrived,
            loss_sum=loss_sum,
            tokens=output.tokens,
        )

    async def _evaluate(self) -> tuple[Backward, Output]:
        message, worker = self._message, self._holding.worker
        last = self._holding.is_last
        parts = (self._input, self._targets) if last else (self._input,)
        output = await worker.evaluate(parts)
        if last:
            loss_sum, tokens = output.loss_sum or 0.0, output.tokens
        else:
            try:
                assert output.payload is not None
                assert self._next_stage is not None
                answer = await self._next_stage.send(
                    MicrobatchRequest(
                        "evaluate", message.step, message.microbatch, (),
                        output.payload, self._targets,
                    )
                )  # fmt: skip
            finally:
                output.release()
            loss_sum, tokens = answer.header.loss_sum, answer.header.tokens
        header = Backward(
            request=message.request, receipts=(), service_seconds=output.seconds,
            total_seconds=time.monotonic() - self._arrived, loss_sum=loss_sum, tokens=tokens,
        )  # fmt: skip
        return header, output
