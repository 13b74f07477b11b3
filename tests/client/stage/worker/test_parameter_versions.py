"""With staleness 1 a worker computes two steps beside each other, each with its own version."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from client.stage.worker.test_stage_runner import closed
from kits.client.stage_runners import (
    CPU,
    PLENTY,
    failure,
    make_manifest,
    runners_of,
    tokens_of,
    wire,
)
from swarm_client.stage.protocol.errors import RequestFailed
from swarm_client.stage.worker.stage_runner import BackwardResult, ForwardResult, StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_coordinator.offline.reference import train_reference
from swarm_shared.base.types import MicrobatchIndex, StageIndex, Step, Version
from swarm_shared.model import FlatLayout, global_norm, open_state
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.schedule import learning_rate

MICROBATCHES = 3
STATE_OF_STAGE_0 = "61ddec0e440299a2774c302503f028a130e5cb51e758d70a8f0d586a3e18a831"
"""SHA-256 of its file at version 0 of a run without staleness, from before there was any."""


def with_staleness(manifest: Manifest, staleness: int = 1) -> Manifest:
    training = manifest.training.model_copy(
        update={"staleness": staleness, "microbatches_per_step": MICROBATCHES}
    )
    return manifest.model_copy(update={"training": training})


class Pipeline:
    """All stages of a run, one peer each, and the trainer that drives and closes them."""

    def __init__(self, manifest: Manifest, graph_budget: int = PLENTY) -> None:
        self.manifest = manifest
        self.runners = runners_of(manifest, graph_budget)
        self.steps = [StepRunner(runner) for runner in self.runners]

    def samples(self, step: int) -> list[tuple[object, object]]:
        return [tokens_of(self.manifest, 10 * step + index) for index in range(MICROBATCHES)]

    def begin(self, step: int, index: int) -> torch.Tensor:
        """One microbatch forward through all stages but the last."""
        payload, _ = tokens_of(self.manifest, 10 * step + index)
        for runner in self.runners[:-1]:
            result = runner.forward(
                10 * step + index, Step(step), MicrobatchIndex(index), True, wire(payload)
            )
            assert isinstance(result, ForwardResult)
            payload = result.output
        return payload

    def finish(self, step: int, index: int, activation: torch.Tensor) -> None:
        """Through the last stage, and back."""
        number = 10 * step + index
        _, targets = tokens_of(self.manifest, number)
        payload = wire(activation, targets)
        back = self.runners[-1].forward(number, Step(step), MicrobatchIndex(index), True, payload)
        for runner in reversed(self.runners[:-1]):
            assert isinstance(back, BackwardResult)
            assert back.input_gradient is not None
            back = runner.backward(number, wire(back.input_gradient))

    def microbatch(self, step: int, index: int) -> None:
        self.finish(step, index, self.begin(step, index))

    def close(self, step: int) -> None:
        """Average (each peer is the only one of its stage), norm, apply."""
        tokens, norms, results = self.manifest.tokens_per_step, [], []
        for runner, closing in zip(self.runners, self.steps, strict=True):
            result = torch.empty(runner.layout.count)
            held = closing.prepare_round(Step(step), result)
            assert held == tuple(range(MICROBATCHES))
            results.append(result)
            norms.append(closing.norm(Step(step), tokens, result).own_squared)
        total = global_norm(norms)
        rate = learning_rate(self.manifest.optimizer, self.manifest.training.steps, step)
        for closing, result in zip(self.steps, results, strict=True):
            closing.apply(Step(step), tokens, total, rate, result)

    def save(self, folder: Path, version: int) -> list[Path]:
        folder.mkdir()
        paths = [folder / f"{stage}.safetensors" for stage in range(len(self.steps))]
        for closing, path in zip(self.steps, paths, strict=True):
            closing.save(path, Version(version))
        return paths

    def load(self, paths: Sequence[Path], version: int) -> None:
        for closing, path in zip(self.steps, paths, strict=True):
            closing.load(path, Version(version))


def in_order(pipeline: Pipeline, first: int, last: int) -> None:
    """A step begins when the one before was applied."""
    for step in range(first, last + 1):
        for index in range(MICROBATCHES):
            pipeline.microbatch(step, index)
        pipeline.close(step)


def overlapped(pipeline: Pipeline, first: int, last: int) -> None:
    """Of the next step one microbatch is done and one is under way when a step is applied."""
    for index in range(MICROBATCHES):
        pipeline.microbatch(first, index)
    for step in range(first, last + 1):
        if step == last:
            pipeline.close(step)
            return
        pipeline.microbatch(step + 1, 0)
        under_way = pipeline.begin(step + 1, 1)
        pipeline.close(step)
        pipeline.finish(step + 1, 1, under_way)
        for index in range(2, MICROBATCHES):
            pipeline.microbatch(step + 1, index)


def contents(paths: Sequence[Path]) -> list[bytes]:
    return [path.read_bytes() for path in paths]


@pytest.mark.parametrize("tied", [False, True])
def test_what_overlaps_computes_what_the_reference_computes(tied: bool) -> None:
    # A tied table's two gradients would have to be averaged: one stage holds both ends.
    manifest = with_staleness(make_manifest(1 if tied else 3, tied=tied))
    pipeline = Pipeline(manifest)
    overlapped(pipeline, 1, 6)
    whole = train_reference(manifest, pipeline.samples, 6, lambda record: None, threads=1)
    at_once = with_staleness(manifest, 0)
    other = train_reference(at_once, pipeline.samples, 6, lambda record: None, threads=1)
    ours = {n: p for runner in pipeline.runners for n, p in runner.stage.named_parameters()}
    expected, different = dict(whole.named_parameters()), dict(other.named_parameters())
    assert ours.keys() == expected.keys()
    for name, parameter in expected.items():
        size = parameter.norm()
        assert (ours[name] - parameter).norm() < 1e-4 * size, name
        assert (different[name] - parameter).norm() > 1e-3 * size, name


@pytest.mark.parametrize("graph_budget", [0, PLENTY])
def test_what_overlaps_ends_with_the_bytes_of_what_comes_one_after_the_other(
    graph_budget: int, tmp_path: Path
) -> None:
    manifest = with_staleness(make_manifest(2))
    ordered, mixed = Pipeline(manifest), Pipeline(manifest, graph_budget)
    in_order(ordered, 1, 5)
    overlapped(mixed, 1, 5)
    assert contents(ordered.save(tmp_path / "a", 5)) == contents(mixed.save(tmp_path / "b", 5))


@pytest.mark.parametrize("version", [1, 2])
def test_a_state_saved_in_the_middle_goes_on_elsewhere_to_the_bit(
    version: int, tmp_path: Path
) -> None:
    manifest = with_staleness(make_manifest(2))
    first, second = Pipeline(manifest), Pipeline(manifest)
    in_order(first, 1, version)
    # What the other one has accumulated and begun, of both steps, is dropped when it loads.
    second.microbatch(1, 0)
    second.microbatch(2, 0)
    under_way = second.begin(2, 1)
    second.load(first.save(tmp_path / "middle", version), version)
    for runner in second.runners:
        for parameter_set in runner.parameter_sets:
            assert parameter_set.accumulator.contents.microbatches() == ()
            assert not parameter_set.accumulator.totals().any()
    assert failure(second.runners[0].backward, 21, wire(under_way)) == "unknown_microbatch"
    overlapped(first, version + 1, version + 3)
    in_order(second, version + 1, version + 3)
    last = version + 3
    assert contents(first.save(tmp_path / "a", last)) == contents(second.save(tmp_path / "b", last))


def test_the_state_has_the_version_before_which_at_the_beginning_is_the_same(
    tmp_path: Path,
) -> None:
    pipeline = Pipeline(with_staleness(make_manifest(2)))
    files = [pipeline.save(tmp_path / "0", 0)]
    for version in (1, 2):
        in_order(pipeline, version, version)
        files.append(pipeline.save(tmp_path / f"{version}", version))
    names = [entry.name for entry in pipeline.runners[0].layout.entries]
    before, now, then = (open_state(paths[0]).tensors for paths in files)
    assert len(then) == 4 * len(names) + 1
    for name in names:
        assert torch.equal(before["previous." + name], before[name])
        assert torch.equal(now["previous." + name], before[name])
        assert torch.equal(then["previous." + name], now[name])
        assert not torch.equal(now[name], before[name])


def test_without_staleness_the_state_is_what_it_was(tmp_path: Path) -> None:
    manifest = make_manifest(2)
    (runner, *_), path = runners_of(manifest), tmp_path / "state"
    StepRunner(runner).save(path, Version(0))
    assert hashlib.sha256(path.read_bytes()).hexdigest() == STATE_OF_STAGE_0
    assert len(list(runner.parameter_sets)) == 1
    runner, steps, result = closed(manifest)[0]
    steps.apply(Step(1), 64, 1.0, 1e-3, result)
    steps.save(path, Version(1))
    assert len(open_state(path).tensors) == 3 * len(runner.layout.entries) + 1


def test_states_with_and_without_the_version_before_do_not_pass_for_each_other(
    tmp_path: Path,
) -> None:
    with_it, without = tmp_path / "with", tmp_path / "without"
    manifest = make_manifest(2)
    plain = StepRunner(runners_of(manifest)[0])
    stale = StepRunner(runners_of(with_staleness(manifest))[0])
    plain.save(without, Version(0))
    stale.save(with_it, Version(0))
    assert failure(stale.load, without, Version(0)) == "bad_input"
    assert failure(plain.load, with_it, Version(0)) == "bad_input"


def test_starting_again_from_the_seed_is_version_0_in_both_lanes(tmp_path: Path) -> None:
    manifest = with_staleness(make_manifest(1))
    pipeline = Pipeline(manifest)
    fresh = contents(pipeline.save(tmp_path / "fresh", 0))
    in_order(pipeline, 1, 3)
    pipeline.microbatch(4, 0)
    pipeline.steps[0].reinitialise(Version(0))
    assert contents(pipeline.save(tmp_path / "again", 0)) == fresh
    assert all(
        not parameter_set.accumulator.totals().any()
        for parameter_set in pipeline.runners[0].parameter_sets
    )


def test_two_steps_are_open_and_only_the_first_of_them_closes() -> None:
    pipeline = Pipeline(with_staleness(make_manifest(2)))
    runner, closing = pipeline.runners[0], pipeline.steps[0]
    inputs, _ = tokens_of(pipeline.manifest, 0)

    def refused(step: int) -> bool:
        try:
            runner.forward(1000 + step, Step(step), MicrobatchIndex(9), False, wire(inputs))
        except RequestFailed as error:
            return error.code == "wrong_step"
        runner.discard(1000 + step)
        return False

    flat = torch.zeros(runner.layout.count)
    assert [refused(step) for step in range(5)] == [True, False, False, True, True]
    assert failure(closing.prepare_round, Step(2), flat) == "wrong_step"
    assert failure(closing.norm, Step(2), 1, flat) == "wrong_step"
    assert failure(closing.apply, Step(2), 1, 1.0, 0.1, flat) == "wrong_step"
    in_order(pipeline, 1, 1)
    assert [refused(step) for step in range(5)] == [True, True, False, False, True]
    assert not runner.uncommit(Step(1), (MicrobatchIndex(0),))


def test_a_step_is_computed_with_one_version_ahead_of_time_and_in_its_turn() -> None:
    pipeline = Pipeline(with_staleness(make_manifest(2)))
    runner = pipeline.runners[0]
    inputs, _ = tokens_of(pipeline.manifest, 77)
    number = iter(range(1000, 2000))

    def computed(step: int) -> torch.Tensor:
        result = runner.forward(next(number), Step(step), MicrobatchIndex(9), False, wire(inputs))
        assert isinstance(result, ForwardResult)
        return result.output

    ahead = computed(1)
    for version in range(5):
        assert torch.equal(computed(version + 1), ahead)
        following = computed(version + 2)
        # Steps 1 and 2 are both computed with the initialisation.
        assert torch.equal(following, ahead) is (version == 0)
        in_order(pipeline, version + 1, version + 1)
        ahead = following


def test_taking_out_and_emptying_concern_one_step_and_the_version_it_is_computed_with() -> None:
    manifest = with_staleness(make_manifest(2))
    pipeline, without = Pipeline(manifest), Pipeline(manifest)
    for one in (pipeline, without):
        in_order(one, 1, 1)
    for index in range(MICROBATCHES):
        pipeline.microbatch(2, index)
        pipeline.microbatch(3, index)
        without.microbatch(2, index)
        if index != 1:
            without.microbatch(3, index)
    for runner, other in zip(pipeline.runners, without.runners, strict=True):
        before = runner.parameter_sets.for_step(Step(2)).accumulator.totals()
        assert runner.uncommit(Step(3), (MicrobatchIndex(1),))
        ours, expected = (r.parameter_sets.for_step(Step(3)).accumulator for r in (runner, other))
        assert ours.contents.microbatches() == expected.contents.microbatches() == (0, 2)
        torch.testing.assert_close(ours.totals(), expected.totals(), rtol=1e-4, atol=1e-5)
        assert torch.equal(runner.parameter_sets.for_step(Step(2)).accumulator.totals(), before)
    pipeline.close(2)
    without.close(2)
    pipeline.microbatch(3, 1)
    # The close of step 2 lay between: what is taken out now was computed before it.
    for runner, other in zip(pipeline.runners, without.runners, strict=True):
        assert runner.uncommit(Step(3), (MicrobatchIndex(0), MicrobatchIndex(1)))
        assert other.uncommit(Step(3), (MicrobatchIndex(0),))
        ours, expected = (r.parameter_sets.for_step(Step(3)).accumulator for r in (runner, other))
        torch.testing.assert_close(ours.totals(), expected.totals(), rtol=1e-4, atol=1e-5)
        runner.reset_step(Step(4))
        assert ours.contents.microbatches() == (2,)
        runner.reset_step(Step(3))
        assert ours.contents.microbatches() == ()


def test_graphs_of_both_steps_share_one_budget_and_an_apply_frees_those_of_its_step() -> None:
    manifest = with_staleness(make_manifest(2))
    probe = Pipeline(manifest)
    probe.begin(1, 0)
    sizes = probe.runners[0].graphs.measured
    assert sizes is not None
    runner = StageRunner(manifest, StageIndex(0), CPU, 2 * sizes.graph_bytes(), PLENTY)
    inputs, _ = tokens_of(manifest, 0)

    def kept(request: int, step: int) -> bool:
        runner.forward(request, Step(step), MicrobatchIndex(request), True, wire(inputs))
        return runner._in_flight[request].graph is not None

    assert [kept(1, 1), kept(2, 2), kept(3, 2)] == [True, True, False]
    flat = torch.ones(FlatLayout.of(runner.stage).count)
    StepRunner(runner).apply(Step(1), 1, 1.0, 1e-3, flat)
    assert sorted(runner._in_flight) == [2, 3]
    assert [kept(4, 3), kept(5, 2)] == [True, False]
