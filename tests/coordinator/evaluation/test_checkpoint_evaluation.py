"""A checkpoint's evaluation, stage by stage, beside that of the uncut model."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kits.manifests import manifest_of, stage_ranges
from kits.runs.stage_files import small_manifest
from swarm_coordinator.evaluation import checkpoint_evaluation
from swarm_coordinator.evaluation.checkpoint_evaluation import (
    HeldoutLoss,
    heldout_loss,
    whole_model,
    written_text,
)
from swarm_coordinator.offline.reference import Microbatch, evaluate, insert_boundary_codecs
from swarm_shared.base.errors import ProtocolError, StorageError
from swarm_shared.data.tokenizer import BytesTokenizer
from swarm_shared.host.memory import HostMemory
from swarm_shared.model.initialise import build_stage, build_whole, empty_stage
from swarm_shared.model.llama import Stage
from swarm_shared.model.optimizer import make_optimizer
from swarm_shared.model.state import save_state, state_to_tensors
from swarm_shared.run.manifest import (
    Manifest,
)

LAYERS = 3
SMALL = small_manifest()
BYTES = BytesTokenizer()


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    cuts = sorted(draw(st.sets(st.integers(1, LAYERS - 1), max_size=LAYERS - 1)))
    codec = draw(st.sampled_from(["none", "int8", "int4"]))
    bottlenecks = tuple(cuts) if draw(st.booleans()) else ()
    return manifest_of(
        model={
            "hidden_size": 32, "intermediate_size": 48, "layers": LAYERS, "heads": 2,
            "sequence_length": 16, "tie_embeddings": draw(st.booleans()),
            "bottlenecks": bottlenecks, "bottleneck_size": 16 if bottlenecks else 0,
        },
        stages=stage_ranges(*cuts, LAYERS),
        training={
            "steps": 12, "microbatches_per_step": 3, "sequences_per_microbatch": 4,
            "seed": draw(st.integers(0, 9)),
            "dtype": draw(st.sampled_from(["float32", "bfloat16"])),
        },
        optimizer={"learning_rate": 0.02, "warmup_steps": 2},
        codecs={"activation": codec, "gradient": codec},
    )  # fmt: skip


def write_checkpoint(manifest: Manifest, folder: Path) -> list[Path]:
    """Write the states of version 0, as peers store them: with the optimizer's."""
    files = []
    for index in range(manifest.stage_count):
        stage = build_stage(manifest, index)
        path = folder / f"stage-{index}.safetensors"
        optimizer = make_optimizer(stage, manifest.optimizer)
        save_state(path, state_to_tensors(stage, optimizer), {"stage": str(index)})
        files.append(path)
    return files


def heldout(seed: int, count: int) -> list[Microbatch]:
    tokens = np.random.default_rng(seed).integers(0, 256, (count, 2, 17))
    return [(part[:, :-1], part[:, 1:]) for part in tokens]


@settings(max_examples=25)
@given(manifest=manifests(), seed=st.integers(0, 99), count=st.integers(1, 3))
def test_the_loss_is_that_of_the_uncut_model_to_the_bit(
    tmp_path_factory: pytest.TempPathFactory, manifest: Manifest, seed: int, count: int
) -> None:
    microbatches = heldout(seed, count)
    files = write_checkpoint(manifest, tmp_path_factory.mktemp("checkpoint"))
    whole = build_whole(manifest)
    insert_boundary_codecs(whole, manifest)
    expected = HeldoutLoss(evaluate(whole, microbatches), 32 * count)
    assert heldout_loss(manifest, files, microbatches) == expected


def test_no_earlier_stage_is_in_memory_when_the_next_one_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_checkpoint(SMALL, tmp_path)
    made: list[weakref.ref[Stage]] = []

    def empty(manifest: Manifest, index: int) -> Stage:
        assert [stage for stage in made if stage() is not None] == []
        stage = empty_stage(manifest, index)
        made.append(weakref.ref(stage))
        return stage

    monkeypatch.setattr(checkpoint_evaluation, "empty_stage", empty)
    heldout_loss(SMALL, files, heldout(1, 2))
    assert len(made) == SMALL.stage_count == 2


def test_a_checkpoint_of_another_model_or_that_is_gone_is_refused(tmp_path: Path) -> None:
    files = write_checkpoint(SMALL, tmp_path)
    with pytest.raises(ProtocolError, match="not this stage's"):
        heldout_loss(SMALL, files[::-1], heldout(1, 1))
    files[1].unlink()
    with pytest.raises(StorageError, match="cannot be read"):
        heldout_loss(SMALL, files, heldout(1, 1))


def test_the_whole_model_has_the_checkpoints_parameters(tmp_path: Path) -> None:
    loaded = dict(whole_model(SMALL, write_checkpoint(SMALL, tmp_path)).all_parameters())
    expected = dict(build_whole(SMALL).all_parameters())
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_a_text_continues_the_prompt(tmp_path: Path) -> None:
    files = write_checkpoint(SMALL, tmp_path)
    text = written_text(SMALL, files, BYTES, "def ", 30, seed=1)
    assert text.startswith("def ")
    assert len(text) > len("def ")
    assert written_text(SMALL, files, BYTES, "def ", 30, seed=1) == text
    assert written_text(SMALL, files, BYTES, "def ", 0, seed=1) == ""


class WritesNul(BytesTokenizer):
    def decode(self, ids: Sequence[int] | npt.NDArray[Any]) -> str:
        return "a\0b"


def test_a_text_that_a_database_cannot_store_is_changed(tmp_path: Path) -> None:
    files = write_checkpoint(SMALL, tmp_path)
    text = written_text(SMALL, files, WritesNul(), "def ", 3, seed=1)
    assert text == "a\N{REPLACEMENT CHARACTER}b"


def test_a_model_larger_than_half_of_the_free_memory_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = write_checkpoint(SMALL, tmp_path)
    size = sum(path.stat().st_size for path in files)

    def free(available: int) -> None:
        memory = HostMemory(2 * available, available)
        monkeypatch.setattr(checkpoint_evaluation, "host_memory", lambda: memory)

    free(2 * size - 2)
    assert written_text(SMALL, files, BYTES, "def ", 5, seed=1) == ""
    free(2 * size)
    assert written_text(SMALL, files, BYTES, "def ", 5, seed=1) != ""
