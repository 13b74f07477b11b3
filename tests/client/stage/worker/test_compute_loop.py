"""The compute loop in this process, over a socketpair: order of work, fate of errors."""

from __future__ import annotations

import socket
import threading
import time
import uuid
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from kits.manifests import manifest_of, stage_ranges
from swarm_client.ipc.child_process import SyncLink
from swarm_client.stage.protocol import messages
from swarm_client.stage.worker.accelerator import Accelerator, processor
from swarm_client.stage.worker.compute_loop import ComputeLoop, _answer, serve
from swarm_client.stage.worker.shared_buffers import WorkerMemory
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.frozen_model import FrozenModel
from swarm_shared.base.json_messages import encode_prefixed
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step
from swarm_shared.run.manifest import (
    Manifest,
)

SLOTS = 4


def make_manifest(staleness: int = 0) -> Manifest:
    return manifest_of(
        model={
            "vocabulary_size": 64, "hidden_size": 16, "layers": 2, "heads": 2, "sequence_length": 8,
        },
        stages=stage_ranges(1, 2),
        training={"sequences_per_microbatch": 1, "staleness": staleness},
    )  # fmt: skip


class Rig:
    """A loop in a thread, holding stage 0, and the daemon's end of its socket."""

    def __init__(self, staleness: int = 0, accelerator: Accelerator | None = None) -> None:
        torch.set_num_threads(1)
        manifest, device = make_manifest(staleness), accelerator or processor()
        self.runner = StageRunner(manifest, StageIndex(0), device, 2**30, 2**30)
        slot_bytes = self.runner.sizes.slot_bytes
        name = f"test-{uuid.uuid4().hex[:12]}"
        self.memory = WorkerMemory(name, SLOTS * slot_bytes, slot_bytes, self.runner.layout.count)
        ours, theirs = socket.socketpair()
        ours.settimeout(30)
        self.socket = ours
        self.link = SyncLink(ours, messages.worker_answers)
        self._child_link = SyncLink(theirs, messages.worker_requests)
        loop = ComputeLoop(self._child_link, self.runner, StepRunner(self.runner), self.memory)
        self.loop = loop
        self._thread = threading.Thread(target=loop.run)
        self._thread.start()

    def ask(self, *requests: FrozenModel) -> None:
        """All in one write, so that the loop sees them all before it computes."""
        self.socket.sendall(b"".join(encode_prefixed(request) for request in requests))

    def forward(self, number: int, slot: int, step: int = 1) -> messages.RunForward:
        nbytes = self.runner.sizes.input_bytes
        ids = np.random.default_rng(number).integers(0, 64, nbytes // 4, dtype=np.uint32)
        self.memory.slot(slot, nbytes)[:] = ids.tobytes()
        return messages.RunForward(
            request=number, step=Step(step), microbatch=MicrobatchIndex(number), accumulate=True,
            slot=slot, nbytes=nbytes,
        )  # fmt: skip

    def close(self) -> None:
        self.link.close()
        has_ended = self.has_ended()
        self._child_link.close()
        self.memory.unlink()
        assert has_ended

    def has_ended(self) -> bool:
        """Whether the loop ends by itself."""
        self._thread.join(30)
        return not self._thread.is_alive()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


@pytest.fixture
def stale_rig() -> Iterator[Rig]:
    made = Rig(staleness=1)
    yield made
    made.close()


class Halfway:
    """Stops a computation before one of its layers, so that a test can send a message meanwhile."""

    def __init__(self, rig: Rig, passes: int) -> None:
        self._look, self._passes = rig.runner.between_layers, passes
        self.reached, self.go_on = threading.Event(), threading.Event()
        rig.runner.between_layers = self._stop

    def _stop(self) -> None:
        self._passes -= 1
        if self._passes == 0:
            self.reached.set()
            assert self.go_on.wait(30)
        self._look()


def test_what_is_given_up_while_it_is_computed_ends_at_the_next_layer_and_leaves_no_trace(
    rig: Rig,
) -> None:
    halfway = Halfway(rig, passes=1)
    rig.ask(rig.forward(1, slot=0))
    assert halfway.reached.wait(30)
    rig.ask(
        messages.PrepareRound(request=7, step=Step(1)),
        messages.Discard(request=1),
        rig.forward(2, slot=1),
    )
    halfway.go_on.set()
    given_up, accumulated, done = rig.link.receive(), rig.link.receive(), rig.link.receive()
    assert isinstance(given_up, messages.Failed)
    assert (given_up.request, given_up.code) == (1, "discarded")
    assert isinstance(accumulated, messages.RoundPrepared)
    assert isinstance(done, messages.ForwardDone), "what came meanwhile is not lost"

    # The backward pass of the other one: nothing of it is added.
    nbytes = rig.runner.sizes.output_bytes
    rig.memory.slot(2, nbytes)[:] = bytes(nbytes)
    halfway = Halfway(rig, passes=1)
    rig.ask(messages.RunBackward(request=3, forward=2, slot=2, nbytes=nbytes))
    assert halfway.reached.wait(30)
    rig.ask(messages.Discard(request=99), messages.Discard(request=3))
    halfway.go_on.set()
    given_up = rig.link.receive()
    assert isinstance(given_up, messages.Failed)
    assert (given_up.request, given_up.code) == (3, "discarded")
    rig.ask(messages.PrepareRound(request=8, step=Step(1)))
    told = rig.link.receive()
    assert isinstance(told, messages.RoundPrepared)
    assert told.microbatches == ()


def test_a_daemon_that_goes_while_something_is_computed_ends_the_loop_after_it(rig: Rig) -> None:
    halfway = Halfway(rig, passes=1)
    rig.ask(rig.forward(1, slot=0))
    assert halfway.reached.wait(30)
    rig.link.close()
    halfway.go_on.set()  # `close` sees the thread end


def test_control_goes_first_then_backwards_then_forwards_in_order_of_arrival(rig: Rig) -> None:
    rig.ask(rig.forward(1, slot=0))
    assert isinstance(rig.link.receive(), messages.ForwardDone)
    nbytes = rig.runner.sizes.output_bytes
    rig.memory.slot(1, nbytes)[:] = bytes(nbytes)
    rig.ask(
        rig.forward(2, slot=2),
        rig.forward(3, slot=3),
        messages.RunBackward(request=4, forward=1, slot=1, nbytes=nbytes),
        messages.Discard(request=2),
        rig.forward(5, slot=0).model_copy(update={"nbytes": 3}),
        messages.PrepareRound(request=6, step=Step(1)),
    )
    answers = [rig.link.receive() for _ in range(5)]
    assert [type(answer).__name__ for answer in answers] == [
        "Failed", "RoundPrepared", "BackwardDone", "ForwardDone", "Failed",
    ]  # fmt: skip
    assert [answer.request for answer in answers if answer] == [2, 6, 4, 3, 5]
    discarded, accumulated, _, _, misfit = answers
    assert isinstance(discarded, messages.Failed)
    assert discarded.code == "discarded"
    assert isinstance(accumulated, messages.RoundPrepared)
    assert accumulated.microbatches == ()
    assert isinstance(misfit, messages.Failed)
    assert misfit.code == "bad_input"


def test_the_next_input_goes_to_the_device_while_another_computes_and_nothing_else_changes(
    rig: Rig,
) -> None:
    def outputs() -> list[bytes]:
        requests = [rig.forward(number, slot=number) for number in range(3)]
        misfit = requests[1].model_copy(update={"request": 9, "nbytes": 4})
        rig.ask(*requests[:2], misfit, requests[2])
        answers = [rig.link.receive() for _ in range(4)]
        assert isinstance(answers[2], messages.Failed)
        assert (answers[2].request, answers[2].code) == (9, "bad_input")
        done = [answer for answer in answers if isinstance(answer, messages.ForwardDone)]
        assert [answer.request for answer in done] == [0, 1, 2]
        rig.ask(messages.ResetAccumulator(request=10, step=Step(1)))
        rig.link.receive()
        return [bytes(rig.memory.slot(answer.request, answer.nbytes)) for answer in done]

    fetched: list[list[int]] = []

    def fetch() -> None:
        rig.loop._fetch_next()  # what a GPU's loop does
        fetched.append(list(rig.runner._fetched))

    before = outputs()
    rig.runner.while_computing = fetch
    assert outputs() == before
    assert fetched == [[1], [], []], "the misfit is not fetched, and the last one follows it"


def test_slots_that_are_not_there_are_refused(rig: Rig) -> None:
    good = rig.forward(1, slot=0)
    rig.ask(
        good.model_copy(update={"slot": SLOTS}),
        good.model_copy(update={"request": 2, "nbytes": rig.runner.sizes.slot_bytes + 1}),
    )
    for _ in range(2):
        answer = rig.link.receive()
        assert isinstance(answer, messages.Failed)
        assert answer.code == "bad_input"


def test_the_output_lies_where_the_input_was(rig: Rig) -> None:
    request = rig.forward(1, slot=1)
    ids = bytes(rig.memory.slot(1, request.nbytes))
    rig.ask(request)
    answer = rig.link.receive()
    assert isinstance(answer, messages.ForwardDone)
    seen = torch.frombuffer(rig.memory.slot(1, answer.nbytes), dtype=torch.float32)
    ids_BT = torch.frombuffer(bytearray(ids), dtype=torch.uint32).long().view(1, -1)
    assert torch.equal(seen.view(1, 8, 16), rig.runner.stage(ids_BT).detach())


def test_full_memory_is_the_requests_failure_and_a_bug_is_not() -> None:
    request = messages.PrepareRound(request=3, step=Step(1))

    def too_much(_: messages.PrepareRound) -> messages.Numbered:
        torch.empty(2**50)
        raise AssertionError("there is no such memory")

    def bug(_: messages.PrepareRound) -> messages.Numbered:
        torch.zeros(2) + torch.zeros(3)
        raise AssertionError("these shapes do not fit")

    answer = _answer(request, too_much)
    assert isinstance(answer, messages.Failed)
    assert (answer.request, answer.code) == (3, "out_of_memory")
    with pytest.raises(RuntimeError, match="size"):
        _answer(request, bug)


@pytest.mark.parametrize(
    ("change", "reason"), [({"slot_bytes": 8}, "too small"), ({"stage": 2}, "no stage 2")]
)
def test_a_configuration_that_cannot_be_is_refused(change: dict[str, int], reason: str) -> None:
    torch.set_num_threads(1)
    configure = messages.ConfigureStage(
        request=1, manifest_json=make_manifest().model_dump_json(), stage=StageIndex(0),
        device="cpu", threads=1, graph_budget_bytes=0, kept_budget_bytes=0, slot_bytes=2**20,
        slot_count=2, namespace=f"test-{uuid.uuid4().hex[:12]}",
    ).model_copy(update=change)  # fmt: skip
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode_prefixed(configure))
        serve(SyncLink(theirs, messages.worker_requests))
        daemon = SyncLink(ours, messages.worker_answers)
        assert isinstance(daemon.receive(), messages.Awake)
        answer = daemon.receive()
    assert isinstance(answer, messages.Failed)
    assert answer.code == "bad_input"
    assert reason in answer.message


def limits(request: int, duty_cycle: float) -> messages.SetLimits:
    return messages.SetLimits(
        request=request, duty_cycle=duty_cycle, threads=1, graph_bytes=2**30, host_graph_bytes=0
    )


def test_a_worker_that_rests_answers_others_and_computes_after_its_rest(rig: Rig) -> None:
    rig.ask(limits(1, 0.05))
    assert isinstance(rig.link.receive(), messages.Done)
    rig.ask(rig.forward(2, slot=0), rig.forward(3, slot=1))
    begun = time.monotonic()
    first = rig.link.receive()
    assert isinstance(first, messages.ForwardDone)
    # The rest is some milliseconds long; what is asked meanwhile does not wait for its end.
    rig.ask(messages.PrepareRound(request=4, step=Step(1)))
    answers = {
        answer.request: answer for answer in (rig.link.receive(), rig.link.receive()) if answer
    }
    assert answers.keys() == {3, 4}
    rested = time.monotonic() - begun
    assert rested >= first.seconds * 0.9


def test_a_rest_ends_when_its_limit_does(rig: Rig) -> None:
    rig.ask(limits(1, 1e-9))
    rig.ask(rig.forward(2, slot=0), rig.forward(3, slot=1), rig.forward(4, slot=2))
    assert [answer.request for answer in (rig.link.receive(), rig.link.receive()) if answer] == [
        1,
        2,
    ]
    # It would rest for weeks.
    rig.ask(
        messages.PrepareRound(request=5, step=Step(1)),
        limits(6, 1.0),
    )
    answers = [rig.link.receive() for _ in range(4)]
    assert [answer.request for answer in answers if answer] == [5, 6, 3, 4]


def test_a_step_closes_between_the_forward_and_the_backward_of_the_next_one(
    stale_rig: Rig,
) -> None:
    rig = stale_rig
    nbytes = rig.runner.sizes.output_bytes
    rig.memory.slot(3, nbytes)[:] = np.ones(nbytes // 4, np.float32).tobytes()
    rig.ask(rig.forward(1, slot=0), rig.forward(2, slot=1, step=2))
    assert all(isinstance(rig.link.receive(), messages.ForwardDone) for _ in range(2))
    rig.ask(messages.RunBackward(request=3, forward=1, slot=3, nbytes=nbytes))
    assert isinstance(rig.link.receive(), messages.BackwardDone)
    rig.memory.result.fill_(1.0)
    rig.memory.slot(3, nbytes)[:] = np.ones(nbytes // 4, np.float32).tobytes()
    rig.ask(
        messages.RunBackward(request=4, forward=2, slot=3, nbytes=nbytes),
        messages.PrepareRound(request=5, step=Step(1)),
        messages.ComputeNorm(request=6, step=Step(1), step_tokens=8),
        messages.ApplyUpdate(
            request=7, step=Step(1), step_tokens=8, global_norm=1.0, learning_rate=0.1
        ),
        messages.ResetAccumulator(request=8, step=Step(1)),
    )
    answers = [rig.link.receive() for _ in range(5)]
    # Control goes first; nothing of the step that closes is touched by the other, or the reverse.
    prepared, norm, applied, over, done = answers
    assert isinstance(prepared, messages.RoundPrepared)
    assert prepared.microbatches == (1,)
    assert isinstance(norm, messages.NormComputed)
    assert isinstance(applied, messages.UpdateApplied)
    assert isinstance(over, messages.Failed)
    assert over.code == "wrong_step"
    assert isinstance(done, messages.BackwardDone)
    assert done.added
    rig.ask(messages.PrepareRound(request=10, step=Step(2)))
    told = rig.link.receive()
    assert isinstance(told, messages.RoundPrepared)
    assert told.microbatches == (2,)
    assert rig.runner.version == 1
    assert rig.runner.open_parameter_set(Step(3)).accumulator.contents.microbatches() == ()


def test_of_two_steps_the_older_one_is_computed_first_and_within_it_the_lower_microbatch(
    stale_rig: Rig,
) -> None:
    rig = stale_rig
    nbytes = rig.runner.sizes.output_bytes

    def backward(number: int, of: int, slot: int) -> messages.RunBackward:
        rig.memory.slot(slot, nbytes)[:] = bytes(nbytes)
        return messages.RunBackward(request=number, forward=of, slot=slot, nbytes=nbytes)

    steps = {1: 2, 2: 2, 3: 1, 4: 1}
    rig.ask(*(rig.forward(number, number - 1, step) for number, step in steps.items()))
    assert [rig.link.receive().request for _ in steps] == [3, 4, 1, 2]
    rig.ask(backward(5, of=2, slot=0), backward(6, of=4, slot=1), backward(7, of=3, slot=2))
    assert [rig.link.receive().request for _ in range(3)] == [7, 6, 5]


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("[c10] can't allocate memory: x")])
def test_a_lack_of_memory_is_a_failure_of_the_request_with_or_without_a_text(
    error: Exception,
) -> None:
    def carry_out(_: messages.Uncommit) -> FrozenModel:
        raise error

    answer = _answer(messages.Uncommit(request=7, step=Step(1), microbatches=()), carry_out)  # type: ignore[arg-type]
    assert isinstance(answer, messages.Failed)
    assert (answer.request, answer.code) == (7, "out_of_memory")
    assert "memory" in answer.message
