"""StageRunner and StepRunner in this process: what a stage computes, without any plumbing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from benchmarks.stage.live_bytes import LiveBytes
from kits.client.stage_runners import (
    CPU,
    PLENTY,
    STEP,
    accumulated_gradients,
    failure,
    make_manifest,
    runners_of,
    through,
    tokens_of,
    wire,
)
from kits.manifests import stage_ranges
from swarm_client.stage.worker.accelerator import accelerators
from swarm_client.stage.worker.compute_loop import _selected
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.model import FlatLayout, build_whole
from swarm_shared.run.graph_sizes import GraphSizes
from swarm_shared.run.manifest import (
    CodecsConfig,
    Manifest,
)


def whole_gradients(manifest: Manifest, microbatches: Sequence[int]) -> dict[str, torch.Tensor]:
    whole = build_whole(manifest)
    for microbatch in microbatches:
        inputs, targets = tokens_of(manifest, microbatch)
        whole(
            torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(targets.astype(np.int64))
        ).backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_accumulate_the_gradient_of_the_whole_model(stages: int) -> None:
    manifest = make_manifest(stages)
    runners = runners_of(manifest)
    for microbatch in range(3):
        through(runners, microbatch)
    expected = whole_gradients(manifest, range(3))
    seen = {name: g for runner in runners for name, g in accumulated_gradients(runner).items()}
    assert seen.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(seen[name], gradient, rtol=1e-4, atol=1e-5)


def test_the_two_ends_of_a_tied_model_share_its_gradient_in_their_tied_parts() -> None:
    manifest = make_manifest(3, tied=True)
    runners = runners_of(manifest)
    through(runners, 0)
    table = whole_gradients(manifest, [0])["model.embed_tokens.weight"]
    parts = [r.accumulator.totals()[r.layout.own_count :] for r in (runners[0], runners[-1])]
    assert runners[1].layout.tied_count == 0
    torch.testing.assert_close((parts[0] + parts[1]).view_as(table), table, rtol=1e-4, atol=1e-5)


def test_recomputed_graphs_give_the_gradients_of_kept_ones() -> None:
    manifest = make_manifest(3)
    kept, recomputed = runners_of(manifest), runners_of(manifest, graph_budget=0)
    for microbatch in range(2):
        through(kept, microbatch)
        through(recomputed, microbatch)
    for one, other in zip(kept, recomputed, strict=True):
        assert torch.equal(one.accumulator.totals(), other.accumulator.totals())


def test_only_as_many_graphs_are_kept_as_fit_the_budget() -> None:
    manifest = make_manifest(2)
    probe = runners_of(manifest)[0]
    inputs, _ = tokens_of(manifest, 0)
    probe.forward(1, STEP, MicrobatchIndex(0), True, wire(inputs))
    assert probe.graphs.measured is not None
    whole_bytes = probe.graphs.measured.graph_bytes()
    # More than the input's activations, and far from the parameters, which do not count.
    activation_bytes = manifest.tokens_per_microbatch * manifest.model.hidden_size * 4
    assert whole_bytes > 4 * activation_bytes
    runner = StageRunner(manifest, StageIndex(0), CPU, 2 * whole_bytes, PLENTY)
    for microbatch in range(4):
        inputs, _ = tokens_of(manifest, microbatch)
        runner.forward(microbatch + 1, STEP, MicrobatchIndex(microbatch), True, wire(inputs))
    kept = [flight.graph is not None for flight in runner._in_flight.values()]
    assert kept == [True, True, False, False]
    # A discarded microbatch makes room for the next graph.
    runner.discard(1)
    runner.forward(9, STEP, MicrobatchIndex(9), True, wire(inputs))
    assert runner._in_flight[9].graph is not None


def deep_manifest() -> Manifest:
    """Four layers in two stages."""
    return make_manifest(layers=4).model_copy(update={"stages": stage_ranges(3, 4)})


def sizes_of(manifest: Manifest) -> GraphSizes:
    probe = runners_of(manifest)[0]
    probe.forward(1, STEP, MicrobatchIndex(0), True, wire(tokens_of(manifest, 0)[0]))
    assert probe.graphs.measured is not None
    return probe.graphs.measured


def test_of_a_graph_that_does_not_fit_whole_only_some_layers_are_computed_again() -> None:
    manifest = deep_manifest()
    sizes = sizes_of(manifest)
    assert sizes.layers == 3
    runner = StageRunner(
        manifest, StageIndex(0), CPU, sizes.graph_bytes() + sizes.graph_bytes(2), PLENTY
    )
    for microbatch in range(3):
        inputs, _ = tokens_of(manifest, microbatch)
        runner.forward(microbatch + 1, STEP, MicrobatchIndex(microbatch), True, wire(inputs))
    graphs = [flight.graph for flight in runner._in_flight.values()]
    # The first is measured with one layer's graph, the second fits whole, the third not at all.
    recomputed = [None if graph is None else graph.recomputed_layers for graph in graphs]
    assert recomputed == [2, 0, None]


def test_a_peer_with_the_least_memory_keeps_the_inputs_of_two_microbatches() -> None:
    manifest = deep_manifest()
    sizes = sizes_of(manifest)
    least = sizes.working_bytes(sizes.layers) + sizes.graph_bytes(sizes.layers)
    assert sizes.working_bytes(2) <= least, "one graph alone would keep a layer more"
    runner = StageRunner(manifest, StageIndex(0), CPU, least, PLENTY)
    result: ForwardResult | BackwardResult | None = None
    kept: list[list[int | None]] = []
    for number in range(1, 6):
        inputs, _ = tokens_of(manifest, number)
        result = runner.forward(number, STEP, MicrobatchIndex(number), True, wire(inputs))
        assert isinstance(result, ForwardResult)
        graphs = [flight.graph for flight in runner._in_flight.values()]
        kept.append([None if graph is None else graph.recomputed_layers for graph in graphs])
        if number > 1:
            runner.backward(number - 1, wire(torch.ones_like(result.output)))
    # The first microbatch was measured, and kept a layer that the second had no room beside.
    assert kept[3:] == [[3, 3]] * 2


def test_a_first_forward_that_is_interrupted_measures_nothing_and_leaves_no_hook() -> None:
    manifest = deep_manifest()
    runner = StageRunner(manifest, StageIndex(0), CPU, PLENTY, PLENTY)
    layers = list(runner.stage.model.layers.values())
    before = [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in layers]
    calls: list[int] = []

    def interrupt_in_the_last_layer() -> None:
        calls.append(1)
        if len(calls) == len(layers):
            raise InterruptedError

    runner.between_layers = interrupt_in_the_last_layer
    inputs, _ = tokens_of(manifest, 0)
    with pytest.raises(InterruptedError):
        runner.forward(1, STEP, MicrobatchIndex(0), True, wire(inputs))
    after = [(len(one._forward_hooks), len(one._forward_pre_hooks)) for one in layers]
    assert after == before
    assert runner.graphs.measured is None
    assert runner._in_flight == {}


@pytest.mark.parametrize("graphs", [0.0, 0.5, 0.9, 1.3, 1.8, 2.5])
def test_any_budget_gives_the_same_sums_and_gradients_to_the_bit(graphs: float) -> None:
    manifest = deep_manifest()
    budget = int(graphs * sizes_of(manifest).graph_bytes())
    plenty, short = runners_of(manifest), runners_of(manifest, budget)
    under_way: list[torch.Tensor] = []
    for microbatch in range(4):  # several in flight at the first stage
        inputs, _ = tokens_of(manifest, microbatch)
        forward = short[0].forward(
            microbatch + 1, STEP, MicrobatchIndex(microbatch), True, wire(inputs)
        )
        assert isinstance(forward, ForwardResult)
        under_way.append(forward.output)
    for microbatch, output in enumerate(under_way):
        whole = through(plenty, microbatch)
        _, targets = tokens_of(manifest, microbatch)
        last = short[1].forward(
            microbatch + 1, STEP, MicrobatchIndex(microbatch), True, wire(output, targets)
        )
        assert isinstance(last, BackwardResult)
        assert last.input_gradient is not None
        gradient = whole.input_gradients[1]
        assert gradient is not None
        assert last.loss_sum == whole.loss_sum
        assert torch.equal(last.input_gradient, gradient)
        short[0].backward(microbatch + 1, wire(last.input_gradient))
    for one, other in zip(plenty, short, strict=True):
        assert torch.equal(one.accumulator.totals(), other.accumulator.totals())


def test_less_memory_than_is_comfortable_takes_less_memory() -> None:
    manifest = deep_manifest()
    training = manifest.training.model_copy(update={"sequences_per_microbatch": 64})
    manifest = manifest.model_copy(update={"training": training})
    peaks: list[int] = []
    for budget in (PLENTY, sizes_of(manifest).working_bytes(3)):
        runner = StageRunner(manifest, StageIndex(0), CPU, budget, PLENTY)
        inputs, _ = tokens_of(manifest, 0)
        runner.forward(1, STEP, MicrobatchIndex(0), True, wire(inputs))
        with LiveBytes() as used:
            for number in (2, 3):
                result = runner.forward(number, STEP, MicrobatchIndex(number), True, wire(inputs))
                assert isinstance(result, ForwardResult)
            for number in (2, 3):
                runner.backward(number, wire(torch.ones_like(result.output)))
        peaks.append(used.peak)
    sizes = sizes_of(manifest)
    assert peaks[0] - peaks[1] > sizes.graph_bytes(), "of two graphs more than one"


@pytest.mark.parametrize("graph_budget", [0, PLENTY])
def test_without_accumulate_the_input_gradient_is_the_same_and_nothing_is_added(
    graph_budget: int,
) -> None:
    manifest = make_manifest(3)
    counting = runners_of(manifest, graph_budget)
    passing = runners_of(manifest, graph_budget)
    counted, passed = through(counting, 0), through(passing, 0, accumulate=False)
    assert counted.loss_sum == passed.loss_sum
    assert counted.gradients == passed.gradients
    for runner in passing:
        assert runner.accumulator.contents.microbatches() == ()
        assert not runner.accumulator.totals().any()


def test_a_microbatch_is_added_once_however_often_it_comes() -> None:
    manifest = make_manifest(2)
    runners = runners_of(manifest)
    through(runners, 0)
    before = [runner.accumulator.totals() for runner in runners]
    through(runners, 0, request=77)
    for runner, flat in zip(runners, before, strict=True):
        assert torch.equal(runner.accumulator.totals(), flat)
        assert runner.accumulator.contents.microbatches() == (0,)


def test_an_uncommitted_microbatch_leaves_what_never_having_had_it_leaves() -> None:
    manifest = make_manifest(3)
    runners, without = runners_of(manifest), runners_of(manifest)
    for microbatch in range(4):
        through(runners, microbatch)
    for microbatch in (1, 3):
        through(without, microbatch)
    for runner, other in zip(runners, without, strict=True):
        assert runner.uncommit(STEP, (MicrobatchIndex(0), MicrobatchIndex(2)))
        assert runner.accumulator.contents.microbatches() == (1, 3)
        torch.testing.assert_close(
            runner.accumulator.totals(), other.accumulator.totals(), rtol=1e-4, atol=1e-5
        )
        # Again, and for one that it never had: harmless.
        assert runner.uncommit(STEP, (MicrobatchIndex(0), MicrobatchIndex(40)))
        assert runner.accumulator.contents.microbatches() == (1, 3)


def test_uncommit_changes_nothing_when_one_of_the_microbatches_is_not_kept_any_more() -> None:
    manifest = make_manifest(2)
    inputs_and_gradient = runners_of(manifest)[1].sizes.input_bytes * 2
    runners = runners_of(manifest, kept_budget=inputs_and_gradient)
    for microbatch in range(4):
        through(runners, microbatch)
    last = runners[1]
    before = last.accumulator.totals()
    # The budget holds the newest only; the oldest went first.
    assert not last.uncommit(STEP, (MicrobatchIndex(0), MicrobatchIndex(3)))
    assert torch.equal(last.accumulator.totals(), before)
    assert last.accumulator.contents.microbatches() == (0, 1, 2, 3)
    assert last.uncommit(STEP, (MicrobatchIndex(3),))
    assert not last.uncommit(Step(2), (MicrobatchIndex(0),))


def test_uncommitting_everything_needs_nothing_kept_and_leaves_exact_zeros() -> None:
    manifest = make_manifest(1)
    runner = runners_of(manifest, kept_budget=0)[0]
    through([runner], 0)
    through([runner], 1)
    assert runner.uncommit(STEP, (MicrobatchIndex(0), MicrobatchIndex(1)))
    assert not runner.accumulator.totals().any()


def test_a_gradient_that_is_not_finite_is_refused_and_a_good_one_may_follow() -> None:
    manifest = make_manifest(2)
    first = runners_of(manifest)[0]
    inputs, _ = tokens_of(manifest, 0)
    result = first.forward(1, STEP, MicrobatchIndex(0), True, wire(inputs))
    assert isinstance(result, ForwardResult)
    for bad_value in (float("nan"), float("inf"), float("-inf")):
        bad = torch.ones_like(result.output)
        bad[1, 3, 5] = bad_value
        assert failure(first.backward, 1, wire(bad)) == "bad_input"
    assert failure(first.backward, 1, wire(bad)[:-4]) == "bad_input"
    assert not first.accumulator.totals().any()
    assert first.backward(1, wire(torch.ones_like(result.output))).added
    assert failure(first.backward, 1, wire(result.output)) == "unknown_microbatch"


def test_a_parameter_gradient_that_overflows_never_reaches_the_accumulator() -> None:
    manifest = make_manifest(2)
    first = runners_of(manifest)[0]
    through([first, runners_of(manifest)[1]], 0)
    before = first.accumulator.totals()
    inputs, _ = tokens_of(manifest, 1)
    result = first.forward(2, STEP, MicrobatchIndex(1), True, wire(inputs))
    assert isinstance(result, ForwardResult)
    # Finite itself, but its products are not.
    huge = torch.full_like(result.output, 3e38)
    assert failure(first.backward, 2, wire(huge)) == "not_finite"
    assert torch.equal(first.accumulator.totals(), before)
    assert first.accumulator.contents.microbatches() == (0,)


def test_an_output_or_a_loss_that_is_not_finite_is_refused() -> None:
    manifest = make_manifest(2)
    runners = runners_of(manifest)
    for runner in runners:
        with torch.no_grad():
            runner.stage.all_parameters()[0][1].fill_(float("inf"))
    inputs, targets = tokens_of(manifest, 0)
    assert failure(runners[0].forward, 1, STEP, 0, True, wire(inputs)) == "not_finite"
    activation = torch.ones(2, 16, 32)
    assert failure(runners[1].forward, 1, STEP, 0, True, wire(activation, targets)) == "not_finite"
    assert not runners[1].accumulator.totals().any()


def test_sizes_token_ids_and_steps_are_checked_first() -> None:
    manifest = make_manifest(2)
    first, last = runners_of(manifest)
    inputs, targets = tokens_of(manifest, 0)
    activation = torch.ones(2, 16, 32)
    assert failure(first.forward, 1, STEP, 0, True, wire(inputs)[:-1]) == "bad_input"
    assert failure(first.forward, 1, STEP, 0, True, wire(inputs, targets)) == "bad_input"
    assert failure(last.forward, 1, STEP, 0, True, wire(activation)) == "bad_input"
    assert failure(first.forward, 1, Step(2), 0, True, wire(inputs)) == "wrong_step"
    inputs[0, 0] = 64
    assert failure(first.forward, 1, STEP, 0, True, wire(inputs)) == "bad_input"
    targets[0, 0] = 2**32 - 100  # -100 as a signed number, which torch's loss would skip
    assert failure(last.forward, 1, STEP, 0, True, wire(activation, targets)) == "bad_input"
    targets[0, 0] = 0
    activation[0, 0, 0] = float("nan")
    assert failure(last.forward, 1, STEP, 0, True, wire(activation, targets)) == "bad_input"


def test_a_bfloat16_run_sends_bfloat16_and_accumulates_float32() -> None:
    manifest = make_manifest(2, dtype="bfloat16")
    runners = runners_of(manifest)
    assert runners[1].sizes.input_bytes == manifest.tokens_per_microbatch * 32 * 2
    through(runners, 0)
    expected = whole_gradients(manifest, [0])
    for runner in runners:
        assert runner.accumulator.totals().dtype == torch.float32
        for name, gradient in accumulated_gradients(runner).items():
            # bfloat16 has 8 bits; the cut itself loses none, as the stream is bfloat16 anyway.
            error = (gradient - expected[name]).norm() / expected[name].norm()
            assert error < 1e-2, name


def closed(manifest: Manifest) -> list[tuple[StageRunner, StepRunner, torch.Tensor]]:
    """Both stages after two microbatches, with their sums as the averaged result."""
    runners = runners_of(manifest)
    through(runners, 0)
    through(runners, 1)
    return [(r, StepRunner(r), r.accumulator.totals()) for r in runners]


def test_replicas_given_the_same_result_end_with_the_same_digest() -> None:
    manifest = make_manifest(2)
    tokens = 2 * manifest.tokens_per_microbatch
    digests = []
    for _ in range(2):
        for runner, steps, result in closed(manifest):
            copy = torch.empty_like(result)
            assert steps.prepare_round(STEP, copy) == (0, 1)
            assert torch.equal(copy, result)
            before = steps.fingerprint().digest
            norms = steps.norm(STEP, tokens, result)
            assert norms.finite
            expected = float((result.double() / tokens).square().sum())
            assert norms.own_squared == pytest.approx(expected, rel=1e-6)
            assert steps.fingerprint().digest == before
            digest = steps.apply(STEP, tokens, 0.7, 1e-3, result).digest
            assert digest != before
            assert runner.version == 1
            assert runner.accumulator.contents.microbatches() == ()
            assert not runner.accumulator.totals().any()
            digests.append(digest)
    assert digests[:2] == digests[2:]


def test_the_fingerprint_of_a_stage_covers_the_moments_of_its_optimizer() -> None:
    _, steps, _ = closed(make_manifest(2))[0]
    before = steps.fingerprint()
    steps._optimizer.second_moments[0].view(-1)[0] = 1.0
    assert steps.fingerprint().digest != before.digest
    assert steps.fingerprint().norm == before.norm


def test_a_result_that_is_not_finite_is_reported_and_never_applied() -> None:
    manifest = make_manifest(2)
    runner, steps, result = closed(manifest)[0]
    result[3] = float("nan")
    assert not steps.norm(STEP, 64, result).finite
    before = steps.fingerprint()
    assert failure(steps.apply, STEP, 64, 1.0, 1e-3, result) == "not_finite"
    assert steps.fingerprint() == before
    assert runner.accumulator.contents.microbatches() == (0, 1)
    assert failure(steps.apply, Step(2), 64, 1.0, 1e-3, result) == "wrong_step"


def test_what_was_in_flight_is_forgotten_when_the_step_is_applied() -> None:
    manifest = make_manifest(2)
    runner, steps, result = closed(manifest)[0]
    inputs, _ = tokens_of(manifest, 5)
    late = runner.forward(99, STEP, MicrobatchIndex(5), True, wire(inputs))
    assert isinstance(late, ForwardResult)
    steps.apply(STEP, 64, 1.0, 1e-3, result)
    assert failure(runner.backward, 99, wire(late.output)) == "unknown_microbatch"
    assert failure(runner.forward, 100, STEP, 6, True, wire(inputs)) == "wrong_step"


def test_a_saved_state_goes_on_elsewhere_exactly(tmp_path) -> None:
    manifest = make_manifest(2)
    runner, steps, result = closed(manifest)[0]
    steps.apply(STEP, 64, 1.0, 1e-3, result)
    path = tmp_path / "state.safetensors"
    steps.save(path, Version(1))
    other = runners_of(manifest)[0]
    other_steps = StepRunner(other)
    assert other_steps.load(path, Version(1)) == steps.fingerprint()
    # The optimizer's moments went along: the next step is the same too.
    again = steps.apply(Step(2), 64, 1.0, 1e-3, result)
    assert other_steps.apply(Step(2), 64, 1.0, 1e-3, result) == again
    assert other_steps.reinitialise(Version(0)) == StepRunner(runners_of(manifest)[0]).fingerprint()
    assert other.version == 0
    assert runner.version == 2


def test_states_that_cannot_be_written_or_do_not_belong_here_are_refused(tmp_path) -> None:
    manifest = make_manifest(2)
    first, last = (StepRunner(runner) for runner in runners_of(manifest))
    path = tmp_path / "state.safetensors"
    assert failure(first.save, tmp_path / "no" / "folder", Version(0)) == "storage"
    assert failure(first.save, path, Version(3)) == "wrong_step"
    assert failure(first.load, path, Version(0)) == "storage"
    first.save(path, Version(0))
    before = last.fingerprint()
    assert failure(last.load, path, Version(0)) == "bad_input"
    assert failure(first.load, path, Version(1)) == "bad_input"
    path.write_bytes(path.read_bytes()[:200])
    assert failure(first.load, path, Version(0)) == "storage"
    assert last.fingerprint() == before


@pytest.mark.skipif(bool(accelerators()), reason="this machine has a GPU")
def test_a_device_that_is_not_there_is_named() -> None:
    assert failure(_selected, "cuda:0") == "device"


@pytest.mark.skipif(not accelerators(), reason="needs a GPU")
def test_a_gpu_computes_what_the_cpu_computes() -> None:
    manifest = make_manifest(2)
    device = _selected(str(accelerators()[0].device))
    on_gpu = [StageRunner(manifest, StageIndex(i), device, PLENTY, PLENTY) for i in range(2)]
    on_cpu = runners_of(manifest)
    inputs, targets = tokens_of(manifest, 0)
    index = MicrobatchIndex(0)
    middle = on_gpu[0].forward(1, STEP, index, True, wire(inputs))
    assert isinstance(middle, ForwardResult)
    host = on_gpu[0].copier.to_host(middle.output).clone()
    last = on_gpu[1].forward(1, STEP, index, True, wire(host, targets))
    assert isinstance(last, BackwardResult)
    assert last.input_gradient is not None
    on_gpu[0].backward(1, wire(on_gpu[1].copier.to_host(last.input_gradient)))
    through(on_cpu, 0)
    for one, other in zip(on_gpu, on_cpu, strict=True):
        torch.testing.assert_close(
            one.accumulator.totals().cpu(), other.accumulator.totals(), rtol=1e-3, atol=1e-4
        )
        assert one.uncommit(STEP, (index,))
    assert FlatLayout.of(on_gpu[0].stage) == on_cpu[0].layout


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    "codecs", [CodecsConfig(), CodecsConfig(activation="none", gradient="none")]
)
def test_warming_up_leaves_no_trace_and_counts_nothing(
    codecs: CodecsConfig, staleness: int
) -> None:
    plain = make_manifest(3)
    training = plain.training.model_copy(update={"staleness": staleness})
    manifest = plain.model_copy(update={"codecs": codecs, "training": training})
    for runner in runners_of(manifest):
        before = StepRunner(runner).fingerprint()
        runner.warm_up()
        assert StepRunner(runner).fingerprint() == before
        assert runner.graphs.measured is not None
        assert runner.graphs.room_bytes() == runner.graphs.budget_bytes
        for parameter_set in runner.parameter_sets:
            assert not parameter_set.accumulator.contents.microbatches()
            assert not parameter_set.accumulator.totals().any()
            assert all(parameter.grad is None for parameter in parameter_set.parameters)
