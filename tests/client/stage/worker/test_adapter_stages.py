"""Stages that train adapters: their gradients, split and recomputed, their states, their base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from client.stage.worker.test_stage_runner import whole_gradients
from kits.client.stage_runners import (
    PLENTY,
    STEP,
    accumulated_gradients,
    failure,
    make_manifest,
    runners_of,
    through,
    tokens_of,
)
from swarm_client.stage.worker.accelerator import processor
from swarm_client.stage.worker.backward_pass import Graph, differentiate
from swarm_client.stage.worker.stage_runner import StageRunner
from swarm_client.stage.worker.step_runner import StepRunner
from swarm_shared.base.types import StageIndex, Version
from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import Stage
from swarm_shared.model.split_backward import Weights, WeightTape
from swarm_shared.model.state import save_state
from swarm_shared.run.manifest import Manifest
from swarm_shared.run.model_config import ALL_TARGETS, AdapterConfig, ComputeDtype


def adapter_manifest(stages: int = 2, **options: Any) -> Manifest:
    return make_manifest(stages, adapters=AdapterConfig(rank=3, alpha=6.0), **options)


def stirred(stage: Stage) -> Stage:
    """At first half of an adapter's gradients are zero; change its second matrix."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in stage.all_parameters():
            if name.endswith("lora_B.weight"):
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return stage


@pytest.mark.parametrize("budget", [PLENTY, 0], ids=["split", "recomputed"])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_stages_accumulate_the_adapters_gradients_of_the_whole_model(
    stages: int, tied: bool, budget: int
) -> None:
    manifest = adapter_manifest(stages, tied=tied)
    runners = runners_of(manifest, graph_budget=budget)
    for microbatch in (0, 1):
        through(runners, microbatch)
        for runner in runners:
            assert not any(p.grad is not None for p in runner.stage.parameters())
            for request in list(runner._owed):
                runner.count_weights(request)
    expected = {n: g for n, g in whole_gradients(manifest, (0, 1)).items() if g is not None}
    found = {n: g for runner in runners for n, g in accumulated_gradients(runner).items()}
    assert found.keys() == expected.keys()
    assert all("lora_" in name for name in found)
    assert any(bool(gradient.any()) for gradient in found.values())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cut", [(0, 1), (1, 2), (2, 3)])
@settings(max_examples=10)
@given(data=st.data())
def test_a_split_backward_pass_equals_autograds_to_the_bit(
    dtype: ComputeDtype, cut: tuple[int, int], data: st.DataObject
) -> None:
    targets = data.draw(st.lists(st.sampled_from(ALL_TARGETS), min_size=1, unique=True))
    weights = data.draw(st.sampled_from([Weights.NOW, Weights.LATER]))
    adapters = AdapterConfig(rank=data.draw(st.integers(1, 5)), targets=tuple(targets))
    model = make_manifest(3, adapters=adapters, attention_bias="all").model
    stage_range = make_manifest(3).stages[cut[0]]
    stage = Stage(model, stage_range, cut[0] == 0, cut[1] == 3, dtype)
    initialise(stage, 7)
    stirred(stage)
    parameters: list[torch.Tensor] = [parameter for _, parameter in stage.all_parameters()]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**32)))
    ids = torch.randint(0, 64, (2, 16), generator=generator)
    entry = None
    if not stage.is_first:
        entry = torch.randn(2, 16, 32, generator=generator).to(stage.compute_dtype)
        entry.requires_grad_()

    def found(split: bool) -> list[torch.Tensor | None]:
        tape = WeightTape() if split else None
        inputs, targets_BT = ids if entry is None else entry, ids if stage.is_last else None
        if tape is None:
            output = stage(inputs, targets_BT)
        else:
            with tape.recording():
                output = stage(inputs, targets_BT)
            assert all(one in tape for one in parameters)
            assert not any(one in tape for _, one in stage.frozen_parameters())
        slope = None if stage.is_last else torch.ones_like(output)
        input_gradient, gradients = differentiate(
            Graph(entry, output, tape=tape), slope, parameters, weights, lambda: None
        )
        return [input_gradient, *gradients.computed()]

    for one, other in zip(found(split=False), found(split=True), strict=True):
        assert (one is None) == (other is None) == (stage.is_first and one is None)
        if one is not None and other is not None:
            assert one.dtype == other.dtype
            assert torch.equal(one, other)


def save_base(
    manifest: Manifest, index: int, path: Path, seed: int = 50
) -> dict[str, torch.Tensor]:
    """Write another model's parameters as the manifest's file of version 0."""
    base = make_manifest(manifest.stage_count)
    stage = Stage(base.model, manifest.stages[index], index == 0, index == manifest.stage_count - 1)
    initialise(stage, seed)
    tensors = {name: p.detach() for name, p in stage.all_parameters()}
    save_state(path, tensors, {"stage": str(index), "version": "0"})
    return tensors


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_newcomer_has_the_base_from_the_file_and_the_adapters_from_a_state(
    tmp_path: Path, staleness: int
) -> None:
    manifest = adapter_manifest(1)
    training = manifest.training.model_copy(update={"staleness": staleness})
    manifest = manifest.model_copy(update={"training": training})
    base = save_base(manifest, 0, tmp_path / "base")

    def worker() -> tuple[StageRunner, StepRunner]:
        runner = runners_of(manifest)[0]
        steps = StepRunner(runner)
        steps.load_base(tmp_path / "base")
        return runner, steps

    (holder, held), (runner, steps) = worker(), worker()
    begun = held.fingerprint()
    gradient = torch.full((holder.layout.count,), 0.5)
    for step in (1, 2):
        held.apply(type(STEP)(step), 1, 1.0, 0.01, gradient.clone())
    held.save(tmp_path / "state", Version(2))
    digest = held.fingerprint()
    assert steps.load(tmp_path / "state", Version(2)) == digest
    for parameter_set in runner.parameter_sets:
        for name, parameter in parameter_set.stage.frozen_parameters():
            assert torch.equal(parameter, base[name])
            # One copy, whatever the number of versions.
            assert parameter is dict(runner.stage.frozen_parameters())[name]
    inputs, targets = (torch.from_numpy(part.astype("int64")) for part in tokens_of(manifest, 0))
    assert torch.equal(holder.stage(inputs, targets), runner.stage(inputs, targets))
    assert steps.reinitialise(Version(0)) == begun
    assert all(
        torch.equal(parameter, base[name]) for name, parameter in runner.stage.frozen_parameters()
    )


def test_a_base_of_another_stage_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    manifest = adapter_manifest(2)
    steps = StepRunner(StageRunner(manifest, StageIndex(0), processor(), PLENTY, PLENTY))
    save_base(manifest, 1, tmp_path / "other")
    assert failure(steps.load_base, tmp_path / "other") == "bad_input"
    tensors = save_base(manifest, 0, tmp_path / "cut")
    tensors.popitem()
    save_state(tmp_path / "cut", tensors, {"stage": "0", "version": "0"})
    assert failure(steps.load_base, tmp_path / "cut") == "bad_input"
    (tmp_path / "damaged").write_bytes((tmp_path / "cut").read_bytes()[:100])
    assert failure(steps.load_base, tmp_path / "damaged") == "storage"
