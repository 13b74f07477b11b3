"""The parameters of the whole model, merged from the states of its stages.

Parameters have the same names in every cut (`swarm_shared.model.llama`), so merging is the union of
the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from swarm_shared.base.errors import StorageError
from swarm_shared.model.llama import Stage
from swarm_shared.model.state import is_parameter
from swarm_shared.run.manifest import StageRange
from swarm_shared.run.model_config import ModelConfig

REPLICA_TOLERANCE = 1e-4
"""Relative norm by which rounding may make the two replicas of a tied token table differ."""


@dataclass(frozen=True, slots=True)
class MergedStages:
    """The parameters of a whole model in the stages' files, checked against its configuration."""

    shapes: Mapping[str, tuple[int, ...]]
    """The shape of every parameter, in the order of the model; all are float32."""
    files: Mapping[str, Path]
    """The file of each parameter; of a tied table, the first stage's."""

    def read(self, name: str) -> torch.Tensor:
        """Read one parameter."""
        path = self.files[name]
        with _opened(path) as file:
            return _tensor(file, name)


@dataclass(frozen=True, slots=True)
class WithAdapters:
    """The parameters of a whole model with its adapters added to its matrices, in the place of
    `MergedStages`."""

    base: MergedStages
    adapters: MergedStages
    scale: float

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every parameter of the model without adapters, in its order."""
        return self.base.shapes

    def read(self, name: str) -> torch.Tensor:
        """Read one parameter, and compute W + scale B A where W has an adapter."""
        weight, module = self.base.read(name), name.removesuffix(".weight")
        first, second = f"{module}.lora_A.weight", f"{module}.lora_B.weight"
        if first in self.adapters.shapes:
            weight += self.scale * (self.adapters.read(second) @ self.adapters.read(first))
        return weight


def open_whole_model(
    config: ModelConfig, stage_state_files: Sequence[Path], initial: Sequence[Path]
) -> MergedStages | WithAdapters:
    """Open a model without adapters: its stages' states, or these added to what is frozen, of which
    `initial` has the files."""
    trained = open_stages(config, stage_state_files)
    if not config.has_adapters:
        return trained
    return WithAdapters(open_stages(config.base, initial), trained, config.adapters.scale)


def merge_stages(config: ModelConfig, stage_state_files: Sequence[Path]) -> dict[str, torch.Tensor]:
    """Read the parameters of all stages' files, checked against the configuration."""
    merged = open_stages(config, stage_state_files)
    return {name: merged.read(name) for name in merged.shapes}


def open_stages(config: ModelConfig, stage_state_files: Sequence[Path]) -> MergedStages:
    """Check the files of all stages against the configuration. StorageError if they are not of one
    checkpoint of this model. Reads the files' headers, and values of a tied table only."""
    expected = parameter_shapes(config)
    files: dict[str, Path] = {}
    for path in stage_state_files:
        with _opened(path) as stored:
            for name in stored.keys():  # noqa: SIM118
                if not is_parameter(name):
                    continue
                if name in expected:
                    _check_shape(stored, name, expected[name])
                if name in files:
                    _check_replica(files[name], path, name)
                files.setdefault(name, path)
    if files.keys() != expected.keys():
        wrong = sorted(files.keys() ^ expected.keys())
        raise StorageError(
            f"the stages' files do not make up this model: {len(wrong)} parameters are missing "
            f"or unknown (first {wrong[0]}); give one file of every stage of the same checkpoint"
        )
    return MergedStages(expected, files)


def parameter_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every trained parameter of the whole model."""
    all_layers = StageRange(first_layer=0, end_layer=config.layers)
    with torch.device("meta"):
        stage = Stage(config, all_layers, is_first=True, is_last=True)
    return {name: tuple(parameter.shape) for name, parameter in stage.all_parameters()}


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt", device="cpu") as file:
            yield file
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"{path} cannot be read as a stage's state ({error}); use an older checkpoint"
        ) from error


def _tensor(file: Any, name: str) -> torch.Tensor:
    tensor: torch.Tensor = file.get_tensor(name)
    return tensor


def _check_shape(file: Any, name: str, expected: tuple[int, ...]) -> None:
    stored = file.get_slice(name)
    if tuple(stored.get_shape()) != expected or stored.get_dtype() != "F32":
        raise StorageError(
            f"{name} is stored as {tuple(stored.get_shape())} {stored.get_dtype()}; {expected} in "
            "float32 is needed: use another checkpoint"
        )


def _check_replica(first_file: Path, second_file: Path, name: str) -> None:
    with _opened(first_file) as first_tensors, _opened(second_file) as second_tensors:
        first, second = _tensor(first_tensors, name), _tensor(second_tensors, name)
        fits = first.shape == second.shape
        # `not <=`: a NaN must not pass.
        if not fits or not bool((first - second).norm() <= REPLICA_TOLERANCE * first.norm()):
            raise StorageError(
                f"{name} in {second_file} differs from the copy in an earlier stage's file; give "
                "files of the same checkpoint"
            )
