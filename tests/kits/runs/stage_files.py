"""Files of the stages of a small model, whose parameters all differ from the initial ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from kits.coordinator.run import put_checkpoint
from kits.manifests import manifest_of, stage_ranges
from swarm_coordinator.core.events import CheckpointRecord
from swarm_coordinator.durability.run_files import load_manifest
from swarm_coordinator.run_dir.folder import RunFolder
from swarm_shared.model.initialise import build_stage
from swarm_shared.model.state import save_state
from swarm_shared.run.manifest import Manifest


def small_manifest(**changes: Any) -> Manifest:
    """A model of three layers in two stages; `changes` are of the model."""
    return manifest_of(
        model={
            "vocabulary_size": 300, "hidden_size": 64, "intermediate_size": 96, "layers": 3,
            "heads": 4, "key_value_heads": 2, "sequence_length": 32, **changes,
        },
        stages=stage_ranges(2, 3), data={"token_bytes": 2},
        training={"steps": 5, "microbatches_per_step": 1, "sequences_per_microbatch": 1, "seed": 4},
        optimizer={"learning_rate": 0.05, "warmup_steps": 0},
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
