"""A worker answers before it has the weights' gradients: the sums are the same, whenever these
follow, and nothing is counted before."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kits.client.stage_runners import CPU, PLENTY, STEP, failure, make_manifest, tokens_of, wire
from swarm_client.stage.worker.accumulation.gradient_sums import CountedSums
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.run.manifest import CodecsConfig, Manifest

pytestmark = pytest.mark.usefixtures("splits")
MANIFEST = make_manifest(stages=3).model_copy(update={"codecs": CodecsConfig(average="exact")})
MIDDLE = 1


def middle(budget: int = PLENTY, manifest: Manifest = MANIFEST) -> StageRunner:
    return StageRunner(manifest, StageIndex(MIDDLE), CPU, budget, PLENTY)


def activation(seed: int) -> memoryview:
    generator = torch.Generator().manual_seed(seed)
    return wire(torch.randn(2, 16, 32, generator=generator))


def forward(runner: StageRunner, number: int, microbatch: int, step: Step = STEP) -> None:
    index = MicrobatchIndex(microbatch)
    result = runner.forward(number, step, index, True, activation(microbatch))
    assert isinstance(result, ForwardResult)
    runner.output_sent(number, wire(result.output))


def backward(runner: StageRunner, number: int, microbatch: int) -> BackwardResult:
    """Answer, as the worker's loop does."""
    result = runner.backward(number, activation(1000 + microbatch))
    assert result.input_gradient is not None
    runner.transcribe(number, result, wire(result.input_gradient))
    return result


def owing(runner: StageRunner, number: int, microbatch: int) -> BackwardResult:
    """Forward and backward of one microbatch that is then owed. The first one of a runner only
    measures, with layers that are computed again."""
    forward(runner, number, microbatch)
    result = backward(runner, number, microbatch)
    assert result.owed is not None
    return result


def measured(budget: int = PLENTY) -> StageRunner:
    """A runner that knows the sizes of its graphs, with nothing accumulated."""
    runner = middle(budget)
    forward(runner, 99, 99)
    backward(runner, 99, 99)
    runner.reset_step(STEP)
    return runner


def counted(runner: StageRunner) -> tuple[int, ...]:
    return runner.accumulator.contents.microbatches()


def test_the_answer_is_the_same_and_nothing_is_counted_before_the_weights() -> None:
    split, whole = measured(), measured()
    whole.graphs.may_owe = lambda *_: False  # type: ignore[method-assign]
    result = owing(split, 1, 0)
    forward(whole, 1, 0)
    expected = backward(whole, 1, 0)

    assert expected.added
    assert not result.added
    assert expected.input_gradient is not None
    assert result.input_gradient is not None
    assert torch.equal(result.input_gradient, expected.input_gradient)
    assert counted(split) == ()
    assert not torch.any(split.accumulator.totals())
    found = split.count_weights(1)
    assert found.added
    assert found.transcript() == whole.accumulator.transcripts[MicrobatchIndex(0)]
    assert torch.equal(split.accumulator.totals(), whole.accumulator.totals())


@pytest.mark.parametrize("stage", [0, 1, 2])
@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), budget=st.sampled_from([0, 100_000, 300_000, 600_000, PLENTY]))
def test_sums_are_equal_to_the_bit_for_any_order_and_any_memory(
    stage: int, seed: int, budget: int
) -> None:
    """Some microbatches in flight, some owed; the weights follow at random times."""
    rng = random.Random(seed)
    runner = StageRunner(MANIFEST, StageIndex(stage), CPU, budget, PLENTY)
    whole = StageRunner(MANIFEST, StageIndex(stage), CPU, PLENTY, PLENTY)
    whole.graphs.may_owe = lambda *_: False  # type: ignore[method-assign]
    owed: list[int] = []
    for number in range(6):
        for one in (runner, whole):
            result = _passed(one, number)
            wired = None if result.input_gradient is None else wire(result.input_gradient)
            one.transcribe(number, result, wired)
            if result.owed is not None:
                owed.append(number)
        rng.shuffle(owed)
        while owed and (runner.graphs.is_short or rng.random() < 0.4):
            assert runner.count_weights(owed.pop()).added
    for number in owed:
        assert runner.count_weights(number).added
    assert torch.equal(runner.accumulator.totals(), whole.accumulator.totals())
    assert runner.accumulator.transcripts == whole.accumulator.transcripts


def _passed(runner: StageRunner, number: int) -> BackwardResult:
    """One microbatch forward and backward."""
    stage, index = runner.stage, MicrobatchIndex(number)
    inputs, targets = tokens_of(MANIFEST, number)
    payload = wire(inputs) if stage.is_first else activation(number)
    if stage.is_last:
        payload = memoryview(bytearray(payload.tobytes() + wire(targets).tobytes()))
    result = runner.forward(number, STEP, index, True, payload)
    if isinstance(result, ForwardResult):
        runner.output_sent(number, wire(result.output))
        result = runner.backward(number, activation(1000 + number))
    return result


def test_a_microbatch_that_is_owed_twice_is_counted_once() -> None:
    runner = measured()
    owing(runner, 1, 0)
    owing(runner, 2, 0)
    found, again = runner.count_weights(2), runner.count_weights(1)
    assert (found.added, again.added) == (True, False)
    assert again.transcript() == found.transcript()
    assert counted(runner) == (0,)


def test_what_is_owed_ends_with_its_step_its_discard_and_its_emptying() -> None:
    runner = measured()
    for number in (1, 2):
        owing(runner, number, number)
    runner.discard(1)
    assert failure(runner.count_weights, 1) == "unknown_microbatch"
    runner.reset_step(STEP)
    assert failure(runner.count_weights, 2) == "unknown_microbatch"
    owing(runner, 3, 3)
    StepRunner(runner).reinitialise(Version(4))
    assert failure(runner.count_weights, 3) == "unknown_microbatch"
    assert counted(runner) == ()


def test_weights_whose_gradients_are_not_finite_leave_no_trace() -> None:
    runner = measured()
    forward(runner, 1, 0)
    huge = torch.full((2, 16, 32), 2e38)
    result = runner.backward(1, wire(huge))
    assert result.owed is not None
    assert result.input_gradient is not None
    runner.transcribe(1, result, wire(result.input_gradient))
    assert failure(runner.count_weights, 1) == "not_finite"
    assert counted(runner) == ()
    assert failure(runner.count_weights, 1) == "unknown_microbatch"


def test_without_memory_for_both_a_backward_pass_is_not_split() -> None:
    sizes = measured().graphs.measured
    assert sizes is not None
    norms_bytes = 4 * 2 * 32 * sizes.layers
    enough = sizes.working_bytes() + sizes.graph_bytes() + norms_bytes
    for budget, splits in ((enough, True), (enough - 1, False)):
        runner = measured(budget)
        forward(runner, 1, 0)
        assert (backward(runner, 1, 0).owed is not None) == splits


def test_the_token_tables_gradient_counts_as_kept_in_the_first_stage() -> None:
    probe = StageRunner(MANIFEST, StageIndex(0), CPU, PLENTY, PLENTY)
    _passed(probe, 1)
    sizes = probe.graphs.sizes
    table_bytes = 4 * MANIFEST.model.vocabulary_size * MANIFEST.model.hidden_size
    without = sizes.working_bytes() + sizes.graph_bytes() + 4 * 2 * 32 * sizes.layers
    for budget, splits in ((without + table_bytes, True), (without + table_bytes - 1, False)):
        runner = StageRunner(MANIFEST, StageIndex(0), CPU, budget, PLENTY)
        _passed(runner, 1)
        runner.reset_step(STEP)
        result = _passed(runner, 2)
        assert (result.owed is not None) == splits


def test_memory_is_short_when_what_is_owed_leaves_no_room_for_a_graph() -> None:
    sizes = measured().graphs.measured
    assert sizes is not None
    runner = measured(2 * sizes.working_bytes() + sizes.least_working_bytes)
    assert not runner.graphs.is_short
    owed = owing(runner, 1, 0).owed
    assert owed is not None
    # What is kept is at most a graph, as it was counted on.
    assert 0 < owed.nbytes <= sizes.graph_bytes()
    assert not runner.graphs.is_short
    forward(runner, 2, 1)
    assert runner.graphs.is_short
    runner.count_weights(1)
    assert not runner.graphs.is_short


# ---------------------------------------------------------------- memory that shrinks


def test_less_is_kept_when_memory_is_short_and_more_again_step_by_step() -> None:
    runner = measured()
    sizes = runner.graphs.sizes
    for number in (1, 2):
        forward(runner, number, number)
    assert runner.graphs.keep_less()
    # Two graphs were kept and one was computed.
    assert runner.graphs.budget_bytes == int(0.75 * 3 * sizes.working_bytes())
    while runner.graphs.keep_less():
        assert runner.graphs.room_bytes() == runner.graphs.budget_bytes
    assert runner.graphs.budget_bytes == sizes.least_working_bytes
    for _ in range(400):
        runner.graphs.keep_more()
    assert runner.graphs.budget_bytes == PLENTY


def test_a_backward_pass_without_memory_can_be_repeated_with_the_same_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner, undisturbed = measured(), measured()
    for one in (runner, undisturbed):
        forward(one, 1, 0)
    with monkeypatch.context() as patched:

        def full(*_: object) -> None:
            raise MemoryError

        patched.setattr(torch.autograd, "grad", full)
        with pytest.raises(MemoryError):
            runner.backward(1, activation(1000))
    while runner.graphs.keep_less():
        pass
    result, expected = backward(runner, 1, 0), backward(undisturbed, 1, 0)
    assert result.input_gradient is not None
    assert expected.input_gradient is not None
    assert torch.equal(result.input_gradient, expected.input_gradient)
    for one in (runner, undisturbed):
        if one._owed:
            one.count_weights(1)
    assert torch.equal(runner.accumulator.totals(), undisturbed.accumulator.totals())


def memory_ends_after(parameters: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have the sums of so many parameters changed, and no more; return those that were tried."""
    honest, tried = CountedSums._make_room, list[int]()

    def full(self: CountedSums, number: int, bound: float) -> None:
        tried.append(number)
        if len(tried) > parameters:
            raise MemoryError
        honest(self, number, bound)

    monkeypatch.setattr(CountedSums, "_make_room", full)
    return tried


@pytest.mark.parametrize("change", ["add", "subtract"])
def test_sums_whose_change_ends_half_done_are_emptied(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Part of a gradient must never stay in a sum."""
    runner = measured()
    for number in (1, 2):
        owing(runner, number, number)
    runner.count_weights(1)
    if change == "add":
        tried = memory_ends_after(3, monkeypatch)
        with pytest.raises(MemoryError):
            runner.count_weights(2)
        assert tried == [0, 1, 2, 3]
    else:
        runner.count_weights(2)
        gradients_of_one = len(runner.layout.entries)
        memory_ends_after(gradients_of_one + 3, monkeypatch)
        with pytest.raises(MemoryError):
            runner.uncommit(STEP, (MicrobatchIndex(1),))
    monkeypatch.undo()
    assert counted(runner) == ()
    assert not torch.any(runner.accumulator.totals())
    assert runner.accumulator.transcripts == {}
    if change == "add":
        assert runner.count_weights(2).added  # it is still owed
        assert counted(runner) == (2,)
