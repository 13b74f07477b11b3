"""The compute loop: messages in, computations in the right order, answers out.

Owns the translation of request failures into Failed answers. Does not own which computation is next
(`swarm_shared.volunteer_rules.compute_order`). Any other exception is a bug: it ends the process
with a traceback in its log, and the daemon starts another one.
"""

from __future__ import annotations

import resource
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from swarm_client.fault_injection import faults
from swarm_client.fault_injection.faults import FaultPoint
from swarm_client.ipc.child_process import SyncLink
from swarm_client.ipc.numbered import Numbered
from swarm_client.stage.protocol import messages
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.worker.accelerator import (
    Accelerator,
    accelerator_named,
    accelerators,
    is_out_of_memory,
    release_cached,
)
from swarm_client.stage.worker.audits import AuditRunner
from swarm_client.stage.worker.compiling import backend_from_environment
from swarm_client.stage.worker.duty_cycle import DutyCycle
from swarm_client.stage.worker.flights import CountedWeights
from swarm_client.stage.worker.self_test import arithmetic_class, run_self_test
from swarm_client.stage.worker.shared_buffers import WorkerMemory
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.errors import CapacityError, LinkClosed, SwarmError
from swarm_shared.base.text import memory_text
from swarm_shared.base.types import MicrobatchIndex, Step
from swarm_shared.codecs.errors import CodecError
from swarm_shared.codecs.half_precision import is_finite
from swarm_shared.model.fixed_point_sums import totals_dtype
from swarm_shared.run.manifest import Manifest
from swarm_shared.volunteer_rules.compute_order import ComputeOrder, Part

HASH_WAIT_SECONDS = 0.002
"""Seconds between two checks for a message while a gradient is hashed and no request waits."""

_COMPUTING_CONTROLS = (
    messages.Uncommit,
    messages.PrepareRound,
    messages.ComputeNorm,
    messages.DigestSums,
    messages.ApplyUpdate,
)
"""The control requests whose computing time counts towards the duty cycle."""

Computation = messages.ComputeRequest | messages.RunWeights | messages.SaveKept | messages.RunAudit

WorkerLink = SyncLink[messages.WorkerRequest]
RequestT = TypeVar("RequestT", bound=Numbered)


class ComputeLoop:
    """Serves one daemon with one stage until the link ends."""

    def __init__(
        self, link: WorkerLink, runner: StageRunner, steps: StepRunner, memory: WorkerMemory,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._link = link
        self._runner = runner
        self._steps = steps
        self._auditing = AuditRunner(runner)
        self._memory = memory
        self._clock = clock
        self._duty = DutyCycle(clock)
        self._threads = torch.get_num_threads()
        self._waiting: ComputeOrder[Computation] = ComputeOrder()
        self._computing: int | None = None
        """Number of the request being computed, which may be discarded meanwhile."""
        self._hashing: CountedWeights | None = None
        self._unsent: messages.WeightsDone | None = None
        """The answer for the gradient that is being hashed."""
        self._unread: deque[messages.WorkerRequest | None] = deque()
        """Messages received while computing; None is the end of the link."""
        runner.between_layers = self._stop_if_discarded
        if runner.copies_while_computing:
            runner.while_computing = self._fetch_next

    def run(self) -> None:
        """Serve requests until the daemon closes the link."""
        try:
            while self._drain():
                request = self._waiting.take(memory_short=self._runner.graphs.is_short)
                began_at = self._clock()
                self._computing = request.request
                answer = _answer(request, self._compute)
                while _lacked_memory(answer) and self._runner.graphs.keep_less():
                    self._answer_hashed()
                    answer = _answer(request, self._compute)
                self._computing = None
                self._send(answer)
                self._duty.computed(self._clock() - began_at)
        except LinkClosed:
            return

    def _drain(self) -> bool:
        """Handle all received messages; wait for one when nothing is queued. False at the end."""
        # Messages are handled during a rest: other stages may wait for this one to close the step.
        while self._has_message(self._duty.rest_seconds()) or not self._waiting:
            self._await_hash()
            message = self._unread.popleft() if self._unread else self._link.receive()
            if message is None:
                return False
            match message:
                case messages.RunBackward():
                    self._add(Part.INPUT_GRADIENT, message)
                case messages.RunForward():
                    self._add(Part.FORWARD, message)
                case messages.RunWeights():
                    self._add(Part.WEIGHT_GRADIENTS, message)
                case messages.SaveKept() | messages.RunAudit():
                    self._add(Part.AUDIT, message)
                case messages.Discard():
                    self._discard(message.request)
                case _:
                    began_at = self._clock()
                    self._answer_hashed()
                    self._link.send(_answer(message, self._control))
                    if isinstance(message, _COMPUTING_CONTROLS):
                        self._duty.add_work(self._clock() - began_at)
        return True

    def _send(self, answer: Numbered) -> None:
        """Send a computation's answer, or keep it while its gradient is hashed."""
        if self._hashing is not None and self._unsent is None:
            assert isinstance(answer, messages.WeightsDone)
            self._unsent = answer
            return
        self._link.send(answer)
        if self._hashing is not None and self._hashing.is_hashed():
            self._answer_hashed()

    def _answer_hashed(self) -> None:
        """Answer for the gradient that is being hashed, if there is one, once it is."""
        counted, self._hashing = self._hashing, None
        answer, self._unsent = self._unsent, None
        if counted is not None and answer is not None:
            self._link.send(answer.model_copy(update={"transcript": counted.transcript()}))

    def _await_hash(self) -> None:
        """With nothing else to do, answer for the gradient that is being hashed, unless a message
        comes first."""
        while self._hashing is not None and not self._waiting and not self._has_message(0.0):
            if self._hashing.is_hashed(HASH_WAIT_SECONDS):
                self._answer_hashed()

    def _add(self, part: Part, request: Computation) -> None:
        self._waiting.add(part, *self._cell_of(request), request)

    def _has_message(self, wait_seconds: float) -> bool:
        return bool(self._unread) or self._link.has_message(wait_seconds)

    def _stop_if_discarded(self) -> None:
        """Called between two layers: a computation takes seconds, and the machine may be needed."""
        if self._computing is None or (self._unread and self._unread[-1] is None):
            return
        while self._link.has_message():
            message = self._link.receive()
            if isinstance(message, messages.Discard) and message.request == self._computing:
                raise RequestFailed("discarded", "discarded by the daemon while it was computed")
            self._unread.append(message)
            if message is None:
                return

    def _fetch_next(self) -> None:
        """Copy the next input to the device while it computes."""
        coming = self._waiting.next_forward()
        if isinstance(coming, messages.RunForward):
            with suppress(RequestFailed):  # its own forward reports the failure
                payload = self._memory.slot(coming.slot, coming.nbytes)
                self._runner.prefetch(coming.request, payload)

    def _discard(self, number: int) -> None:
        self._runner.discard(number)
        if self._waiting.discard(lambda queued: queued.request == number):
            failed = messages.Failed(code="discarded", message="discarded by the daemon")
            self._link.send(failed.numbered(number))

    # ---- computations

    def _compute(self, request: Computation) -> Numbered:
        if isinstance(request, messages.SaveKept | messages.RunAudit):
            self._answer_hashed()
            return self._audit(request)
        started = self._clock()
        if isinstance(request, messages.RunWeights):
            return self._weights(request, started)
        payload = self._memory.slot(request.slot, request.nbytes)
        step, _ = self._cell_of(request)
        result: ForwardResult | BackwardResult
        match request:
            case messages.RunForward():
                faults.inject(FaultPoint.FORWARD, request.step)
                result = self._runner.forward(
                    request.request, request.step, request.microbatch, request.accumulate, payload
                )
            case messages.RunBackward():
                faults.inject(FaultPoint.BACKWARD, step)
                result = self._runner.backward(request.forward, payload)
        return self._answer_of(request, step, result, started)

    def _weights(self, request: messages.RunWeights, started: float) -> messages.WeightsDone:
        self._answer_hashed()
        counted = self._runner.count_weights(request.computation)
        transcript = None
        if counted.is_hashed():
            transcript = counted.transcript()
        else:
            self._hashing = counted
        return messages.WeightsDone(
            added=counted.added, transcript=transcript, seconds=self._seconds(started)
        )

    def _audit(self, request: messages.SaveKept | messages.RunAudit) -> Numbered:
        match request:
            case messages.SaveKept():
                self._auditing.save_kept(
                    request.step, request.microbatch, Path(request.path), request.tensors,
                    request.blocks,
                )  # fmt: skip
                return messages.Done()
            case messages.RunAudit():
                return self._auditing.audit(
                    request.step, Path(request.inputs_path), request.shown, request.secret
                )

    def _cell_of(self, request: Computation) -> tuple[Step, MicrobatchIndex]:
        match request:
            case messages.RunBackward():
                return self._runner.cell_of(request.forward)
            case messages.RunWeights():
                return self._runner.cell_of(request.computation)
            case _:
                return request.step, request.microbatch

    def _answer_of(
        self,
        request: messages.ComputeRequest,
        step: Step,
        result: ForwardResult | BackwardResult,
        started: float,
    ) -> Numbered:
        tokens = self._runner.manifest.tokens_per_microbatch
        match result:
            case ForwardResult():
                host = self._runner.copier.to_host(result.output)
                slot = self._memory.slot(request.slot)
                nbytes = self._runner.codec.write_output(host, slot)
                self._runner.output_sent(request.request, slot[:nbytes])
                self._corrupt(FaultPoint.FORWARD, step, request.slot, nbytes)
                return messages.ForwardDone(nbytes=nbytes, seconds=self._seconds(started))
            case BackwardResult():
                nbytes, wire = 0, None
                if result.input_gradient is not None:
                    host = self._runner.copier.to_host(result.input_gradient)
                    slot = self._memory.slot(request.slot)
                    try:
                        nbytes = self._runner.codec.write_input_gradient(host, slot)
                    except CodecError:
                        self._runner.take_back(result)
                        raise
                    wire = slot[:nbytes]
                transcript = self._runner.transcribe(request.request, result, wire)
                if wire is not None:
                    self._corrupt(FaultPoint.BACKWARD, step, request.slot, nbytes)
                return messages.BackwardDone(
                    nbytes=nbytes, tokens=tokens, added=result.added,
                    loss_sum=result.loss_sum, transcript=transcript,
                    seconds=self._seconds(started), owed=result.owed is not None,
                )  # fmt: skip

    def _seconds(self, started: float) -> float:
        return self._duty.effective_seconds(self._clock() - started)

    def _corrupt(self, phase: FaultPoint, step: Step, slot: int, nbytes: int) -> None:
        faults.corrupt(phase, step, self._memory.slot(slot, nbytes))

    # ---- control

    def _control(self, request: Numbered) -> Numbered:
        match request:
            case messages.Uncommit():
                ok = self._runner.uncommit(request.step, request.microbatches)
                return messages.Uncommitted(ok=ok)
            case messages.ResetAccumulator():
                self._runner.open_parameter_set(request.step)
                self._runner.reset_step(request.step)
                return messages.Done()
            case messages.PrepareRound():
                microbatches = self._steps.prepare_round(request.step, self._memory.gradients)
                self._corrupt_totals(
                    FaultPoint.ALL_REDUCE, request.step, self._memory.gradients_segment.buffer
                )
                return messages.RoundPrepared(
                    microbatches=microbatches, finite=is_finite(self._memory.gradients)
                )
            case messages.ComputeNorm():
                self._inject_into_result(FaultPoint.NORM, request.step)
                return self._steps.norm(request.step, request.step_tokens, self._memory.result)
            case messages.DigestSums():
                return self._steps.digest_sums(request, self._memory.gradients, self._memory.result)
            case messages.ApplyUpdate():
                self._inject_into_result(FaultPoint.APPLY, request.step)
                fingerprint = self._steps.apply(
                    request.step, request.step_tokens, request.global_norm,
                    request.learning_rate, self._memory.result,
                )  # fmt: skip
                return messages.UpdateApplied(digest=fingerprint.digest, norm=fingerprint.norm)
            case messages.SetLimits():
                self._limit(request)
                return messages.Done()
            case _:
                return self._state(request)

    def _limit(self, request: messages.SetLimits) -> None:
        self._duty.change(request.duty_cycle)
        torch.set_num_threads(min(request.threads, self._threads))
        self._runner.limit_memory(request.vram_bytes, request.graph_bytes, request.host_graph_bytes)

    def _inject_into_result(self, phase: FaultPoint, step: int) -> None:
        faults.inject(phase, step)
        self._corrupt_totals(phase, step, self._memory.result_segment.buffer)

    def _corrupt_totals(self, phase: FaultPoint, step: int, totals: memoryview) -> None:
        faults.corrupt(
            phase, step, totals, as_float64=self._runner.parameter_sets.quantum is not None
        )

    def _state(self, request: Numbered) -> Numbered:
        match request:
            case messages.SaveStageState():
                faults.inject(FaultPoint.CHECKPOINT, request.version)
                self._steps.save(Path(request.path), request.version)
                return messages.Done()
            case messages.LoadStageState():
                digest = self._steps.load(Path(request.path), request.version).digest
            case messages.ReinitialiseStage():
                digest = self._steps.reinitialise(request.version).digest
            case _:
                raise RequestFailed(
                    "bad_input", f"a worker at work cannot carry out {type(request).__name__}"
                )
        return messages.StageStateLoaded(digest=digest)


def _answer(request: RequestT, carry_out: Callable[[RequestT], Numbered]) -> Numbered:
    """Return the answer under the request's number: Failed if the request or the machine is at
    fault; a bug raises."""
    return _outcome(request, carry_out).numbered(request.request)


def _outcome(request: RequestT, carry_out: Callable[[RequestT], Numbered]) -> Numbered:
    try:
        return carry_out(request)
    except RequestFailed as error:
        return messages.Failed(code=error.code, message=str(error))
    except CapacityError as error:
        return messages.Failed(code="out_of_memory", message=str(error))
    except SwarmError as error:
        return messages.Failed(code="bad_input", message=str(error))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        # Python's own MemoryError says nothing.
        reason = (str(error).splitlines() or ["Python has no memory"])[0]
        message = f"{_full_memory()} ({reason[:300]})"
    # Outside of the handler, because its traceback keeps tensors alive that must be freed first.
    release_cached()
    return messages.Failed(code="out_of_memory", message=message)


def _lacked_memory(answer: Numbered) -> bool:
    return isinstance(answer, messages.Failed) and answer.code == "out_of_memory"


def _full_memory() -> str:
    """Describe which memory is full: the daemon may have limited this process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
    if limit == resource.RLIM_INFINITY:
        return "the device's memory is full"
    return (
        f"the stage needs more than the {memory_text(limit)} that this process may take; "
        "offer more with --memory-gib, or leave the run"
    )


def _selected(name: str) -> Accelerator:
    """Select the device with this name and return it. RequestFailed (device) if torch sees none."""
    accelerator = accelerator_named(name)
    if accelerator is None:
        seen = ", ".join(str(present.device) for present in accelerators()) or "no accelerator"
        raise RequestFailed(
            "device",
            f"the device {name} is not there: this machine's torch sees {seen}; choose another "
            "with --device, or install the driver and a torch that is built for it",
        )
    accelerator.select()
    return accelerator


def serve(link: WorkerLink) -> None:
    """Run a worker: ConfigureStage, then work until the daemon closes the link."""
    try:
        link.send(messages.Awake())
    except LinkClosed:
        return
    request = link.receive()
    if isinstance(request, messages.RunSelfTest):
        with suppress(LinkClosed):
            link.send(_answer(request, _self_test))
        return
    if not isinstance(request, messages.ConfigureStage):
        return
    made: list[tuple[ComputeLoop, WorkerMemory]] = []

    def unlink() -> None:
        for _, memory in made:
            memory.unlink()

    try:
        try:
            link.send(_answer(request, lambda configure: _configure(link, configure, made)))
            for loop, _ in made:
                loop.run()
        finally:
            unlink()
    except LinkClosed:
        return
    finally:
        # Again: when the daemon is killed, the link ends first, and the death signal (which comes
        # once) may then interrupt the first unlink.
        unlink()


def _self_test(request: messages.RunSelfTest) -> Numbered:
    torch.set_num_threads(request.threads)
    return run_self_test(
        _selected(request.device), request.seconds, request.memory_bytes, request.duty_cycle
    )


def _configure(
    link: WorkerLink,
    request: messages.ConfigureStage,
    made: list[tuple[ComputeLoop, WorkerMemory]],
) -> Numbered:
    torch.set_num_threads(request.threads)
    manifest = Manifest.model_validate_json(request.manifest_json)
    if request.stage >= manifest.stage_count:
        raise RequestFailed(
            "bad_input",
            f"there is no stage {request.stage}; the manifest has {manifest.stage_count} stages",
        )
    accelerator, compile_backend = _selected(request.device), backend_from_environment()
    runner = StageRunner(
        manifest, request.stage, accelerator, request.graph_budget_bytes,
        request.kept_budget_bytes, compile_backend, request.streamed_bytes,
        request.host_graph_bytes,
    )  # fmt: skip
    if request.slot_bytes < runner.sizes.slot_bytes:
        raise RequestFailed(
            "bad_input",
            f"slots of {request.slot_bytes} bytes are too small; stage {request.stage} needs "
            f"{runner.sizes.slot_bytes}",
        )
    steps = StepRunner(runner)
    if request.base_path is not None:
        steps.load_base(Path(request.base_path))
    elif manifest.initial and manifest.model.has_adapters:
        raise RequestFailed("bad_input", "the file of the stage's frozen parameters is needed")
    if not accelerator.is_processor or compile_backend is not None:
        runner.warm_up()
    arithmetic = arithmetic_class(accelerator)
    digest = steps.fingerprint().digest
    # Last, so that every segment is listed in `made` when a signal arrives.
    memory = WorkerMemory(
        request.namespace, request.slot_bytes * request.slot_count, request.slot_bytes,
        runner.layout.count, totals_dtype(runner.parameter_sets.quantum),
    )  # fmt: skip
    made.append((ComputeLoop(link, runner, steps, memory), memory))
    return messages.StageConfigured(
        digest=digest,
        arithmetic=arithmetic,
        streamed_bytes=runner.parameter_sets.streamed_bytes,
        own_elements=runner.layout.own_count,
        tied_elements=runner.layout.tied_count,
        slots_name=memory.slots.name,
        gradients_name=memory.gradients_segment.name,
        result_name=memory.result_segment.name,
    )
