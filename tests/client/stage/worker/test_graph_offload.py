"""Graphs that wait in host memory: the results are the same to the bit, and the device has room."""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import cache

import pytest
import torch

from kits.client.device_pipeline import Pipeline, comparable
from kits.client.fake_accelerator import FakeAccelerator, device_of
from kits.client.stage_runners import CPU, PLENTY, make_manifest
from kits.manifests import stage_ranges
from swarm_client.stage.worker.transfer.graph_offload import GraphOffload
from swarm_shared.base.types import Step
from swarm_shared.model.layer_seconds import LayerSeconds
from swarm_shared.run.graph_sizes import GraphSizes
from swarm_shared.run.manifest import Manifest

pytestmark = pytest.mark.usefixtures("splits")
LAYERS = 6
WORTH_IT, NOT_WORTH_IT = LayerSeconds(forward=1.0, copy=0.5), LayerSeconds(forward=1.0, copy=1e3)


def deep_manifest() -> Manifest:
    """Two stages, the first of six layers."""
    made = comparable(make_manifest(layers=LAYERS + 1))
    return made.model_copy(update={"stages": stage_ranges(LAYERS, LAYERS + 1)})


DEEP = deep_manifest()


@pytest.fixture(scope="module")
def sizes() -> GraphSizes:
    pipeline = Pipeline(DEEP, CPU, PLENTY)
    pipeline.step(Step(1))
    return pipeline.runners[0].graphs.sizes


def offloading(
    budget_bytes: int, seconds: LayerSeconds = WORTH_IT, host_bytes: int = PLENTY,
    accelerator: FakeAccelerator | None = None,
) -> tuple[list[float], list[list[str]], list[tuple[int, int]]]:  # fmt: skip
    """Losses and digests of two steps, and the layers that were computed again and offloaded."""
    fake, seen = accelerator or FakeAccelerator("cuda"), list[tuple[int, int]]()
    with fake.at_work():
        pipeline = Pipeline(DEEP, fake, budget_bytes, host_graph_bytes=host_bytes)
        first = pipeline.runners[0]
        run = first._passes.run

        def noted(*arguments: object) -> object:
            graph = run(*arguments)  # type: ignore[arg-type]
            seen.append((graph.recomputed_layers, graph.offloaded_layers))
            return graph

        first._passes.run = noted  # type: ignore[method-assign, assignment]
        first.graphs.seconds = seconds
        digests = [pipeline.step(Step(step)) for step in (1, 2)]
    return pipeline.losses, digests, seen


@cache
def expected() -> tuple[list[float], list[list[str]]]:
    pipeline = Pipeline(DEEP, CPU, PLENTY)
    digests = [pipeline.step(Step(step)) for step in (1, 2)]
    return pipeline.losses, digests


@pytest.mark.parametrize("kept", [5, 3, 2, 0])
def test_layers_that_do_not_fit_wait_in_host_memory_and_nothing_changes(
    sizes: GraphSizes, kept: int
) -> None:
    offloaded = LAYERS - kept
    losses, digests, seen = offloading(
        sizes.working_bytes(0, offloaded) + LAYERS * sizes.input_bytes
    )
    assert (losses, digests) == expected()
    assert seen[-1][1] > 0
    assert all(not again for again, _ in seen[1:])


def test_layers_are_computed_again_where_copies_take_longer(sizes: GraphSizes) -> None:
    losses, digests, seen = offloading(sizes.working_bytes(0, 3), NOT_WORTH_IT)
    assert (losses, digests) == expected()
    assert all(not offloaded for _, offloaded in seen)


def test_host_memory_bounds_how_many_layers_wait_there(sizes: GraphSizes) -> None:
    budget = sizes.working_bytes(0, 4) + LAYERS * sizes.input_bytes
    losses, digests, seen = offloading(budget, host_bytes=2 * sizes.layer_bytes)
    assert (losses, digests) == expected()
    assert max(offloaded for _, offloaded in seen) == 2
    assert max(again for again, _ in seen[1:]) > 0, "the others are computed again"


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_first_computation_measures_what_copies_and_passes_take(staleness: int) -> None:
    training = DEEP.training.model_copy(update={"staleness": staleness})
    fake = FakeAccelerator("xpu")
    with fake.at_work():
        manifest = DEEP.model_copy(update={"training": training})
        runner = Pipeline(manifest, fake, PLENTY, host_graph_bytes=PLENTY).runners[0]
        assert runner.graphs.seconds is None
        runner.warm_up()
    seconds = runner.graphs.seconds
    assert seconds is not None
    assert seconds.forward > 0 < seconds.copy


def test_a_device_in_the_hosts_memory_copies_nothing() -> None:
    runner = Pipeline(DEEP, CPU, PLENTY, host_graph_bytes=PLENTY).runners[0]
    runner.warm_up()
    assert runner.graphs.seconds is None


# ---------------------------------------------------------------- one pass alone


class Squares:
    """A chain of layers, each of which saves what it gets."""

    def __init__(self, fake: FakeAccelerator, offloaded: int) -> None:
        assert fake.streams is not None
        self.offload = GraphOffload(fake.device, fake.streams, [])
        self.graph = self.offload.forward_pass(offloaded)
        self.entry = torch.ones(100, device=fake.device).requires_grad_()

    def output(
        self, layers: int, in_backward: Callable[[torch.Tensor], None] = lambda _: None
    ) -> torch.Tensor:
        x = self.entry * 1.5
        for number in range(layers):
            if number < self.graph.layers:
                with self.graph.layer():
                    x = x * x
            else:
                x = x * x
                if number == self.graph.layers:
                    self.graph.followed_by(x)
            x.register_hook(in_backward)  # type: ignore[no-untyped-call]
        return x

    def gradient(self, layers: int) -> torch.Tensor:
        (found,) = torch.autograd.grad(self.output(layers).sum(), self.entry)
        return found


@pytest.mark.parametrize("offloaded", [1, 2, 3, 4])
def test_gradients_through_offloaded_layers_are_those_without(
    fake: FakeAccelerator, offloaded: int
) -> None:
    plain = Squares(fake, 0).gradient(4).cpu()
    assert torch.equal(Squares(fake, offloaded).gradient(4).cpu(), plain)


def test_while_a_graph_waits_the_device_holds_none_of_it(fake: FakeAccelerator) -> None:
    squares = Squares(fake, 4)
    output = squares.output(5)
    del squares.graph
    saved = [one for one in device_tensors() if one.numel() == 100]
    assert len(saved) == 3, "the entry, what the layer that is kept got, and the output"
    torch.autograd.grad(output.sum(), squares.entry)
    assert not [one for one in device_tensors() if one.dtype == torch.uint8 and one.numel()]


def test_two_layers_at_most_are_on_the_device_at_a_time_in_the_backward_pass(
    fake: FakeAccelerator,
) -> None:
    squares, there = Squares(fake, 6), list[int]()
    output = squares.output(7, lambda _: there.append(len(slabs())))
    del squares.graph
    torch.autograd.grad(output.sum(), squares.entry)
    assert len(there) == 7
    assert max(there) == 2


def slabs() -> list[torch.Tensor]:
    """The memory of offloaded layers on the device."""
    return [one for one in device_tensors() if one._base is None and one.dtype == torch.uint8]


def device_tensors() -> list[torch.Tensor]:
    gc.collect()
    every = [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]
    return [one for one in every if device_of(one).type == "cuda"]


@pytest.mark.parametrize("forgotten", ["FakeStream.wait_event", "FakeStream.wait_stream"])
def test_a_wait_that_is_forgotten_is_found(
    fake: FakeAccelerator, forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    squares = Squares(fake, 3)
    monkeypatch.setattr(f"kits.client.fake_accelerator.{forgotten}", lambda *_: None)
    with pytest.raises(RuntimeError, match="without waiting"):
        squares.gradient(4)


def test_what_lies_on_the_host_already_is_not_offloaded() -> None:
    """As the seed that attention on CUDA saves."""
    fake = FakeAccelerator("cuda")
    assert fake.streams is not None
    with fake.at_work():
        offload = GraphOffload(fake.device, fake.streams, ())
        assert offload.stays(torch.zeros(2, dtype=torch.int64))
        assert not offload.stays(torch.zeros(2, device=fake.device))
