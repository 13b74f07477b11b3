"""The daemon's handle on one stage worker (trio, no torch).

Owns the slots through which payloads pass, and killing a worker that has hung. Does not own
requests and answers in general (`swarm_client.ipc.child_rpc`), the order of work
(`swarm_client.stage.worker.compute_loop`) nor restarting a worker
(`swarm_client.volunteer.stage_manager`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import trio

from swarm_client.ipc import shared_memory
from swarm_client.ipc.child_process import ChildProcess
from swarm_client.ipc.child_rpc import ChildRpc
from swarm_client.machine.memory_limit import limit_memory
from swarm_client.stage.handle.liveness import Liveness, Outstanding
from swarm_client.stage.handle.slots import Output, SlotPool
from swarm_client.stage.handle.stage_memory import slot_count
from swarm_client.stage.handle.warm_worker import WorkerChild, worker_process
from swarm_client.stage.protocol import messages
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_client.stage.protocol.slot_sizes import SlotSizes, slot_sizes
from swarm_shared.base.error_groups import single_error_unwrapped
from swarm_shared.base.text import memory_text
from swarm_shared.base.transcript import KeptTensors
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.protocol import SumCheck
from swarm_shared.protocol.framing import Buffer
from swarm_shared.run.manifest import Manifest
from swarm_shared.scheduling.placement.stage_sizes import stage_sizes

KEPT_BUDGET_BYTES = 512 * 2**20
"""Host memory for taking microbatches out of the accumulator again, in bytes; see
`messages.ConfigureStage`."""

_COMPUTATIONS = (
    messages.RunForward,
    messages.RunBackward,
    messages.RunWeights,
    messages.SaveKept,
    messages.RunAudit,
)
"""Requests that run the model, each kind with code of its own."""

_STORAGE = (
    messages.ConfigureStage,
    messages.SaveStageState,
    messages.LoadStageState,
    messages.ReinitialiseStage,
)
"""Requests whose duration depends on storage."""


class StageWorker:
    """The handle of one worker; many tasks may call it at once. Made by `open_worker`."""

    def __init__(
        self,
        child: ChildProcess[messages.WorkerAnswer],
        manifest: Manifest,
        stage: StageIndex,
        limit_bytes: int | None = None,
    ) -> None:
        self.stage = stage
        self.sizes: SlotSizes = slot_sizes(manifest, stage)
        self.state_bytes = stage_sizes(manifest)[stage].state_bytes
        """Bytes of the tensors of a file that `save_state` writes."""
        self._tokens = manifest.tokens_per_microbatch
        self._child = child
        limited = "" if limit_bytes is None else f" (limited to {memory_text(limit_bytes)})"
        self._rpc = ChildRpc(child, f"the compute process of stage {stage}{limited}")
        self._liveness = Liveness()
        microbatches = manifest.limits.stage_queue
        self.slot_count = slot_count(manifest)
        self._forward_slots = SlotPool(range(microbatches))
        self._backward_slots = SlotPool(range(microbatches, self.slot_count))
        self._slots: shared_memory.Segment | None = None
        self._configured: messages.StageConfigured | None = None
        self._digest = ""

    # ---- status

    @property
    def configured(self) -> messages.StageConfigured:
        """Names and sizes of the worker's shared memory."""
        assert self._configured is not None
        return self._configured

    @property
    def digest(self) -> str:
        """The digest of the state's fingerprint at the worker's version."""
        return self._digest

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait_died(self) -> WorkerDied:
        """Wait for the worker's end and return the error that callers get."""
        return await self._rpc.wait_died()

    # ---- computations

    async def forward(
        self, step: Step, microbatch: MicrobatchIndex, accumulate: bool, parts: Sequence[Buffer]
    ) -> Output:
        """Run one microbatch forward (on the last stage backward too); see `Output`.

        `parts` are written one after another: the input, on the last stage then the targets.
        Cancelling the call discards the microbatch.
        """
        request = partial(
            messages.RunForward, step=step, microbatch=microbatch, accumulate=accumulate
        )
        return await self._compute(self._forward_slots, request, parts)

    async def backward(self, handle: Output, payload: Buffer) -> Output:
        """Run the backward pass of an earlier forward, given the gradient of its output.

        `handle` is the Output of that forward; release it before or after, as the sender needs it.
        Cancelling the call discards the microbatch; if it has just been computed, it stays in the
        accumulator, and `prepare_round` lists it.
        """
        request = partial(messages.RunBackward, forward=handle.request)
        try:
            return await self._compute(self._backward_slots, request, (payload,))
        except trio.Cancelled:
            self.discard(handle)
            raise

    def discard(self, handle: Output) -> None:
        """Free the slot of a forward and what is kept for its backward, which will not follow."""
        handle.release()
        self._rpc.post(messages.Discard(request=handle.request))

    async def count_weights(self, handle: Output) -> messages.WeightsDone:
        """Compute and accumulate what an `owed` output has left. Cancelling the call discards
        it."""
        request = messages.RunWeights(computation=handle.request)
        try:
            return await self._rpc.call(request, messages.WeightsDone, on_cancel=messages.Discard)
        except (trio.Cancelled, RequestFailed):
            self.discard(handle)
            raise

    # ---- audits

    async def save_kept(
        self, step: Step, microbatch: MicrobatchIndex, path: Path, tensors: KeptTensors,
        blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        """Write tensors of a microbatch in the accumulator to a file; of the gradient that was
        computed these blocks. RequestFailed: unknown_microbatch when it is not kept. Cancelling the
        call discards it."""
        request = messages.SaveKept(
            step=step, microbatch=microbatch, path=str(path), tensors=tensors, blocks=tuple(blocks)
        )
        await self._rpc.call(request, messages.Done, on_cancel=messages.Discard)

    async def audit(
        self, step: Step, microbatch: MicrobatchIndex, inputs: Path,
        shown: messages.ShownFile | None, secret: str | None,
    ) -> messages.AuditDone:  # fmt: skip
        """Compute another peer's microbatch from files; see `messages.RunAudit`."""
        request = messages.RunAudit(
            step=step, microbatch=microbatch, inputs_path=str(inputs), shown=shown, secret=secret
        )
        return await self._rpc.call(request, messages.AuditDone)

    # ---- control

    async def uncommit(self, step: Step, microbatches: Iterable[MicrobatchIndex]) -> bool:
        """Take microbatches out of the step's accumulator; False when that cannot be done."""
        request = messages.Uncommit(step=step, microbatches=tuple(microbatches))
        return (await self._rpc.call(request, messages.Uncommitted)).ok

    async def reset_accumulator(self, step: Step) -> None:
        """Empty the step's accumulator and drop what is in flight of it."""
        await self._rpc.call(messages.ResetAccumulator(step=step), messages.Done)

    async def prepare_round(self, step: Step) -> messages.RoundPrepared:
        """Fill the `gradients` segment; the answer lists the microbatches in it."""
        return await self._rpc.call(messages.PrepareRound(step=step), messages.RoundPrepared)

    async def norm(self, step: Step, step_tokens: int) -> messages.NormComputed:
        """Squared norms of the averaged gradient in the `result` segment."""
        request = messages.ComputeNorm(step=step, step_tokens=step_tokens)
        return await self._rpc.call(request, messages.NormComputed)

    async def digest_sums(
        self, check: SumCheck, part: Literal["own", "tied"], stops: Sequence[int]
    ) -> messages.SumsDigested:
        """Linear digests of the slices of one part, in the `gradients` and `result` segments;
        without details also its sketches."""
        request = messages.DigestSums(
            step=check.step, part=part, seed=check.seed, stops=tuple(stops), weights=check.weights,
            sketches=not check.details,
        )  # fmt: skip
        return await self._rpc.call(request, messages.SumsDigested)

    async def apply(
        self, step: Step, step_tokens: int, global_norm: float, learning_rate: float
    ) -> messages.UpdateApplied:
        """Clip, step, and empty the step's accumulator; the worker is then at version `step`."""
        request = messages.ApplyUpdate(
            step=step, step_tokens=step_tokens, global_norm=global_norm, learning_rate=learning_rate
        )
        done = await self._rpc.call(request, messages.UpdateApplied)
        self._digest = done.digest
        return done

    async def save_state(self, path: Path, version: Version) -> None:
        """Write parameters and optimizer state atomically."""
        request = messages.SaveStageState(path=str(path), version=version)
        await self._rpc.call(request, messages.Done)

    async def load_state(self, path: Path, version: Version) -> str:
        """Load parameters and optimizer state; return `digest`."""
        return await self._loaded(messages.LoadStageState(path=str(path), version=version))

    async def reinitialise(self, version: Version) -> str:
        """Start again from the manifest's seed; return `digest`."""
        return await self._loaded(messages.ReinitialiseStage(version=version))

    async def _loaded(self, request: messages.LoadStageState | messages.ReinitialiseStage) -> str:
        self._digest = (await self._rpc.call(request, messages.StageStateLoaded)).digest
        return self._digest

    async def limit(self, limits: messages.SetLimits) -> None:
        """Limit the worker's use of its device from now on."""
        await self._rpc.call(limits, messages.Done)

    # ---- machinery

    async def _compute(
        self,
        pool: SlotPool,
        build: Callable[..., messages.ComputeRequest],
        parts: Sequence[Buffer],
    ) -> Output:
        """Run `build(slot=..., nbytes=...)` with `parts` in a slot of `pool`."""
        try:
            slot = await pool.take()
        except trio.EndOfChannel:
            raise self._rpc.died() from None

        def give_back() -> None:
            pool.give(slot)

        try:
            nbytes = self._fill(slot, parts)
        except RequestFailed:
            give_back()
            raise
        answer = await self._rpc.call(
            build(slot=slot, nbytes=nbytes), messages.Computed,
            on_cancel=messages.Discard, on_abandoned=give_back,
        )  # fmt: skip
        return self._output(answer, slot, give_back)

    def _view(self, slot: int, nbytes: int) -> memoryview:
        assert self._slots is not None
        start = slot * self.sizes.slot_bytes
        return self._slots.buffer[start : start + nbytes]

    def _fill(self, slot: int, parts: Sequence[Buffer]) -> int:
        views = [memoryview(part).cast("B") for part in parts]
        nbytes = sum(view.nbytes for view in views)
        if nbytes > self.sizes.slot_bytes:
            raise RequestFailed(
                "bad_input",
                f"a payload of {nbytes} bytes does not fit stage {self.stage}'s slots "
                f"of {self.sizes.slot_bytes} bytes",
            )
        with self._view(slot, nbytes) as target:
            start = 0
            for view in views:
                target[start : start + view.nbytes] = view
                start += view.nbytes
        return nbytes

    def _output(
        self, answer: messages.Computed, slot: int, give_back: Callable[[], None]
    ) -> Output:
        match answer:
            case messages.ForwardDone():
                return Output(
                    answer.request, self._view(slot, answer.nbytes), self._tokens,
                    answer.seconds, _release=give_back,
                )  # fmt: skip
            case messages.BackwardDone():
                payload = self._view(slot, answer.nbytes) if answer.nbytes else None
                return Output(
                    answer.request, payload, answer.tokens, answer.seconds,
                    answer.loss_sum, answer.added, answer.transcript, answer.owed, give_back,
                )  # fmt: skip
        raise AssertionError(f"{type(answer).__name__} is no computation's answer")

    async def _receive_all(self) -> None:
        while (answer := await self._rpc.receive()) is not None:
            if isinstance(answer, messages.Computed):
                self._liveness.answered(answer.seconds)
            else:
                self._liveness.answered()
        self._fail_callers()

    def _fail_callers(self) -> None:
        """Fail the callers that still wait: others than the stage's holder use a worker, too, such
        as those that serve its kept tensors to auditors."""
        self._rpc.close()
        self._forward_slots.close()
        self._backward_slots.close()

    async def _kill_when_hung(self) -> None:
        silent_seconds = await self._liveness.wait_hung(self.outstanding)
        self._rpc.kill(f"it was ended after it had answered nothing for {silent_seconds:.0f} s")

    def outstanding(self) -> Outstanding:
        """Return the kind of work that has been asked for and is not answered."""
        pending = self._rpc.pending
        if not pending:
            return Outstanding.NOTHING
        for call in pending:
            # A storage request is not yet served if nothing was answered since it queued up.
            if isinstance(call.message, _STORAGE) and call.queued_behind != self._rpc.received:
                return Outstanding.STORAGE
        kinds = {type(call.message) for call in pending} - self._rpc.answered
        return Outstanding.FIRST if kinds.intersection(_COMPUTATIONS) else Outstanding.COMPUTING

    async def _configure(
        self, manifest: Manifest, device: str, threads: int, graph_budget_bytes: int,
        streamed_bytes: int, host_graph_bytes: int, namespace: str, base_path: Path | None,
    ) -> None:  # fmt: skip
        request = messages.ConfigureStage(
            manifest_json=manifest.model_dump_json(), stage=self.stage, device=device,
            threads=threads, graph_budget_bytes=graph_budget_bytes,
            streamed_bytes=streamed_bytes, host_graph_bytes=host_graph_bytes,
            kept_budget_bytes=KEPT_BUDGET_BYTES,
            slot_bytes=self.sizes.slot_bytes, slot_count=self.slot_count, namespace=namespace,
            base_path=None if base_path is None else str(base_path),
        )  # fmt: skip
        self._configured = await self._rpc.call(request, messages.StageConfigured)
        self._digest = self._configured.digest

    def _attach(self, attached: list[shared_memory.Segment]) -> None:
        configured = self.configured
        for name in (configured.slots_name, configured.gradients_name, configured.result_name):
            attached.append(shared_memory.attach(name))
        self._slots = attached[0]


@asynccontextmanager
async def open_worker(
    manifest: Manifest,
    stage: StageIndex,
    device: str,
    threads: int,
    graph_budget_bytes: int,
    namespace: str,
    log_path: Path,
    *,
    private_bytes: int | None = None,
    streamed_bytes: int = 0,
    host_graph_bytes: int = 0,
    process: AbstractAsyncContextManager[WorkerChild] | None = None,
    base_path: Path | None = None,
) -> AsyncIterator[StageWorker]:
    """Start a worker for one stage at version 0; on leaving, it is dead and its memory is freed.

    `namespace` begins the names of its shared memory; no other live worker may use it. `process`
    is a process started in advance (`swarm_client.stage.handle.warm_worker`); by default a new one
    is started. `base_path` is the file of the stage's frozen parameters. So many
    `streamed_bytes` of weights lie in host memory, graphs may take `host_graph_bytes` of it, and
    `private_bytes` bounds the memory that the worker takes beyond its imports (all three:
    `swarm_client.stage.handle.stage_memory`). WorkerDied or
    RequestFailed if it cannot start (missing device, too little memory).
    """
    attached: list[shared_memory.Segment] = []
    try:
        async with process or worker_process(threads, log_path) as child:
            limit = None if private_bytes is None else limit_memory(child.pid, private_bytes)
            worker = StageWorker(child, manifest, stage, limit)
            try:
                async with _quiet_nursery() as nursery:
                    nursery.start_soon(worker._receive_all)
                    nursery.start_soon(worker._rpc.send_all)
                    nursery.start_soon(worker._kill_when_hung)
                    await worker._configure(
                        manifest, device, threads, graph_budget_bytes, streamed_bytes,
                        host_graph_bytes, namespace, base_path,
                    )  # fmt: skip
                    worker._attach(attached)
                    yield worker
                    nursery.cancel_scope.cancel()
            finally:
                worker._fail_callers()
    finally:
        # The worker removes its segments itself, unless it was killed.
        for segment in attached:
            segment.unlink()
            segment.close()
        shared_memory.unlink_stale(f"{namespace}.")


@asynccontextmanager
async def _quiet_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery that raises a single exception of its block unwrapped.

    Its tasks must not fail: then a group of one is the block's own exception.
    """
    with single_error_unwrapped():
        async with trio.open_nursery() as nursery:
            yield nursery
