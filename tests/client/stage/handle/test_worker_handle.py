"""StageWorker handles with real worker processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import trio
import trio.testing

from kits.client.stage_runners import PLENTY, STEP, tokens_of
from kits.manifests import equal_stages, manifest_of
from swarm_client.ipc import shared_memory
from swarm_client.stage.handle.liveness import Outstanding
from swarm_client.stage.handle.slots import Output
from swarm_client.stage.handle.worker_handle import StageWorker, open_worker
from swarm_client.stage.protocol.errors import RequestFailed, WorkerDied
from swarm_shared.base.transcript import KeptTensors
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.model import FlatLayout, build_stage, build_whole, global_norm
from swarm_shared.run.manifest import (
    Manifest,
)

pytestmark = pytest.mark.process


@pytest.fixture
def namespace() -> str:
    return f"test-{uuid.uuid4().hex[:12]}"


def make_manifest(stages: int, stage_queue: int = 8) -> Manifest:
    return manifest_of(
        model={
            "vocabulary_size": 64, "hidden_size": 32, "intermediate_size": 48, "layers": stages,
            "heads": 4, "key_value_heads": 2, "sequence_length": 16,
        },
        stages=equal_stages(stages, stages),
        optimizer={"learning_rate": 1e-2, "warmup_steps": 0},
        limits={"stage_queue": stage_queue},
    )  # fmt: skip


@dataclass
class Deaths:
    """The reasons of requests that ended with their worker."""

    reasons: list[str] = field(default_factory=list)

    async def expect(self, method: Callable[..., Awaitable[object]], *arguments: object) -> None:
        with pytest.raises(WorkerDied) as caught:
            await method(*arguments)
        self.reasons.append(str(caught.value))


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def with_deadline() -> None:
        with trio.fail_after(100):
            await test()

    trio.run(with_deadline)


@asynccontextmanager
async def workers_of(
    manifest: Manifest, stages: list[int], namespace: str, folder: Path
) -> AsyncIterator[list[StageWorker]]:
    """One worker per entry of `stages`, started side by side."""
    opened: dict[int, StageWorker] = {}
    done = trio.Event()

    async def keep_open(position: int, task_status: trio.TaskStatus[None]) -> None:  # type: ignore[name-defined]
        async with open_worker(
            manifest,
            StageIndex(stages[position]),
            "cpu",
            1,
            PLENTY,
            f"{namespace}.{position}",
            folder / f"worker{position}.log",
        ) as worker:
            opened[position] = worker
            task_status.started()
            await done.wait()

    async with trio.open_nursery() as nursery:
        async with trio.open_nursery() as starting:
            for position in range(len(stages)):
                starting.start_soon(nursery.start, keep_open, position)
        yield [opened[position] for position in range(len(stages))]
        done.set()


async def counted(worker: StageWorker, output: Output) -> bool:
    """Whether the microbatch of an answer is put into the accumulator, now or before."""
    return output.added or (output.owed and (await worker.count_weights(output)).added)


async def through(workers: list[StageWorker], manifest: Manifest, microbatch: int) -> float:
    """One microbatch through the chain, as a stage server would drive it; returns the loss."""
    inputs, targets = tokens_of(manifest, microbatch)
    index = MicrobatchIndex(microbatch)

    async def from_stage(stage: int, payload: bytes | memoryview) -> tuple[bytes, float]:
        worker = workers[stage]
        if stage == len(workers) - 1:
            parts = [payload, targets.tobytes()]
            with await worker.forward(STEP, index, True, parts) as last:
                assert await counted(worker, last)
                assert last.loss_sum is not None
                assert last.tokens == manifest.tokens_per_microbatch
                return b"" if last.payload is None else bytes(last.payload), last.loss_sum
        output = await worker.forward(STEP, index, True, [payload])
        assert output.payload is not None
        gradient, loss_sum = await from_stage(stage + 1, output.payload)
        output.release()
        with await worker.backward(output, gradient) as back:
            assert await counted(worker, back)
            assert (back.payload is None) == (stage == 0)
            return b"" if back.payload is None else bytes(back.payload), loss_sum

    return (await from_stage(0, inputs.tobytes()))[1]


async def prepared(worker: StageWorker) -> np.ndarray:
    await worker.prepare_round(STEP)
    elements = worker.configured.own_elements + worker.configured.tied_elements
    segment = shared_memory.attach(worker.configured.gradients_name)
    try:
        return segment.array(np.float32, elements).copy()
    finally:
        segment.close()


def put_result(worker: StageWorker, values: np.ndarray) -> None:
    segment = shared_memory.attach(worker.configured.result_name)
    segment.array(np.float32, len(values))[:] = values
    segment.close()


def segments_of(namespace: str) -> list[Path]:
    return [p for folder in shared_memory.segment_folders() for p in folder.glob(f"{namespace}*")]


def test_chained_workers_train_like_the_whole_model(namespace: str, tmp_path: Path) -> None:
    manifest = make_manifest(3)
    whole = build_whole(manifest)
    losses = []
    for microbatch in range(4):
        tensors = (torch.from_numpy(t.astype(np.int64)) for t in tokens_of(manifest, microbatch))
        loss = whole(*tensors)
        loss.backward()
        losses.append(float(loss.detach()))
    by_name = dict(whole.named_parameters())
    seen_losses = [0.0] * 4

    async def drive(workers: list[StageWorker], microbatch: int) -> None:
        seen_losses[microbatch] = await through(workers, manifest, microbatch)

    async def main() -> None:
        # Stage 1 has two replicas; the second one only takes part in the step's close.
        async with workers_of(manifest, [0, 1, 2, 1], namespace, tmp_path) as workers:
            chain = workers[:3]
            async with trio.open_nursery() as nursery:
                for microbatch in range(4):
                    nursery.start_soon(drive, chain, microbatch)
            assert seen_losses == pytest.approx(losses, rel=1e-5)
            tokens = manifest.tokens_per_step
            results = [await prepared(worker) for worker in chain]
            for stage, flat in enumerate(results):
                check_gradients(stage, flat)
                put_result(workers[stage], flat)
            put_result(workers[3], results[1])
            norms = [await worker.norm(STEP, tokens) for worker in workers]
            assert norms[1].model_copy(update={"request": 0}) == norms[3].model_copy(
                update={"request": 0}
            )
            total = global_norm([norm.own_squared for norm in norms[:3]])
            square = sum(float((p.grad.double() / tokens).square().sum()) for p in by_name.values())
            assert total == pytest.approx(square**0.5, rel=1e-5)
            applied = [await worker.apply(STEP, tokens, total, 1e-2) for worker in workers]
            assert applied[1].digest == applied[3].digest
            assert len({one.digest for one in applied}) == 3
            assert (await workers[0].prepare_round(Step(2))).microbatches == ()
            # The replica's state, sent as a file, makes another stage-1 worker its equal.
            path = tmp_path / "state.safetensors"
            await workers[1].save_state(path, Version(1))
            assert await workers[3].reinitialise(Version(0)) == workers[3].configured.digest
            assert await workers[3].load_state(path, Version(1)) == applied[1].digest

    def check_gradients(stage: int, flat: np.ndarray) -> None:
        layout = FlatLayout.of(build_stage(manifest, stage))
        assert len(flat) == layout.count
        for entry in layout.entries:
            grad = by_name[entry.name].grad
            seen = torch.from_numpy(flat[entry.offset : entry.offset + entry.count])
            torch.testing.assert_close(seen.view(entry.shape), grad, rtol=1e-4, atol=1e-5)

    run(main)
    assert segments_of(namespace) == []


def test_failures_leave_the_worker_alive_and_its_accumulator_alone(
    namespace: str, tmp_path: Path
) -> None:
    manifest = make_manifest(2, stage_queue=2)
    inputs, targets = tokens_of(manifest, 0)

    async def refused(call: Awaitable[object]) -> str:
        with pytest.raises(RequestFailed) as caught:
            await call
        return caught.value.code

    async def main() -> None:
        async with workers_of(manifest, [0], namespace, tmp_path) as (worker,):
            index = MicrobatchIndex(0)
            # More refusals than slots: each must give its slot back.
            for _ in range(5):
                wrong = worker.forward(STEP, index, True, [inputs.tobytes(), targets.tobytes()])
                assert await refused(wrong) == "bad_input"
                too_long = worker.forward(STEP, index, True, [bytes(10**6)])
                assert await refused(too_long) == "bad_input"
                late = worker.forward(Step(4), index, True, [inputs.tobytes()])
                assert await refused(late) == "wrong_step"
            output = await worker.forward(STEP, index, True, [inputs.tobytes()])
            bad = np.full(worker.sizes.output_bytes // 4, np.nan, np.float32)
            for _ in range(5):
                assert await refused(worker.backward(output, bad.tobytes())) == "bad_input"
            assert (await worker.prepare_round(STEP)).microbatches == ()
            assert await refused(worker.prepare_round(Step(2))) == "wrong_step"
            assert not (await prepared(worker)).any()
            with await worker.backward(output, np.ones_like(bad).tobytes()) as back:
                assert await counted(worker, back)
            assert await worker.uncommit(STEP, [index])
            assert not await worker.uncommit(Step(9), [index])
            await worker.reset_accumulator(STEP)
            missing = tmp_path / "none" / "state"
            assert await refused(worker.save_state(missing, Version(0))) == "storage"
            assert await refused(worker.norm(Step(7), 5)) == "wrong_step"
            worker.discard(output)
            gone = worker.backward(output, np.ones_like(bad).tobytes())
            assert await refused(gone) == "unknown_microbatch"

    run(main)


def test_callers_that_wait_when_a_worker_is_given_up_fail(namespace: str, tmp_path: Path) -> None:
    """An auditor is served beside the stage's holder, and does not end with it."""
    manifest = make_manifest(2, stage_queue=1)
    inputs, _ = tokens_of(manifest, 0)
    payload = [inputs.tobytes()]
    deaths = Deaths()

    async def main() -> None:
        async with (
            trio.open_nursery() as auditors,
            workers_of(manifest, [0], namespace, tmp_path) as (worker,),
        ):
            os.kill(worker.pid, signal.SIGSTOP)  # so that none of these is answered
            kept = partial(worker.save_kept, STEP, tensors=KeptTensors.INPUTS)
            auditors.start_soon(deaths.expect, kept, MicrobatchIndex(0), tmp_path / "kept")
            for number in range(2):  # the second one waits for a slot
                auditors.start_soon(
                    deaths.expect, worker.forward, STEP, MicrobatchIndex(number), True, payload
                )
            await trio.testing.wait_all_tasks_blocked()
        assert len(deaths.reasons) == 3

    run(main)


def test_the_first_backward_pass_of_a_process_may_take_longer_than_later_ones(
    namespace: str, tmp_path: Path
) -> None:
    manifest = make_manifest(2)
    owed: list[Outstanding] = []

    async def backward_owed(worker: StageWorker, number: int) -> None:
        inputs, _ = tokens_of(manifest, number)
        with await worker.forward(STEP, MicrobatchIndex(number), True, [inputs.tobytes()]) as out:
            assert out.payload is not None
            gradient = bytes(out.payload)
        os.kill(worker.pid, signal.SIGSTOP)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(worker.backward, out, gradient)
            await trio.testing.wait_all_tasks_blocked()
            owed.append(worker.outstanding())
            os.kill(worker.pid, signal.SIGCONT)

    async def main() -> None:
        async with workers_of(manifest, [0], namespace, tmp_path) as (worker,):
            for number in range(2):
                await backward_owed(worker, number)

    run(main)
    assert owed == [Outstanding.FIRST, Outstanding.COMPUTING]


def test_a_cancelled_caller_takes_its_microbatch_and_its_slot_with_it(
    namespace: str, tmp_path: Path
) -> None:
    manifest = make_manifest(2, stage_queue=2)
    inputs, _ = tokens_of(manifest, 0)

    async def main() -> None:
        async with workers_of(manifest, [0], namespace, tmp_path) as (worker,):
            gradient = bytes(worker.sizes.output_bytes)
            for attempt in range(6):
                # Given up before it is sent off, or while the worker has it, which cannot answer.
                os.kill(worker.pid, signal.SIGSTOP)
                with trio.CancelScope() as scope:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(
                            worker.forward, STEP, MicrobatchIndex(attempt), True, [inputs.tobytes()]
                        )
                        await trio.testing.wait_all_tasks_blocked()
                        scope.cancel()
                os.kill(worker.pid, signal.SIGCONT)
                assert scope.cancelled_caught
            outputs = [
                await worker.forward(STEP, MicrobatchIndex(i), True, [inputs.tobytes()])
                for i in range(2)
            ]
            with trio.CancelScope() as scope:
                scope.cancel()
                await worker.backward(outputs[0], gradient)
            with pytest.raises(RequestFailed, match="not in flight"):
                await worker.backward(outputs[0], gradient)
            with await worker.backward(outputs[1], gradient) as back:
                assert await counted(worker, back)
            assert (await worker.prepare_round(STEP)).microbatches == (1,)

    run(main)


def test_an_answer_comes_before_the_weights_and_a_cancelled_caller_leaves_them_out(
    namespace: str, tmp_path: Path
) -> None:
    manifest = make_manifest(2)
    inputs, _ = tokens_of(manifest, 0)

    async def main() -> None:
        async with workers_of(manifest, [0], namespace, tmp_path) as (worker,):
            gradient = bytes(worker.sizes.output_bytes)
            answers = []
            for microbatch in range(3):
                index = MicrobatchIndex(microbatch)
                held = await worker.forward(STEP, index, True, [inputs.tobytes()])
                with held, await worker.backward(held, gradient) as answer:
                    answers.append(answer)
            assert answers[1].owed
            assert answers[2].owed
            before = (await worker.prepare_round(STEP)).microbatches
            assert not {1, 2} & set(before)
            done = await worker.count_weights(answers[1])
            assert done.added
            assert done.transcript is not None
            # Stopped until both messages are sent, so that it has not begun when it reads the
            # cancellation.
            os.kill(worker.pid, signal.SIGSTOP)
            with trio.CancelScope() as scope:
                scope.cancel()
                await worker.count_weights(answers[2])
            await trio.testing.wait_all_tasks_blocked()
            os.kill(worker.pid, signal.SIGCONT)
            with pytest.raises(RequestFailed, match="nothing is owed"):
                await worker.count_weights(answers[2])
            assert (await worker.prepare_round(STEP)).microbatches == (*before, 1)

    run(main)


def test_a_full_worker_makes_callers_wait_and_backwards_pass_them(
    namespace: str, tmp_path: Path
) -> None:
    manifest = make_manifest(2, stage_queue=1)
    inputs, _ = tokens_of(manifest, 0)

    async def main() -> None:
        async with workers_of(manifest, [0], namespace, tmp_path) as (worker,):
            gradient = bytes(worker.sizes.output_bytes)
            held = await worker.forward(STEP, MicrobatchIndex(0), True, [inputs.tobytes()])
            waiting_done = trio.Event()

            async def wait_for_a_slot() -> None:
                with await worker.forward(STEP, MicrobatchIndex(1), True, [inputs.tobytes()]):
                    waiting_done.set()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(wait_for_a_slot)
                # The slot of the output is not free, and yet its backward goes through.
                with await worker.backward(held, gradient) as back:
                    assert await counted(worker, back)
                assert not waiting_done.is_set()
                held.release()
                await waiting_done.wait()

    run(main)


def test_killing_the_worker_fails_every_caller_and_clears_its_memory(
    namespace: str, tmp_path: Path
) -> None:
    manifest = make_manifest(2, stage_queue=2)
    inputs, _ = tokens_of(manifest, 0)
    deaths = Deaths()
    expect = deaths.expect

    async def main() -> None:
        async with workers_of(manifest, [0], namespace, tmp_path) as (worker,):
            assert len(segments_of(namespace)) == 3
            payload = [inputs.tobytes()]
            held = [await worker.forward(STEP, MicrobatchIndex(i), True, payload) for i in range(2)]
            os.kill(worker.pid, signal.SIGSTOP)  # so that all of these are unanswered
            async with trio.open_nursery() as nursery:
                nursery.start_soon(expect, worker.forward, STEP, MicrobatchIndex(5), True, payload)
                nursery.start_soon(
                    expect, worker.backward, held[0], bytes(worker.sizes.output_bytes)
                )
                nursery.start_soon(expect, worker.prepare_round, STEP)
                await trio.testing.wait_all_tasks_blocked()
                assert deaths.reasons == []
                os.kill(worker.pid, signal.SIGKILL)
            assert len(deaths.reasons) == 3
            assert "exit status -9" in str(await worker.wait_died())
            await expect(worker.prepare_round, STEP)
            await expect(worker.forward, STEP, MicrobatchIndex(6), True, payload)
            held[1].release()

    run(main)
    assert len(deaths.reasons) == 5
    assert segments_of(namespace) == []


def test_an_error_in_the_callers_block_comes_out_as_it_is(namespace: str, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(KeyError, match="the block's own"):
            async with open_worker(
                make_manifest(1), StageIndex(0), "cpu", 1, PLENTY, namespace, tmp_path / "log"
            ):
                raise KeyError("the block's own")

    run(main)
    assert segments_of(namespace) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_missing_device_is_reported(namespace: str, tmp_path: Path) -> None:
    async def main() -> None:
        with pytest.raises(RequestFailed, match="cuda:0 is not there") as caught:
            async with open_worker(
                make_manifest(1), StageIndex(0), "cuda:0", 1, PLENTY, namespace, tmp_path / "log"
            ):
                pass
        assert caught.value.code == "device"

    run(main)
    assert segments_of(namespace) == []


PARENT = """
import sys, trio
from pathlib import Path
from swarm_client.stage.handle.worker_handle import open_worker
from swarm_shared.run.manifest import Manifest

async def main():
    manifest = Manifest.model_validate_json(sys.argv[1])
    async with open_worker(manifest, 0, "cpu", 1, 0, sys.argv[2], Path(sys.argv[3])) as worker:
        assert "torch" not in sys.modules
        print(worker.pid, flush=True)
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="waits for a stranger's end by pidfd")
def test_a_worker_whose_daemon_is_killed_ends_and_takes_its_memory_with_it(
    namespace: str, tmp_path: Path
) -> None:
    manifest = make_manifest(1).model_dump_json()
    command = [sys.executable, "-c", PARENT, manifest, namespace, str(tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            watch = os.pidfd_open(int(parent.stdout.readline()))
            assert len(segments_of(namespace)) == 3
        finally:
            parent.kill()

    async def main() -> None:
        await trio.lowlevel.wait_readable(watch)

    try:
        run(main)
    finally:
        os.close(watch)
    assert segments_of(namespace) == []
