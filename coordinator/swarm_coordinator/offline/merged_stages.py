"""The parameters of the whole model, merged from the states of its stages.

Parameters have the same names in every cut (`swarm_shared.model.llama`), so merging is the union of
the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from swarm_shared.base.errors import StorageError
from swarm_shared.model.llama import Stage
from swarm_shared.model.state import OPTIMIZER_PREFIX, PREVIOUS_PREFIX, open_state
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ModelConfig

REPLICA_TOLERANCE = 1e-4
"""Relative norm by which rounding may make the two replicas of a tied token table differ."""


def merge_stages(config: ModelConfig, stage_state_files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Merge the parameters of all stages' files and check them against the configuration."""
    merged: dict[str, torch.Tensor] = {}
    for path in stage_state_files:
        for name, tensor in open_state(path).tensors.items():
            if name.startswith((OPTIMIZER_PREFIX, PREVIOUS_PREFIX)):
                continue
            if name in merged:
                _check_replica(path, name, merged[name], tensor)
            else:
                merged[name] = tensor
    expected = parameter_shapes(config)
    if merged.keys() != expected.keys():
        wrong = sorted(merged.keys() ^ expected.keys())
        raise StorageError(
            f"the stages' files do not make up this model: {len(wrong)} parameters are missing "
            f"or unknown (first {wrong[0]}); give one file of every stage of the same checkpoint"
        )
    for name, shape in expected.items():
        if tuple(merged[name].shape) != shape or merged[name].dtype != torch.float32:
            raise StorageError(
                f"{name} is stored as {tuple(merged[name].shape)} {merged[name].dtype}; "
                f"{shape} in float32 is needed: use another checkpoint"
            )
    return merged


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model."""
    whole = StageRange(first_layer=0, end_layer=config.layers)
    with torch.device("meta"):
        stage = Stage(config, whole, is_first=True, is_last=True)
    return {name: tuple(parameter.shape) for name, parameter in stage.all_parameters()}


def _check_replica(path: Path, name: str, first: torch.Tensor, second: torch.Tensor) -> None:
    fits = first.shape == second.shape
    # `not <=`: a NaN must not pass.
    if not fits or not bool((first - second).norm() <= REPLICA_TOLERANCE * first.norm()):
        raise StorageError(
            f"{name} in {path} differs from the copy in an earlier stage's file; give files of "
            "the same checkpoint"
        )
