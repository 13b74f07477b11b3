"""State: round trips to the bit, files never half-written, strict loading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from swarm_shared.base.errors import ProtocolError, StorageError
from swarm_shared.model.flat_gradients import FlatLayout
from swarm_shared.model.initialise import initialise
from swarm_shared.model.llama import Stage
from swarm_shared.model.optimizer import apply_step, fingerprint, make_optimizer
from swarm_shared.model.state import load_state, open_state, save_state, state_to_tensors
from swarm_shared.run.manifest import OptimizerConfig, StageRange
from swarm_shared.run.model_config import ModelConfig

MODEL = ModelConfig(
    vocabulary_size=50, hidden_size=32, intermediate_size=40, layers=3, heads=2,
    key_value_heads=1, sequence_length=8, tie_embeddings=True,
)  # fmt: skip
ADAMW = OptimizerConfig(learning_rate=0.01, warmup_steps=0)


def stage(seed: int = 1, start: int = 0) -> Stage:
    cut = StageRange(first_layer=start, end_layer=2)
    built = Stage(MODEL, cut, is_first=start == 0, is_last=False)
    initialise(built, seed)
    return built


def train(model: Stage, optimizer, first_step: int, end_step: int) -> None:
    layout = FlatLayout.of(model)
    for step in range(first_step, end_step):
        generator = torch.Generator().manual_seed(step)
        flat = torch.randn(layout.count, generator=generator)
        apply_step(optimizer, layout, flat, 0.01, 0.9)


def trained(steps: int = 3):
    model = stage()
    optimizer = make_optimizer(model, ADAMW)
    train(model, optimizer, 1, steps + 1)
    return model, optimizer


def test_training_on_after_a_round_trip_equals_training_without_to_the_bit(tmp_path):
    model, optimizer = trained()
    save_state(tmp_path / "stage.safetensors", state_to_tensors(model, optimizer), {"step": "3"})
    other = stage(seed=99)
    other_optimizer = make_optimizer(other, ADAMW)
    stored = open_state(tmp_path / "stage.safetensors")
    assert stored.metadata == {"step": "3"}
    load_state(other, other_optimizer, stored.tensors)
    assert fingerprint(other) == fingerprint(model)
    train(model, optimizer, 4, 8)
    train(other, other_optimizer, 4, 8)
    expected, seen = (
        state_to_tensors(model, optimizer),
        state_to_tensors(other, other_optimizer),
    )
    assert expected.keys() == seen.keys()
    for name in expected:
        assert torch.equal(expected[name], seen[name]), name
    assert seen["optimizer.step"].item() == 7


def test_a_stage_at_version_0_has_a_complete_state(tmp_path):
    model = stage()
    optimizer = make_optimizer(model, ADAMW)
    tensors = state_to_tensors(model, optimizer)
    parameters = len(list(model.parameters()))
    assert len(tensors) == 3 * parameters + 1
    load_state(model, optimizer, {name: tensor.clone() for name, tensor in tensors.items()})


def test_the_loaded_state_is_a_copy(tmp_path):
    model, optimizer = trained()
    tensors = {name: t.clone() for name, t in state_to_tensors(model, optimizer).items()}
    other = stage(2)
    load_state(other, make_optimizer(other, ADAMW), tensors)
    before = fingerprint(other)
    for tensor in tensors.values():
        tensor.zero_()
    assert fingerprint(other) == before


def test_equal_states_make_equal_bytes_that_the_library_reads(tmp_path):
    model, optimizer = trained()
    tensors = state_to_tensors(model, optimizer)
    tensors["extra.bfloat16"] = torch.arange(5).to(torch.bfloat16)
    tensors["extra.transposed"] = torch.arange(6.0).view(2, 3).T
    tensors["extra.empty"] = torch.zeros(0, 4)
    backwards = dict(reversed(list(tensors.items())))
    save_state(tmp_path / "a", tensors, {"b": "2", "a": "ä"})
    save_state(tmp_path / "b", backwards, {"a": "ä", "b": "2"})
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    seen = load_file(tmp_path / "a")
    assert seen.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(seen[name], tensor), name
        assert seen[name].dtype == tensor.dtype
    assert open_state(tmp_path / "a").metadata == {"a": "ä", "b": "2"}


def _broken(change):
    model, optimizer = trained()
    tensors = {name: t.clone() for name, t in state_to_tensors(model, optimizer).items()}
    change(tensors)
    return tensors


NORM = "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), "is missing"),
        (lambda t: t.pop("optimizer.step"), "is missing"),
        (lambda t: t.update(surprise=torch.zeros(1)), "is unknown"),
        (lambda t: t.update({NORM: torch.zeros(33)}), "has shape"),
        (lambda t: t.update({NORM: torch.zeros(1, 32)}), "has shape"),
        (lambda t: t.update({NORM: torch.zeros(32, dtype=torch.float64)}), "dtype"),
        (lambda t: t.update({"optimizer.step": torch.tensor(3.0)}), "dtype"),
        (lambda t: t.update({"optimizer.step": torch.tensor(-1)}), "optimizer step is -1"),
        (lambda t: t.update({"optimizer.step": torch.tensor(2**40)}), "optimizer step is"),
        (lambda t: t[NORM].__setitem__(4, float("nan")), "cannot have made"),
        (lambda t: t[NORM].__setitem__(4, float("inf")), "cannot have made"),
        (lambda t: t["optimizer.exp_avg_sq." + NORM].__setitem__(1, -1e-9), "cannot have made"),
    ],
)
def test_a_wrong_state_is_refused_and_changes_nothing(change, message):
    tensors = _broken(change)
    other = stage(5)
    optimizer = make_optimizer(other, ADAMW)
    before = {name: t.clone() for name, t in state_to_tensors(other, optimizer).items()}
    with pytest.raises(ProtocolError, match=message):
        load_state(other, optimizer, tensors)
    after = state_to_tensors(other, optimizer)
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("previous." + NORM), "is missing"),
        (lambda t: t.update({"previous.surprise": torch.zeros(1)}), "is unknown"),
        (lambda t: t.update({"previous." + NORM: torch.zeros(33)}), "has shape"),
        (lambda t: t["previous." + NORM].__setitem__(4, float("nan")), "cannot have made"),
    ],
)
def test_the_version_before_is_checked_like_the_newest(change, message):
    model, optimizer = trained()
    stored = state_to_tensors(model, optimizer, stage(3))
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    other, previous = stage(5), stage(6)
    other_optimizer = make_optimizer(other, ADAMW)
    load_state(other, other_optimizer, tensors, previous)
    assert fingerprint(other) == fingerprint(model)
    assert fingerprint(previous) == fingerprint(stage(3))
    change(tensors)
    with pytest.raises(ProtocolError, match=message):
        load_state(stage(5), other_optimizer, tensors, stage(6))
    with pytest.raises(ProtocolError, match="unknown"):
        load_state(other, other_optimizer, stored)


def test_the_state_of_another_stage_is_refused():
    model, optimizer = trained()
    other = stage(1, start=1)
    with pytest.raises(ProtocolError, match="not this stage's"):
        load_state(other, make_optimizer(other, ADAMW), state_to_tensors(model, optimizer))


def test_a_write_that_the_disk_refuses_loses_nothing(tmp_path: Path, files_no_larger_than):
    path = tmp_path / "stage.safetensors"
    model, optimizer = trained()
    save_state(path, state_to_tensors(model, optimizer), {"step": "3"})
    before = path.read_bytes()
    train(model, optimizer, 4, 5)
    with files_no_larger_than(20_000), pytest.raises(StorageError) as caught:
        save_state(path, state_to_tensors(model, optimizer), {"step": "4"})
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert path.read_bytes() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["stage.safetensors"]


@pytest.mark.parametrize("kept_bytes", [0, 4, 100, 5000])
def test_a_file_cut_short_is_reported_as_damaged(tmp_path, kept_bytes):
    path = tmp_path / "stage.safetensors"
    model, optimizer = trained()
    save_state(path, state_to_tensors(model, optimizer), {})
    path.write_bytes(path.read_bytes()[:kept_bytes])
    with pytest.raises(StorageError, match="cannot be read"):
        open_state(path)


def test_a_missing_file_is_reported(tmp_path):
    with pytest.raises(StorageError, match="cannot be read"):
        open_state(tmp_path / "nothing")
