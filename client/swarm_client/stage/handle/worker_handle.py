"""The daemon's handle on one stage worker: trio, never torch.

Owns the slots through which payloads pass. Who waits for which answer, and what callers see when
the worker dies, is `exchange`'s; scheduling is the worker's loop's, restarting the holder's.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import trio

from swarm_client.ipc import shared_memory
from swarm_client.ipc.child_process import ChildProcess
from swarm_client.stage.handle.requests import Exchange
from swarm_client.stage.handle.slots import Buffer, Output, SlotPool
from swarm_client.stage.handle.warm_worker import WorkerChild, worker_process
from swarm_client.stage.protocol import messages
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_client.stage.protocol.slot_sizes import SlotSizes, slot_sizes
from swarm_shared.base.error_groups import single_error_unwrapped
from swarm_shared.base.errors import FrameError
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.run.manifest import Manifest

KEPT_BUDGET_BYTES = 512 * 2**20
"""Host memory for taking microbatches out of the accumulator again; see protocol.ConfigureStage."""

BACKWARD_SLOTS = 8
"""A forward's slot is held until its gradient is back, a backward's only while that is sent."""


class StageWorker:
    """Many tasks may call at once. Made by `open_worker`."""

    def __init__(
        self, child: ChildProcess[messages.WorkerAnswer], manifest: Manifest, stage: StageIndex
    ) -> None:
        self.stage = stage
        self.sizes: SlotSizes = slot_sizes(manifest, stage)
        self._tokens = manifest.tokens_per_microbatch
        self._child = child
        self._numbers = itertools.count(1)
        microbatches = manifest.limits.stage_queue
        self.slot_count = microbatches + min(microbatches, BACKWARD_SLOTS)
        self._forward_slots = SlotPool(range(microbatches))
        self._backward_slots = SlotPool(range(microbatches, self.slot_count))
        self._slots: shared_memory.Segment | None = None
        self._configured: messages.StageConfigured | None = None
        self._exchange = Exchange(child, f"the compute process of stage {stage}", self._close_slots)

    # ---- what it is

    @property
    def configured(self) -> messages.StageConfigured:
        """Names and sizes of the worker's shared memory."""
        assert self._configured is not None
        return self._configured

    @property
    def own_elements(self) -> int:
        return self.configured.own_elements

    @property
    def tied_elements(self) -> int:
        return self.configured.tied_elements

    @property
    def gradients_name(self) -> str:
        return self.configured.gradients_name

    @property
    def result_name(self) -> str:
        return self.configured.result_name

    @property
    def pid(self) -> int:
        return self._child.pid

    async def wait_died(self) -> WorkerDied:
        """Return when the worker has ended, with the error that callers get."""
        return await self._exchange.wait_died()

    # ---- computations

    async def forward(
        self, step: Step, microbatch: MicrobatchIndex, accumulate: bool, parts: Sequence[Buffer]
    ) -> Output:
        """Run one microbatch forward (on the last stage backward too); see `Output`.

        `parts` are written one after another: the input, on the last stage then the targets.
        Cancelling the call discards the microbatch.
        """

        def build(request: int, slot: int, nbytes: int) -> messages.RunForward:
            return messages.RunForward(
                request=request, step=step, microbatch=microbatch, accumulate=accumulate,
                slot=slot, nbytes=nbytes,
            )  # fmt: skip

        return await self._compute(self._forward_slots, build, parts)

    async def backward(self, handle: Output, payload: Buffer) -> Output:
        """Run the backward pass of an earlier forward, given the gradient of its output.

        `handle` is that forward's Output; release it before or after, as the sender needs it.
        Cancelling the call discards the microbatch; if it had just been computed, it stays in
        the accumulator, and `accumulated` tells.
        """

        def build(request: int, slot: int, nbytes: int) -> messages.RunBackward:
            return messages.RunBackward(
                request=request, forward=handle.request, slot=slot, nbytes=nbytes
            )

        try:
            return await self._compute(self._backward_slots, build, (payload,))
        except trio.Cancelled:
            self.discard(handle)
            raise

    async def evaluate(self, parts: Sequence[Buffer]) -> Output:
        """RunForward only; on the last stage the Output has loss_sum and no payload."""

        def build(request: int, slot: int, nbytes: int) -> messages.RunEvaluation:
            return messages.RunEvaluation(request=request, slot=slot, nbytes=nbytes)

        return await self._compute(self._forward_slots, build, parts)

    def discard(self, handle: Output) -> None:
        """No backward will follow this forward: free what is kept for it, and its slot."""
        handle.release()
        self._exchange.post(messages.Discard(request=handle.request))

    # ---- control

    async def uncommit(self, step: Step, microbatches: Iterable[MicrobatchIndex]) -> bool:
        """Take microbatches out of the step's accumulator; False when that cannot be done."""
        request = messages.Uncommit(
            request=self._number(), step=step, microbatches=tuple(microbatches)
        )
        return (await self._exchange.call(request, messages.Uncommitted)).ok

    async def reset_accumulator(self, step: Step) -> None:
        """Empty the step's accumulator and forget what is in flight of it."""
        request = messages.ResetAccumulator(request=self._number(), step=step)
        await self._exchange.call(request, messages.AccumulatorReset)

    async def accumulated(self, step: Step) -> tuple[MicrobatchIndex, ...]:
        """The microbatches in the step's accumulator, sorted."""
        request = messages.ListAccumulated(request=self._number(), step=step)
        return (await self._exchange.call(request, messages.AccumulatedMicrobatches)).microbatches

    async def prepare_round(self, step: Step) -> messages.RoundPrepared:
        """Fill the `gradients` segment; says which microbatches are in it."""
        request = messages.PrepareRound(request=self._number(), step=step)
        return await self._exchange.call(request, messages.RoundPrepared)

    async def norm(self, step: Step, step_tokens: int) -> messages.NormComputed:
        """Squared norms of the averaged gradient that is in the `result` segment."""
        request = messages.ComputeNorm(request=self._number(), step=step, step_tokens=step_tokens)
        return await self._exchange.call(request, messages.NormComputed)

    async def apply(
        self, step: Step, step_tokens: int, global_norm: float, learning_rate: float
    ) -> messages.UpdateApplied:
        """Clip, step, and empty the step's accumulator; the worker is then at version `step`."""
        request = messages.ApplyUpdate(
            request=self._number(), step=step, step_tokens=step_tokens,
            global_norm=global_norm, learning_rate=learning_rate,
        )  # fmt: skip
        return await self._exchange.call(request, messages.UpdateApplied)

    async def save_state(self, path: Path, version: Version) -> int:
        """Write parameters and optimizer state atomically; returns the bytes written."""
        request = messages.SaveStageState(request=self._number(), path=str(path), version=version)
        return (await self._exchange.call(request, messages.StageStateSaved)).nbytes

    async def load_state(self, path: Path, version: Version) -> messages.StageStateLoaded:
        request = messages.LoadStageState(request=self._number(), path=str(path), version=version)
        return await self._exchange.call(request, messages.StageStateLoaded)

    async def reinitialise(self, version: Version) -> messages.StageStateLoaded:
        """Start again from the manifest's seed."""
        request = messages.ReinitialiseStage(request=self._number(), version=version)
        return await self._exchange.call(request, messages.StageStateLoaded)

    async def limit(self, duty_cycle: float, threads: int, vram_bytes: int | None) -> None:
        """How much of its device it may use from now on."""
        request = messages.SetLimits(
            request=self._number(), duty_cycle=duty_cycle, threads=threads, vram_bytes=vram_bytes
        )
        await self._exchange.call(request, messages.LimitsSet)

    # ---- machinery

    def _number(self) -> int:
        return next(self._numbers)

    async def _compute(
        self,
        pool: SlotPool,
        build: Callable[[int, int, int], messages.ComputeRequest],
        parts: Sequence[Buffer],
    ) -> Output:
        try:
            slot = await pool.take()
        except trio.EndOfChannel:
            raise self._exchange.died() from None

        def give_back() -> None:
            pool.give(slot)

        try:
            nbytes = self._fill(slot, parts)
        except RequestFailed:
            give_back()
            raise
        request = build(self._number(), slot, nbytes)
        answer = await self._exchange.compute(request, give_back)
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
        self, answer: messages.WorkerAnswer, slot: int, give_back: Callable[[], None]
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
                    answer.loss_sum, answer.added, give_back,
                )  # fmt: skip
            case messages.EvaluateDone():
                give_back()
                return Output(answer.request, None, answer.tokens, answer.seconds, answer.loss_sum)
            case _:
                give_back()
                raise FrameError(
                    f"the stage worker answered a computation with {answer.kind!r}; "
                    "please report this as a bug"
                )

    def _close_slots(self) -> None:
        self._forward_slots.close()
        self._backward_slots.close()

    async def _configure(
        self, manifest: Manifest, device: str, threads: int, graph_budget_bytes: int,
        kept_budget_bytes: int, namespace: str,
    ) -> None:  # fmt: skip
        request = messages.ConfigureStage(
            request=self._number(), manifest_json=manifest.model_dump_json(), stage=self.stage,
            device=device, threads=threads, graph_budget_bytes=graph_budget_bytes,
            kept_budget_bytes=kept_budget_bytes, slot_bytes=self.sizes.slot_bytes,
            slot_count=self.slot_count, namespace=namespace,
        )  # fmt: skip
        self._configured = await self._exchange.call(request, messages.StageConfigured)

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
    kept_budget_bytes: int = KEPT_BUDGET_BYTES,
    process: AbstractAsyncContextManager[WorkerChild] | None = None,
) -> AsyncIterator[StageWorker]:
    """Start a worker for one stage at version 0; on leaving, it is dead and its memory gone.

    `namespace` begins the names of its shared memory and is not used by another live worker.
    `process` is one that was started ahead (`spare`); by default a new one is.
    WorkerDied or RequestFailed if it cannot start (no such device, not enough memory).
    """
    attached: list[shared_memory.Segment] = []
    try:
        async with process or worker_process(threads, log_path) as child:
            worker = StageWorker(child, manifest, stage)
            async with _quiet_nursery() as nursery:
                nursery.start_soon(worker._exchange.receive_all)
                nursery.start_soon(worker._exchange.send_all)
                nursery.start_soon(worker._exchange.watch)
                await worker._configure(
                    manifest, device, threads, graph_budget_bytes, kept_budget_bytes, namespace
                )
                worker._attach(attached)
                yield worker
                nursery.cancel_scope.cancel()
    finally:
        # The worker removes its segments itself, unless it was killed.
        for segment in attached:
            segment.unlink()
            segment.close()
        shared_memory.unlink_stale(f"{namespace}.")


@asynccontextmanager
async def _quiet_nursery() -> AsyncIterator[trio.Nursery]:
    """A nursery that raises what its block raised as it is, not wrapped in a group.

    For tasks that end quietly: then a group of one is the block's own exception.
    """
    with single_error_unwrapped():
        async with trio.open_nursery() as nursery:
            yield nursery
