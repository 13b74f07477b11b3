"""Gradients that are hashed while the next microbatch is computed: the same digests, and nothing
reads or changes what is still being hashed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from typing import TypeVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from client.stage.worker.test_compute_loop import Rig
from client.stage.worker.test_owed_weights import activation, counted, memory_ends_after
from kits.client.device_pipeline import MANIFEST
from kits.client.fake_accelerator import DeferredWork, FakeAccelerator, FakeStream
from kits.client.stage_runners import CPU, PLENTY, STEP, wire
from swarm_client.stage.protocol import messages
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.worker.accelerator import Accelerator, processor
from swarm_client.stage.worker.accumulation.accumulator import Accumulator
from swarm_client.stage.worker.accumulation.digests import BackgroundDigest, GradientDigest
from swarm_client.stage.worker.stage_runner import ForwardResult, StageRunner
from swarm_client.stage.worker.transfer.pieces_to_host import PiecesToHost, pieces_to_host
from swarm_shared.base.types import MicrobatchIndex, StageIndex
from swarm_shared.model.fixed_point_sums import Quantum, quantum_of

pytestmark = pytest.mark.usefixtures("splits")
T = TypeVar("T")
MIDDLE = StageIndex(1)


def runner_on(accelerator: Accelerator) -> StageRunner:
    runner = StageRunner(MANIFEST, MIDDLE, accelerator, PLENTY, PLENTY)
    runner.warm_up()
    return runner


def owing(runner: StageRunner, number: int, microbatch: int) -> None:
    """Forward and backward of one microbatch that is then owed, as the worker's loop does."""
    index = MicrobatchIndex(microbatch)
    output = runner.forward(number, STEP, index, True, activation(microbatch))
    assert isinstance(output, ForwardResult)
    runner.output_sent(number, wire(runner.copier.to_host(output.output)))
    result = runner.backward(number, activation(1000 + microbatch))
    assert result.input_gradient is not None
    runner.transcribe(number, result, wire(runner.copier.to_host(result.input_gradient)))
    assert result.owed is not None


def reader_of(accelerator: Accelerator) -> PiecesToHost:
    reader = pieces_to_host(accelerator)
    assert reader is not None
    return reader


# ---------------------------------------------------------------- digests and counts


@given(sizes=st.lists(st.integers(0, 12), min_size=1, max_size=6))
def test_the_digest_is_the_one_that_is_made_at_once(sizes: list[int]) -> None:
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        pieces = [torch.arange(n, dtype=torch.float32, device=fake.device) for n in sizes]
        at_once, later = GradientDigest(reader_of(fake)), BackgroundDigest(reader_of(fake))
        for piece in pieces:
            at_once.update(piece)
            later.update(piece)
        hashing = later.begin()
        assert not hashing.done()
        assert hashing.result() == at_once.hex()


@given(
    values=st.lists(st.floats(-1e3, 1e3, width=32), max_size=20),
    size=st.sampled_from([2.0**-20, 1.0, 8.0]),
)
def test_counts_made_in_place_are_the_same(values: list[float], size: float) -> None:
    quantum = Quantum(size, 2.0**20)
    gradient = torch.tensor(values, dtype=torch.float32)
    expected = quantum.counts(gradient)
    assert not values or expected.data_ptr() != gradient.data_ptr()
    found = list(quantum.each_counts((gradient,), in_place=True))
    assert all(torch.equal(one, expected) for one in found)
    assert torch.equal(gradient, expected)


def test_a_copy_that_does_not_wait_for_the_counts_is_found(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = BackgroundDigest(reader_of(fake))
    later.update(torch.ones(2, device=fake.device))
    hashing = later.begin()
    monkeypatch.setattr(FakeStream, "wait_event", lambda *_: None)
    with pytest.raises(RuntimeError, match="reads what is being written"):
        hashing.result()


def test_gradients_that_share_memory_or_lie_on_the_host_are_hashed_at_once(
    fake: FakeAccelerator,
) -> None:
    runner = runner_on(fake)
    accumulator = runner.accumulator
    there = torch.ones(4, device=fake.device)
    other = torch.ones(4, device=fake.device)
    assert accumulator.can_hash_in_background([there, other])
    assert not accumulator.can_hash_in_background([there, there.view(2, 2)])
    assert not accumulator.can_hash_in_background([there, torch.ones(4)])
    assert not accumulator.can_hash_in_background([])
    on_host = Accumulator(runner.layout, CPU.device, 0, quantum_of(runner.manifest))
    assert not on_host.can_hash_in_background([torch.ones(4)])


# ---------------------------------------------------------------- a stage


def test_a_microbatch_is_computed_before_the_last_ones_gradient_is_hashed(
    fake: FakeAccelerator,
) -> None:
    runner = runner_on(fake)
    owing(runner, 1, 0)
    first = runner.count_weights(1)
    owing(runner, 2, 1)
    assert first.added
    assert not first.is_hashed(), "forward and backward pass have not waited for it"
    second = runner.count_weights(2)
    assert first.is_hashed(), "its memory is free for the next gradient"
    assert not second.is_hashed()
    expected = runner_on(CPU)
    for number in (1, 2):
        owing(expected, number, number - 1)
        at_once = expected.count_weights(number)
        assert at_once.is_hashed()
        assert at_once.transcript() == (first, second)[number - 1].transcript()
    assert torch.equal(runner.accumulator.totals(), expected.accumulator.totals())


def test_a_computation_with_gradients_of_its_own_waits_for_the_memory(
    fake: FakeAccelerator,
) -> None:
    runner = runner_on(fake)
    owing(runner, 1, 0)
    counting = runner.count_weights(1)
    kept = runner.accumulator.contents.kept(MicrobatchIndex(0))
    assert kept is not None
    runner.compute_again(runner.open_parameter_set(STEP), kept)
    assert counting.is_hashed()


def test_a_repeated_microbatch_gets_the_transcript_of_the_counted_one(
    fake: FakeAccelerator,
) -> None:
    runner = runner_on(fake)
    for number in (1, 2):
        owing(runner, number, 0)
    found, again = runner.count_weights(1), runner.count_weights(2)
    assert not again.added
    assert again.transcript() == found.transcript() is not None


@pytest.mark.parametrize("end", ["its step", "all", "uncommit"])
def test_what_ends_with_a_step_leaves_no_transcript(fake: FakeAccelerator, end: str) -> None:
    runner = runner_on(fake)
    owing(runner, 1, 0)
    hashed = runner.count_weights(1)
    match end:
        case "its step":
            runner.reset_step(STEP)
        case "all":
            runner.reset()
        case _:
            assert runner.uncommit(STEP, (MicrobatchIndex(0),))
    assert hashed.is_hashed()
    assert hashed.transcript() is not None
    assert runner.accumulator.transcripts == {}
    assert not torch.any(runner.accumulator.totals())


def test_a_gradient_whose_memory_was_taken_is_not_added_again(
    fake: FakeAccelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_on(fake)
    owing(runner, 1, 0)
    memory_ends_after(3, monkeypatch)
    with pytest.raises(MemoryError):
        runner.count_weights(1)
    monkeypatch.undo()
    with pytest.raises(RequestFailed, match="nothing is owed"):
        runner.count_weights(1)
    assert counted(runner) == ()
    assert not torch.any(runner.accumulator.totals())


# ---------------------------------------------------------------- the loop


class GatedStreams:
    """The processor as a device with streams, whose hashing waits until a test lets it go on."""

    def __init__(self) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        self._threads = ThreadPoolExecutor(1)

    def in_background(self, work: Callable[[], T]) -> Future[T]:
        def wait_and_work() -> T:
            self.begun.set()
            assert self.gate.wait(30)
            return work()

        return self._threads.submit(wait_and_work)

    def stream(self) -> GatedStreams:
        return self

    event = computing = stream

    def using(self, stream: object) -> nullcontext[None]:
        return nullcontext()

    def used_by(self, tensor: torch.Tensor, stream: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def wait_stream(self, other: object) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


class GatedRig(Rig):
    """A loop that owes the gradients of two microbatches."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.streams = GatedStreams()
        accelerator = processor()
        accelerator.streams = self.streams
        monkeypatch.setattr(Accumulator, "can_hash_in_background", lambda *_: True)
        super().__init__(accelerator=accelerator)
        for number in (1, 2):
            self.ask(self.forward(number, slot=0))
            assert isinstance(self.received(), messages.ForwardDone)
            nbytes = self.runner.sizes.output_bytes
            ones = np.ones(nbytes // 4, np.float32)
            self.memory.slot(1, nbytes)[:] = ones.tobytes()
            self.ask(
                messages.RunBackward(request=10 + number, forward=number, slot=1, nbytes=nbytes)
            )
            back = self.received()
            assert isinstance(back, messages.BackwardDone)
            assert back.owed

    def weights(self, number: int) -> messages.RunWeights:
        return messages.RunWeights(request=20 + number, computation=10 + number)

    def received(self) -> messages.WorkerAnswer:
        answer = self.link.receive()
        assert answer is not None
        return answer

    def close(self) -> None:
        self.streams.gate.set()
        super().close()


@pytest.fixture
def gated(monkeypatch: pytest.MonkeyPatch) -> Iterator[GatedRig]:
    rig = GatedRig(monkeypatch)
    yield rig
    rig.close()


def test_other_answers_go_out_while_a_gradient_is_hashed(gated: GatedRig) -> None:
    gated.ask(gated.weights(1), gated.forward(3, slot=0))
    assert isinstance(gated.received(), messages.ForwardDone)
    gated.ask(gated.forward(0, slot=2))
    assert isinstance(gated.received(), messages.ForwardDone)
    gated.streams.gate.set()
    done = gated.received()
    assert isinstance(done, messages.WeightsDone)
    assert (done.request, done.added) == (21, True)
    assert done.transcript == gated.runner.accumulator.transcripts[MicrobatchIndex(1)]


@pytest.mark.parametrize("other", ["control", "weights"])
def test_what_needs_the_sums_or_their_memory_waits_for_the_hash(
    gated: GatedRig, other: str
) -> None:
    gated.ask(gated.weights(1))
    assert gated.streams.begun.wait(30)
    listed = messages.PrepareRound(request=30, step=STEP)
    gated.ask(listed if other == "control" else gated.weights(2))
    assert not gated.link.has_message(0.2)
    gated.streams.gate.set()
    first, second = gated.received(), gated.received()
    assert isinstance(first, messages.WeightsDone)
    assert first.request == 21
    assert first.transcript is not None
    if other == "control":
        assert isinstance(second, messages.RoundPrepared)
        assert second.microbatches == (1,)
    else:
        assert isinstance(second, messages.WeightsDone)
        assert second.transcript not in (None, first.transcript)


def test_the_daemon_may_end_while_a_gradient_is_hashed(gated: GatedRig) -> None:
    gated.ask(gated.weights(1))
    assert gated.streams.begun.wait(30)
    gated.link.close()
    assert gated.has_ended(), "the loop has not waited for the hash, which is held up"


def test_the_fakes_background_work_is_done_when_it_is_awaited() -> None:
    calls: list[int] = []
    late = DeferredWork(lambda: calls.append(1))
    assert not late.done()
    late.result()
    late.result()
    assert calls == [1]
