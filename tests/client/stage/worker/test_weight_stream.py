"""Stages of which weights lie in host memory: they compute what any stage computes, to the bit, and
take no more of the device than was planned."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kits.client.device_pipeline import MANIFEST, Pipeline
from kits.client.fake_accelerator import FakeAccelerator, FakeEvent, FakeStream, device_of
from kits.client.stage_runners import CPU, PLENTY
from swarm_client.stage.worker.transfer.weight_stream import WeightStream, stream_weights
from swarm_shared.base.types import Step, Version
from swarm_shared.model import Stage, build_stage
from swarm_shared.run.model_config import AdapterConfig
from swarm_shared.run.stage_cut import LayerMatrices

pytestmark = pytest.mark.usefixtures("splits")
STEPS = 2
LAYERS = MANIFEST.stages[1].end_layer - MANIFEST.stages[1].first_layer
ALL_BYTES = LayerMatrices.of(MANIFEST.model).streamable_bytes(LAYERS, staleness=0)


@pytest.mark.parametrize("graph_budget", [PLENTY, 0], ids=["kept and split", "computed again"])
@pytest.mark.parametrize("streamed", [1, ALL_BYTES], ids=["a few weights", "all matrices"])
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_stage_with_weights_on_the_host_trains_to_the_bits_of_one_without(
    kind: str, streamed: int, graph_budget: int
) -> None:
    fake = FakeAccelerator(kind)
    with fake.at_work():
        found = Pipeline(MANIFEST, fake, graph_budget, streamed).train(STEPS)
    assert found == Pipeline(MANIFEST, CPU, graph_budget).train(STEPS)


def test_both_versions_of_a_stage_with_staleness_are_streamed() -> None:
    late = MANIFEST.model_copy(
        update={"training": MANIFEST.training.model_copy(update={"staleness": 1})}
    )
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        found = Pipeline(late, fake, PLENTY, ALL_BYTES).train(STEPS)
    assert found == Pipeline(late, CPU, PLENTY).train(STEPS)


def test_a_state_leaves_and_enters_a_stage_whose_weights_are_on_the_host(tmp_path: Path) -> None:
    fake, path = FakeAccelerator("cuda"), tmp_path / "state"
    with fake.at_work():
        there = Pipeline(MANIFEST, fake, PLENTY, ALL_BYTES)
        there.step(Step(1))
        first = there.steps[1].fingerprint()
        there.steps[1].save(path, there.runners[1].version)
        there.step(Step(2))
        assert there.steps[1].load(path, Version(1)) == first
        begun = there.steps[1].reinitialise(there.runners[1].version)
    assert begun == Pipeline(MANIFEST, CPU, PLENTY).steps[1].fingerprint()


@pytest.mark.parametrize("graph_budget", [PLENTY, 0], ids=["kept and split", "computed again"])
def test_from_the_second_step_on_only_the_first_product_of_a_step_waits_for_its_weight(
    graph_budget: int,
) -> None:
    fake, late = FakeAccelerator("cuda"), list[int]()
    with fake.at_work():
        pipeline = Pipeline(MANIFEST, fake, graph_budget, ALL_BYTES)
        stream = pipeline.runners[1].parameter_sets.weights
        assert stream is not None
        for step in range(1, 4):
            pipeline.step(Step(step))
            late.append(stream.late_copies)
    assert late[1] - late[0] == late[2] - late[1] == 1


@pytest.mark.parametrize("wanted", [1, ALL_BYTES // 2, ALL_BYTES])
def test_the_wanted_bytes_of_the_device_are_free_for_something_else(wanted: int) -> None:
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        stage = build_stage(MANIFEST, 1, fake.device)
        before = device_bytes(stage)
        stream = stream_weights([stage], wanted, fake)
        assert stream is not None
        assert stream.host_bytes == before - device_bytes(stage)
        # Weights and their gradients, but for two buffers of each.
        assert 2 * stream.host_bytes - 2 * stream.nbytes >= wanted
    with fake.at_work(), pytest.raises(ValueError, match="are needed"):
        stream_weights([build_stage(MANIFEST, 1, fake.device)], ALL_BYTES + 1, fake)


def device_bytes(stage: Stage) -> int:
    return sum(one.nbytes for one in stage.parameters() if device_of(one).type != "cpu")


def test_frozen_weights_are_moved_once_for_all_versions() -> None:
    model = MANIFEST.model.model_copy(update={"adapters": AdapterConfig(rank=2)})
    manifest = MANIFEST.model_copy(update={"model": model})
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        stage = build_stage(manifest, 1, fake.device)
        frozen = {id(one): one for _, one in stage.frozen_parameters()}
        stages = [stage, copy.deepcopy(stage, frozen)]
        frozen_bytes = LayerMatrices.of(model).streamable_bytes(LAYERS, staleness=1)
        stream_weights(stages, frozen_bytes, fake)
        for one, other in zip(*(each.matrices() for each in stages), strict=True):
            assert one.weight is other.weight
            assert one.host_weights is other.host_weights is not None
            assert device_of(one.weight).type == "cpu"


# ---------------------------------------------------------------- the stream alone


class Weights:
    """Three weights in host memory, each a number of its own."""

    def __init__(self, fake: FakeAccelerator) -> None:
        assert fake.streams is not None
        self.host = [fake.streams.pinned(40).view(torch.float32) for _ in range(3)]
        for number, weight in enumerate(self.host):
            weight.fill_(float(number))
        self.stream = WeightStream(fake.device, fake.streams, self.host)

    def read(self, number: int) -> torch.Tensor:
        with self.stream.on_device(self.host[number], in_backward=False) as there:
            return there * 1.0


@pytest.fixture
def weights() -> Iterator[Weights]:
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        yield Weights(fake)


@given(order=st.lists(st.integers(0, 2), max_size=30))
def test_a_product_sees_its_own_weight_in_any_order(order: list[int]) -> None:
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        weights = Weights(fake)
        read = [weights.read(number).cpu().unique().tolist() for number in order]
    assert read == [[float(number)] for number in order]


def test_a_changed_weight_is_copied_anew(weights: Weights) -> None:
    for number in (0, 1, 0, 1):
        weights.read(number)
    weights.stream.forget()
    weights.host[0].fill_(7.0)
    assert weights.read(0).cpu().unique().tolist() == [7.0]


def test_a_change_that_does_not_wait_for_the_copies_is_found(weights: Weights) -> None:
    for number in (0, 1, 0, 1, 0):  # 1 is being copied now
        weights.read(number)
    with pytest.raises(RuntimeError, match="overwrites what is being read"):
        weights.host[1].fill_(7.0)


def test_a_gradient_is_in_host_memory_when_it_has_been_waited_for(weights: Weights) -> None:
    kept = [weights.stream.keep_gradient(weights.read(n) + 1.0) for n in range(3)]
    assert [one().unique().tolist() for one in kept] == [[1.0], [2.0], [3.0]]
    assert {device_of(one()).type for one in kept} == {"cpu"}


def test_a_gradient_that_is_read_before_it_has_arrived_is_found(
    weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = weights.stream.keep_gradient(weights.read(1))
    monkeypatch.setattr(FakeEvent, "synchronize", lambda *_: None)
    with pytest.raises(RuntimeError, match="reads what is being written"):
        arrived().sum()


@pytest.mark.parametrize("method", ["wait_event", "record"])
def test_a_wait_that_is_forgotten_is_found(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a copy for the buffer's last use, or of a product for the copy."""
    owner = FakeStream if method == "wait_event" else FakeEvent
    monkeypatch.setattr(owner, method, lambda *_: None)
    fake = FakeAccelerator("cuda")
    with fake.at_work():
        weights = Weights(fake)
        with pytest.raises(RuntimeError, match="without waiting"):
            [weights.read(number) for number in range(3)]
