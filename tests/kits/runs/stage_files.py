"""Files of the stages of a small model, whose parameters all differ from the initial ones."""

from __future__ import annotations

from pathlib import Path

import torch

from kits.coordinator.run import put_checkpoint
from kits.peer_names import named
from kits.runs.no_data import NO_DATA
from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.model.initialise import build_stage
from swarm_shared.model.state import save_state
from swarm_shared.run.manifest import Manifest, OptimizerConfig, StageRange, TrainingConfig
from swarm_shared.run.model_config import ModelConfig


def small_manifest(*, tied: bool) -> Manifest:
    """A model of three layers in two stages."""
    return Manifest(
        name="test",
        organiser=named("Lord"),
        model=ModelConfig(
            vocabulary_size=300, hidden_size=64, intermediate_size=96, layers=3, heads=4,
            key_value_heads=2, sequence_length=32, tie_embeddings=tied,
        ),
        stages=(StageRange(first_layer=0, end_layer=2), StageRange(first_layer=2, end_layer=3)),
        data=NO_DATA,
        training=TrainingConfig(
            steps=5, microbatches_per_step=1, sequences_per_microbatch=1, seed=4
        ),
        optimizer=OptimizerConfig(learning_rate=0.05, warmup_steps=0),
    )  # fmt: skip


def write_stage_files(manifest: Manifest, folder: Path, scale: float = 0.05) -> list[Path]:
    """One file per stage; equal parameters get equal values in every stage."""
    folder.mkdir(exist_ok=True)
    paths = []
    for index in range(manifest.stage_count):
        stage = build_stage(manifest, index)
        with torch.no_grad():
            for name, parameter in stage.all_parameters():
                seed = torch.Generator().manual_seed(sum(name.encode()))
                parameter.add_(scale * torch.randn(parameter.shape, generator=seed))
        paths.append(folder / f"stage-{index}.safetensors")
        tensors = {name: parameter.detach() for name, parameter in stage.all_parameters()}
        save_state(paths[-1], tensors, {"stage": str(index)})
    return paths


def put_model(folder: RunFolder, version: int, scale: float = 0.05) -> CheckpointRecord:
    """A checkpoint of such files in a run's folder; the record is for the store."""
    files = write_stage_files(load_manifest(folder), folder.path.parent / "states", scale)
    return put_checkpoint(folder, version, [file.read_bytes() for file in files])
